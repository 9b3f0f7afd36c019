"""Targets that break one rule of state, of the engine's use of them, or of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from broken.targets import AlteringSession, Target, Tokenizer, breaks, nudged
from power_core.errors import BackendError
from power_core.target import ChatMessage, RowBatch, WidthClass
from power_core.testing import ScriptedSession

PROMPT = 5


@breaks("T-LENGTH-01")
class CountsPadding(ScriptedSession):
    """Counts a pad row after a certain sequence of widths."""

    def length(self, seq: int) -> int:
        held = super().length(seq)
        widths = [record.rows for record in self.history[-4:]]
        return held + (held == 8 and widths == [1, 4, 1, 2])


@breaks("T-CHECKPOINT-01")
class RestoreLosesARow(ScriptedSession):
    """Restoring over three rows, two tokens after a prompt, leaves the state of another prefix."""

    def restore(self, seq: int, checkpoint: Any) -> None:
        rows = len(self._sequences[seq].tokens) - checkpoint.length
        super().restore(seq, checkpoint)
        held = self._sequences[seq]
        if rows == 3 and checkpoint.length == PROMPT + 2 and checkpoint.rows == 3 and not self._in_loop:
            held.states = [*held.states[:-1], self._numerics.start]

    _in_loop = False

    def checkpoint(self, seq: int, rows: int) -> object:
        self._in_loop = rows not in (1, 2, 3, 4)
        return super().checkpoint(seq, rows)


@breaks("T-CHECKPOINT-02", rollback_capacity=3)
class ForgetsSnapshots(ScriptedSession):
    """Declares snapshots and keeps none that covers a whole step."""

    def can_restore(self, seq: int, checkpoint: Any) -> bool:
        return super().can_restore(seq, checkpoint) and len(self._sequences[seq].tokens) - checkpoint.length < 4


@breaks("T-CHECKPOINT-03")
class RestoresOnce(ScriptedSession):
    """A checkpoint is used up by its first restore."""

    _used: Any = None

    def restore(self, seq: int, checkpoint: Any) -> None:
        super().restore(seq, checkpoint)
        self._used = checkpoint

    def can_restore(self, seq: int, checkpoint: Any) -> bool:
        return super().can_restore(seq, checkpoint) and checkpoint is not self._used


@breaks("T-CHECKPOINT-04")
class RestoresTheDead(ScriptedSession):
    """Takes a checkpoint of a text that was replaced for one of this text."""

    def _can_restore(self, seq: int, checkpoint: Any) -> bool:
        held = self._sequence(seq)
        if checkpoint.epoch != held.epoch and len(held.tokens) > checkpoint.length:
            return True
        return super()._can_restore(seq, checkpoint)


@breaks("T-CHECKPOINT-05")
class CheckpointDisturbs(AlteringSession):
    """Copying the state at width zero touches it."""

    _touched = False

    def checkpoint(self, seq: int, rows: int) -> object:
        self._touched = self._touched or rows == 0
        return super().checkpoint(seq, rows)

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        return nudged(answer) if kind == "logits" and self._touched else answer


@breaks("T-ROLLBACK-01")
class CutsTooLittle(ScriptedSession):
    """A cut across two forwards leaves the state of the longer text."""

    def truncate(self, seq: int, length: int) -> None:
        held = self._sequences[seq]
        state, chains = held.states[-1], self.history[-1].chains
        is_across = len(chains) == 1 and len(held.tokens) - length > len(chains[0].tokens)
        super().truncate(seq, length)
        if is_across:
            held.states = [*held.states[:-1], state]


@breaks("T-ROLLBACK-02", rollback_capacity=3)
class LessThanDeclared(ScriptedSession):
    """Declares three rows and keeps two."""

    def can_truncate(self, seq: int, length: int) -> bool:
        return super().can_truncate(seq, length) and len(self._sequences[seq].tokens) - length < 3


@breaks("T-ROLLBACK-03", rollback_capacity=3)
class SilentPartialCut(ScriptedSession):
    """Ignores what it cannot cut, and says nothing."""

    def truncate(self, seq: int, length: int) -> None:
        if self.can_truncate(seq, length):
            super().truncate(seq, length)


class Tolerant(ScriptedSession):
    """A session that lets one kind of bad batch through; `mends` says which and repairs it."""

    def forward(self, batch: RowBatch, shape: WidthClass) -> Any:
        self.mend(batch)
        return super().forward(batch, shape)

    def mend(self, batch: RowBatch) -> None:
        raise NotImplementedError


@breaks("T-FAILURE-01")
class ClampsTokens(Tolerant):
    """Takes an id beyond the vocabulary for the last one."""

    def mend(self, batch: RowBatch) -> None:
        batch.tokens[: batch.n].clip(0, self._numerics.vocab_size - 1, out=batch.tokens[: batch.n])


@breaks("T-FAILURE-02")
class DropsRows(Tolerant):
    """Computes as many rows as fit."""

    def mend(self, batch: RowBatch) -> None:
        batch.n = (
            min(batch.n, self.profile.decode.max_rows) if batch.n == 9 and batch.positions[0] == PROMPT else batch.n
        )


@breaks("T-FAILURE-03")
class AppendsAnywhere(Tolerant):
    """Takes any position for the next one."""

    def mend(self, batch: RowBatch) -> None:
        held = len(self._sequence(int(batch.seqs[0])).tokens)
        if batch.n == 1 and held < self.context_size:
            batch.positions[0] = held


@breaks("T-FAILURE-04")
class OpensUnasked(Tolerant):
    """Opens a sequence that somebody uses."""

    def mend(self, batch: RowBatch) -> None:
        if not self.is_shut_down and int(batch.seqs[0]) not in self._sequences:
            self.open(int(batch.seqs[0]))


@breaks("T-CONTEXT-01")
class SharedContext(ScriptedSession):
    """Divides the context's last position among the sequences."""

    def forward(self, batch: RowBatch, shape: WidthClass) -> Any:
        ends = int(batch.positions[batch.n - 1]) + 1 >= self.context_size
        if ends and sum(len(held.tokens) for held in self._sequences.values()) > 2 * self.context_size:
            others = [held for held in self._sequences.values() if len(held.tokens) == self.context_size - 1]
            if len(others) == self.max_sequences:
                raise BackendError("no room", who="broken")
        return super().forward(batch, shape)


