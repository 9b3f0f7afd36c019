"""Targets that break one rule each: a scripted target whose session, rows or tokenizer misbehaves in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import evolve

from power_core.errors import BackendError
from power_core.shapes import ExactnessLevel, ShapeIdentity
from power_core.target import RowBatch, SessionOptions, WidthClass
from power_core.testing import (
    ScriptedRows,
    ScriptedSession,
    ScriptedTarget,
    ScriptedTokenizer,
    padded_class,
    small_vocabulary,
)

BROKEN: dict[str, Callable[[int], ScriptedTarget]] = {}  # by rule; the argument is the seed of the weights


class Tokenizer(ScriptedTokenizer):
    """A chat vocabulary that can spell its own markers letter by letter."""

    @classmethod
    def chat(cls, size: int = 100) -> ScriptedTokenizer:
        letters = [*small_vocabulary(size), b"<", b"|", b">", b"/", b"(", b")", b"+", b":", b"="]
        start = len(letters)
        markers = [b"<s>", b"</s>", b"<|system|>", b"<|user|>", b"<|assistant|>"]
        return cls(
            letters + markers,
            end_ids={start + 1},
            special_ids=set(range(start, start + len(markers))),
            bos_id=start,
            eos_id=start + 1,
            roles={"system": start + 2, "user": start + 3, "assistant": start + 4},
            turn_end=start + 1,
        )


def good(seed: int = 3, **options: Any) -> ScriptedTarget:
    """The target that keeps every rule."""
    return ScriptedTarget(tokenizer=Tokenizer.chat(), seed=seed, **options)


class Target(ScriptedTarget):
    """A scripted target whose sessions are of `session_class`."""

    session_class: type[ScriptedSession] = ScriptedSession

    def __init__(self, **options: Any) -> None:
        super().__init__(tokenizer=options.pop("tokenizer", None) or Tokenizer.chat(), **options)

    def open_session(self, options: SessionOptions) -> ScriptedSession:
        session = self.session_class(self, options, self.faults)
        self.sessions.append(session)
        return session


def breaks(rule_id: str, **options: Any) -> Callable[[type], type]:
    """Register a session class, or a target class, as what breaks *rule_id*."""

    def register(cls: type) -> type:
        if issubclass(cls, ScriptedTarget):
            BROKEN[rule_id] = lambda seed: cls(seed=seed, **options)
        elif issubclass(cls, ScriptedTokenizer):
            BROKEN[rule_id] = lambda seed: Target(seed=seed, tokenizer=cls.chat(), **options)
        else:
            BROKEN[rule_id] = lambda seed: type("Broken", (Target,), {"session_class": cls})(seed=seed, **options)
        return cls

    return register


class Altered:
    """Rows whose answers go through `alter(kind, i, answer)`."""

    def __init__(self, rows: ScriptedRows, alter: Callable[[str, int, Any], Any]) -> None:
        self._rows = rows
        self._alter = alter

    @property
    def width(self) -> int:
        return self._alter("width", 0, self._rows.width)

    def greedy(self, i: int) -> int:
        return self._alter("greedy", i, self._rows.greedy(i))

    def logits(self, i: int) -> np.ndarray:
        return self._alter("logits", i, self._rows.logits(i))

    def hidden(self, i: int, layer: int) -> np.ndarray:
        return self._alter("hidden", i, self._rows.hidden(i, layer))


def nudged(row: np.ndarray) -> np.ndarray:
    """The same argmax, other bits: what another kernel does."""
    row = row.copy()
    row[np.argmin(row)] -= np.float32(1e-3)
    return row


class AlteringSession(ScriptedSession):
    """A session whose rows are `Altered` by its method `alter`."""

    def forward(self, batch: RowBatch, shape: WidthClass) -> Any:
        self.batch, self.shape = batch, shape
        self.seen = (batch.n, batch.seqs[: batch.n].tolist(), batch.positions[: batch.n].tolist(), batch.outputs.copy())
        return Altered(super().forward(batch, shape), self.alter)

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        return answer


# Numbers


@breaks("T-PROFILE-01")
class WrongLevel(Target):
    """Says bitwise, and pads single rows."""

    def __init__(self, **options: Any) -> None:
        padded = padded_class()
        super().__init__(profile=lambda wanted: evolve(padded(wanted), level=ExactnessLevel.BITWISE), **options)


@breaks("T-CAPABILITY-01")
class UnknownCapability(Target):
    def capabilities(self, options: SessionOptions) -> frozenset[str]:
        return super().capabilities(options) | {"telepathy"}


@breaks("T-DETERMINISM-01")
class EverySessionAnother(AlteringSession):
    """Late rows depend on how many sessions there were before, as with uninitialised memory."""

    def __init__(self, target: ScriptedTarget, *rest: Any) -> None:
        super().__init__(target, *rest)
        self._is_odd = len(target.sessions) % 2

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        late = self.seen[2][i] >= 30
        return nudged(answer) if kind == "logits" and self._is_odd and late else answer


@breaks("T-WIDTH-01")
class WideRowsDiffer(AlteringSession):
    """Forwards of seven decode rows or more take another kernel."""

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        is_wide = self.seen[0] >= 7 and len(set(self.seen[1])) == 1 and self.seen[2][0] > 0
        return nudged(answer) if kind == "logits" and is_wide and self.seen[3][:7].all() else answer


@breaks("T-WIDTH-02")
class WrongWidth(AlteringSession):
    def alter(self, kind: str, i: int, answer: Any) -> Any:
        return answer + 1 if kind == "width" else answer


@breaks("T-PREFILL-01")
class OddChunks(AlteringSession):
    """The last chunk of a prompt is computed another way if it is short and the prompt long."""

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        n, _, positions, _ = self.seen
        return nudged(answer) if kind == "logits" and n == 2 and positions[0] == 21 else answer


@breaks("T-BATCH-01")
class CompanionsMatter(AlteringSession):
    """A row beside another sequence's differs, as with a unified cache."""

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        return nudged(answer) if kind == "logits" and len(set(self.seen[1])) > 1 else answer


