"""A target model in plain Python: any vocabulary, any memory, no file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from power_core.errors import ArtifactError
from power_core.shapes import ShapeIdentity, ShapeProfile, WidthClass
from power_core.target import SessionOptions
from power_core.testing.faults import Faults
from power_core.testing.numerics import LogitsFunction, Numerics
from power_core.testing.profiles import ProfileFactory, one_class
from power_core.testing.sessions import ScriptedSession
from power_core.testing.tokenizers import ScriptedTokenizer, small_vocabulary
from power_core.types import Capability, TargetIdentity, TokenId

__all__ = ["ScriptedBackend", "ScriptedTarget"]


class ScriptedTarget:
    """
    A `power_core.target.TargetModel` whose logits are a pure function of the tokens so far.

    Sessions check every rule of the protocol and raise `ProtocolViolation` on a broken one.

    Args:
        vocab_size: Number of ids; ignored where a tokenizer is given.
        tokenizer: The vocabulary, or None for `small_vocabulary(vocab_size)` without end ids.
        seed: Two seeds are two models.
        spread: Logits lie in [-spread, spread); the smaller, the flatter the distribution.
        order: Only the last *order* tokens count, so that texts repeat themselves; None counts them all.
        logits: Replaces those logits: called with the tokens so far, returns float32[vocab]. See `next_table`.
        context_size: Positions of a session that does not ask for another number.
        rollback_capacity: None for a memory that can be cut anywhere. S for one that keeps snapshots, as
            recurrent memory does: `truncate` then drops at most min(S, rows of the last forward - 1) rows, once
            a forward.
        snapshots: Whether a bounded memory can restore a checkpoint beyond its window.
        profile: The width classes: `one_class()`, `padded_class()` or `two_classes()`. Outside the decode
            class logits are disturbed, and stay so for everything that was evaluated there.
        hidden_size: Length of hidden states, answered for the layers that the session was opened with.
        num_layers: Blocks the model claims to have.
        faults: Where sessions and their rows fail on purpose.

    >>> from power_core.target import RowBatch
    >>> target = ScriptedTarget(vocab_size=4, seed=1)
    >>> session = target.open_session(SessionOptions())
    >>> session.open(0)
    >>> batch = RowBatch(4)
    >>> _ = batch.add_chain(0, 0, [2, 3], outputs=1)
    >>> session.forward(batch, session.profile.decode).greedy(1) == target.greedy([2, 3])
    True
    >>> session.close(0); session.assert_all_closed()
    """

    def __init__(
        self,
        vocab_size: int = 32,
        *,
        tokenizer: ScriptedTokenizer | None = None,
        seed: int = 0,
        spread: float = 4.0,
        order: int | None = None,
        logits: LogitsFunction | None = None,
        context_size: int = 256,
        rollback_capacity: int | None = None,
        snapshots: bool = True,
        profile: ProfileFactory | None = None,
        hidden_size: int = 8,
        num_layers: int = 4,
        faults: Faults | None = None,
    ) -> None:
        self.tokenizer = tokenizer or ScriptedTokenizer(small_vocabulary(vocab_size))
        self.trained_context = context_size
        self.rollback_capacity = rollback_capacity
        self.snapshots = snapshots
        self._make_profile = profile or one_class()
        self.faults = faults or Faults()
        self.sessions: list[ScriptedSession] = []
        vocab = self.tokenizer.vocab_size
        self.numerics = Numerics(vocab, seed=seed, spread=spread, order=order, logits=logits, hidden_size=hidden_size)
        self.identity = TargetIdentity(
            name=f"scripted-{seed}",
            architecture="scripted",
            file_sha256=_digest("model", seed, spread, order),
            tokenizer_sha256=_digest(*self.tokenizer.pieces),
            vocab_size=vocab,
            hidden_size=hidden_size,
            num_layers=num_layers,
        )

    def open_session(self, options: SessionOptions) -> ScriptedSession:
        session = ScriptedSession(self, options, self.faults)
        self.sessions.append(session)
        return session

    def facts(self) -> Mapping[str, Any]:
        return {"backend": "scripted", "architecture": "scripted"}

    def close(self) -> None:
        for session in self.sessions:
            session.shutdown()

    def profile(self, options: SessionOptions) -> ShapeProfile:
        """The profile of a session opened with *options*; its identities are this model's own."""
        made = self._make_profile(options)
        return evolve(made, decode=self._owned(made.decode), prefill=self._owned(made.prefill))

    def _owned(self, shape: WidthClass) -> WidthClass:
        facts = {"model": self.identity.file_sha256, "class": shape.identity.digest}
        return evolve(shape, identity=ShapeIdentity.of(facts))

    def capabilities(self, options: SessionOptions) -> frozenset[str]:
        """What a session opened with *options* can do."""
        names = {Capability.LOGITS, Capability.GREEDY_IDS, Capability.PREFIX_REUSE}
        if self.snapshots:
            names.add(Capability.STATE_SNAPSHOT)
        if options.hidden_layers:
            names.add(Capability.HIDDEN_STATES)
        return frozenset(str(name) for name in names)

    def logits(self, tokens: Sequence[TokenId]) -> NDArray[np.float32]:
        """float32[vocab] after *tokens*, all of them evaluated in the decode class."""
        state = self.numerics.start
        for token in tokens:
            state = self.numerics.extend(state, token, drifts=False)
        return self.numerics.row(state, tokens)

    def greedy(self, tokens: Sequence[TokenId]) -> TokenId:
        """The id that greedy decoding chooses after *tokens*."""
        return int(np.argmax(self.logits(tokens)))


class ScriptedBackend:
    """
    A `power_core.target.TargetBackend` that claims files ending in ``.scripted``.

    Args:
        load: Makes the model of a path; by default each file is a `ScriptedTarget` seeded by its content.

    >>> ScriptedBackend().claims(Path("toy.scripted"))
    True
    """

    suffix = ".scripted"

    def __init__(self, load: Callable[[Path], ScriptedTarget] | None = None) -> None:
        self._load = load or _target_of_content
        self.models: list[ScriptedTarget] = []

    def claims(self, path: Path) -> bool:
        return path.suffix == self.suffix

    def load(self, path: Path) -> ScriptedTarget:
        if not path.is_file():
            raise ArtifactError("there is no such file", who="scripted target", where=str(path))
        self.models.append(self._load(path))
        return self.models[-1]


def _target_of_content(path: Path) -> ScriptedTarget:
    seed = int.from_bytes(hashlib.sha256(path.read_bytes()).digest()[:8], "little")
    return ScriptedTarget(tokenizer=ScriptedTokenizer.chat(), seed=seed)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