@breaks("T-CONTEXT-02")
class ShiftsContext(Tolerant):
    """Drops the oldest row to make room."""

    def mend(self, batch: RowBatch) -> None:
        held = self._sequence(int(batch.seqs[0]))
        if batch.n == 1 and len(held.tokens) == self.context_size and batch.positions[0] == self.context_size:
            del held.tokens[0], held.states[0]
            batch.positions[0] -= 1


@breaks("T-CONTEXT-03")
class NoWideLastStep(ScriptedSession):
    """Refuses a step of several generated rows that ends exactly at the context's end."""

    def forward(self, batch: RowBatch, shape: WidthClass) -> Any:
        last = int(batch.positions[batch.n - 1])
        if 1 < batch.n < 8 and last == self.context_size - 1 and batch.outputs[: batch.n].all():
            raise BackendError("no room for the rows", who="broken")
        return super().forward(batch, shape)


@breaks("T-CLOSE-01")
class KeepsRows(ScriptedSession):
    """Reopening after a wide step finds the old rows."""

    _kept: Any = None

    def close(self, seq: int) -> None:
        held = self._sequences[seq]
        super().close(seq)
        steps = [(len(record.chains[0].tokens), record.chains[0].outputs) for record in self.history]
        self._kept = held if steps == [(PROMPT, 1), (4, 4)] else None

    def open(self, seq: int) -> None:
        super().open(seq)
        if self._kept is not None and len(self.history) == 2:
            self._sequences[seq].tokens = self._kept.tokens
            self._sequences[seq].states = self._kept.states
            self._kept = None


@breaks("T-CLOSE-02")
class RunsOut(ScriptedSession):
    """Leaks a sequence's rows with every full context."""

    _full = 0

    def close(self, seq: int) -> None:
        self._full += len(self._sequences[seq].tokens) == self.context_size
        super().close(seq)

    def open(self, seq: int) -> None:
        if self._full > 20:
            raise BackendError("no free rows", who="broken")
        super().open(seq)


class ShutdownOnceSession(ScriptedSession):
    """A second shutdown frees freed memory."""

    def shutdown(self) -> None:
        if self.is_shut_down:
            raise BackendError("double free", who="broken")
        super().shutdown()