@breaks("T-BATCH-02")
class TurnsMatter(AlteringSession):
    """A forward of one sequence right after one of another differs."""

    _last = 0

    def forward(self, batch: RowBatch, shape: WidthClass) -> Any:
        seqs = set(batch.seqs[: batch.n].tolist())
        self._is_turn = seqs == {0} and self._last == 1
        rows = super().forward(batch, shape)
        self._last = int(batch.seqs[0])
        return rows

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        return nudged(answer) if kind == "logits" and self._is_turn else answer


@breaks("T-SHAPE-01")
class RandomIdentity(Target):
    """Digests `hash()`, which every process salts differently."""

    def profile(self, options: SessionOptions) -> Any:
        made = super().profile(options)
        identity = ShapeIdentity.of({"salted": hash("shape"), "of": self.identity.file_sha256})
        return evolve(
            made, decode=evolve(made.decode, identity=identity), prefill=evolve(made.prefill, identity=identity)
        )


@breaks("T-SHAPE-02")
class FalseUnity(AlteringSession):
    """Prompt rows in the decode class differ, although both classes have one identity."""

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        single = self.seen[0] == 1 and 6 <= self.seen[2][0] < 12 and self.seen[2][0] == self._singles
        return nudged(answer) if kind == "logits" and single and self._singles == 11 else answer

    _singles = 0

    def forward(self, batch: RowBatch, shape: WidthClass) -> Any:
        first = int(batch.positions[0])
        self._singles = first if batch.n == 1 and first == self._singles + 1 else 0
        return super().forward(batch, shape)