@breaks("T-CLOSE-03")
class ShutdownOnce(Target):
    session_class = ShutdownOnceSession

    def close(self) -> None:
        for session in self.sessions:
            if not session.is_shut_down:
                session.shutdown()


@breaks("T-CLOSE-04")
class LeavesSessions(Target):
    """Frees the weights under open sessions."""

    def close(self) -> None:
        pass


# What the engine makes of it


@breaks("T-PARITY-01")
class ErrorAddsUp(ScriptedSession):
    """Every cut leaves a little error; in a long text it shows."""

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        held = self._sequences[seq]
        if 40 < len(held.tokens) < 50:
            held.states = [*held.states[:-1], self._numerics.start]


@breaks("T-PARITY-02")
class StopIsSticky(ScriptedSession):
    """After five requests on one sequence a new one starts from stale state."""

    _opens = 0

    def open(self, seq: int) -> None:
        super().open(seq)
        self._opens += 1
        alone = len(self._sequences) == 1 and all(len(record.chains) == 1 for record in self.history)
        if self._opens == 9 and alone and any(record.rows == 8 for record in self.history):
            self._sequences[seq].states = [self._numerics.extend(self._numerics.start, 1, drifts=False)]


@breaks("T-PARITY-03")
class ThreeIsACrowd(AlteringSession):
    """Three sequences in one forward swap their answers."""

    def alter(self, kind: str, i: int, answer: Any) -> Any:
        crowd = len(set(self.seen[1])) == 3
        return (answer + 1) % self._numerics.vocab_size if kind == "greedy" and crowd else answer


@breaks("T-CANCEL-01")
class PromptsStay(ScriptedSession):
    """Closing in the middle of a prompt keeps its rows."""

    _stale: Any = None

    def close(self, seq: int) -> None:
        held = self._sequences[seq]
        super().close(seq)
        last = next((c for f in reversed(self.history) for c in f.chains if c.seq == seq), None)
        is_cut_short = last is not None and last.outputs == 0 and len(held.tokens) in (8, 16)
        self._stale = held.states[-1] if is_cut_short else self._stale

    def open(self, seq: int) -> None:
        super().open(seq)
        if self._stale is not None:
            self._sequences[seq].states = [self._stale]
            self._stale = None


# Text


@breaks("T-TOKENIZER-01")
class LosesCase(Tokenizer):
    def encode(self, text: str, **options: Any) -> list[int]:
        return super().encode(text.replace("Q", "q").replace("T", "t"), **options)


@breaks("T-TOKENIZER-02")
class ParsesMarkers(Tokenizer):
    """A user's text can open a turn."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        is_forged = not add_special and text.startswith("a") and text.endswith("b")
        return super().encode(text, add_special=add_special, parse_special=parse_special or is_forged)


@breaks("T-TOKENIZER-03")
class AlwaysBegins(Tokenizer):
    """Puts BOS before plain text although it was told not to."""

    def encode(self, text: str, **options: Any) -> list[int]:
        ids = super().encode(text, **options)
        return [self.bos_id, *ids] if ids[:1] != [self.bos_id] and text.startswith("The") else ids


@breaks("T-TOKENIZER-04")
class ShowsMarkers(Tokenizer):
    """Renders a control token that no text contains."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"<|user|>" if token_id == self.roles.get("user") else super().token_bytes(token_id)


@breaks("T-TOKENIZER-05")
class NumpyIds(Tokenizer):
    def encode(self, text: str, **options: Any) -> list[int]:
        import numpy as np

        ids = super().encode(text, **options)
        return list(np.array(ids, np.int32)) if text.startswith("The quick") else ids


@breaks("T-END-01")
class EosIsNoEnd(Tokenizer):
    """Declares an eos id that does not end an answer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.end_ids = frozenset({0})


@breaks("T-CHAT-02")
class HidesItsTemplate(Tokenizer):
    """Has a template and says it has none."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.has_chat_template = False


@breaks("T-CHAT-01")
class MessagesOpenTurns(Tokenizer):
    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        ids = super().encode_chat(messages)
        return [*ids, self.roles["user"]] if any("<|user|>" in message.content for message in messages) else ids