@breaks("T-SHAPE-03")
class ThreadsUnsaid(AlteringSession):
    """Logits depend on the thread count, the identity does not."""

    def __init__(self, target: ScriptedTarget, options: SessionOptions, *rest: Any) -> None:
        super().__init__(target, options, *rest)
        self._threads = options.threads

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        return nudged(answer) if kind == "logits" and self._threads == 2 else answer


@breaks("T-SHAPE-04")
class SameForAll(Target):
    """The identity does not name the model."""

    def profile(self, options: SessionOptions) -> Any:
        return self._make_profile(options)


# Rows


@breaks("T-IDENTITY-01")
class ShortDigest(Target):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.identity = evolve(self.identity, tokenizer_sha256="unknown")


@breaks("T-LOGITS-01")
class NotFinite(AlteringSession):
    """Masks an id with -inf, as some heads do."""

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        if kind == "logits":
            answer = answer.copy()
            answer[np.argmin(answer)] = -np.inf
        return answer


@breaks("T-LOGITS-02")
class OneBuffer(AlteringSession):
    """All rows share one buffer."""

    _buffer = None

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        if kind == "logits":
            if self._buffer is None:
                self._buffer = answer.copy()
            self._buffer[:] = answer
            return self._buffer
        return answer


@breaks("T-LOGITS-03")
class OutputsRenumbered(ScriptedSession):
    """Numbers rows among those that were asked for, where it is a proper part of a decode step."""

    def forward(self, batch: RowBatch, shape: WidthClass) -> Any:
        outputs = batch.outputs[: batch.n]
        first = int(np.argmax(outputs))
        count = int(outputs.sum())
        is_part = first == 2 and count == 2 and batch.n == 4
        rows = super().forward(batch, shape)

        class Shifted(Altered):
            def logits(self, i: int) -> np.ndarray:
                return self._rows.logits(5 - i) if is_part else self._rows.logits(i)

        return Shifted(rows, lambda _kind, _i, answer: answer)


@breaks("T-GREEDY-01")
class GreedyIsNumpy(AlteringSession):
    """Answers a numpy integer, which is no JSON and breaks the first receipt."""

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        return np.int64(answer) if kind == "greedy" else answer


@breaks("T-ROWS-01")
class RowsDieEarly(ScriptedSession):
    """Rows are gone once a sequence is cut."""

    def _cut(self, seq: int, length: int) -> None:
        super()._cut(seq, length)
        self._cuts = getattr(self, "_cuts", 0) + 1

    def forward(self, batch: RowBatch, shape: WidthClass) -> Any:
        rows, cuts = super().forward(batch, shape), getattr(self, "_cuts", 0)

        def alter(kind: str, i: int, answer: Any) -> Any:
            if getattr(self, "_cuts", 0) != cuts and kind != "width":
                raise BackendError("the rows are gone", who="broken")
            return answer

        return Altered(rows, alter)


@breaks("T-ARGS-01")
class ClearsTheBatch(ScriptedSession):
    """Marks the rows it computed as read in the caller's own batch."""

    def forward(self, batch: RowBatch, shape: WidthClass) -> Any:
        rows = super().forward(batch, shape)
        batch.outputs[: batch.n] = False
        return rows


@breaks("T-HIDDEN-01")
class HiddenInDoubles(AlteringSession):
    def alter(self, kind: str, i: int, answer: Any) -> Any:
        return answer.astype(np.float64) if kind == "hidden" else answer


@breaks("T-HIDDEN-02")
class HiddenReversed(ScriptedSession):
    """Hidden states of a decode step come in the wrong order."""

    def forward(self, batch: RowBatch, shape: WidthClass) -> Any:
        rows, n, is_decode = super().forward(batch, shape), batch.n, batch.positions[0] > 0

        class Reversed(Altered):
            def hidden(self, i: int, layer: int) -> np.ndarray:
                return self._rows.hidden(n - 1 - i if is_decode else i, layer)

        return Reversed(rows, lambda _kind, _i, answer: answer)
