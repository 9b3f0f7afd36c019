"""
The drafter protocol: what a strategy implements. A drafter only advises.

It never sees a sampler and never touches target state; what it proposes can change the speed of a
request, never its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from power_core.target import HiddenStates, TargetModel, TargetSession
from power_core.types import SeqId, TokenId

__all__ = ["DraftRequest", "DraftSession", "Drafter", "DrafterRequirements", "HiddenRows", "Proposal", "stop_length"]


@frozen
class DrafterRequirements:
    """
    What a drafter needs before it can be opened.

    Args:
        capabilities: Names from `Capability` that the target session must have.
        artifact_kind: Kind of artifact the drafter loads, or None for zero-weight drafters.
        hidden_layers: Target block outputs it reads.
        fixed_shape: Whether its proposals come in one length only: it is asked for K tokens or for none.
        sequential: Whether it computes one token after another, so that a shorter proposal costs less, and heeds
            `DraftRequest.stop_below`.
    """

    capabilities: frozenset[str] = frozenset()
    artifact_kind: str | None = None
    hidden_layers: tuple[int, ...] = ()
    fixed_shape: bool = False
    sequential: bool = False

    def timed_tokens(self, asked: int, proposed: int) -> int:
        """The tokens whose time a proposal took: those *proposed* if `sequential`, else all that were *asked* for."""
        return min(proposed, asked) if self.sequential else asked


@frozen
class DraftRequest:
    """
    Ask for one sequence's proposal.

    Args:
        seq: The sequence, known from `DraftSession.begin`.
        anchor: The last committed token; the proposal continues it.
        max_tokens: Most tokens wanted, at least 1.
        stop_below: A sequential drafter ends a proposal with the first token at which the product of its confidences
            is less: what would follow is too unlikely to be worth its time. Others need not read it.
    """

    seq: SeqId
    anchor: TokenId
    max_tokens: int
    stop_below: float = 0.0


@frozen
class Proposal:
    """
    A chain of proposed tokens; empty where the drafter has nothing to say.

    Args:
        token_ids: Tokens after the anchor, in order. Ids outside the vocabulary end the chain there.
        confidences: Chance in [0, 1] that each is accepted given that those before it were, or None
            where the method has no such number.
    """

    token_ids: Sequence[TokenId] = ()
    confidences: Sequence[float] | None = None


def stop_length(confidences: Sequence[float], stop_below: float) -> int:
    """
    How many tokens of these *confidences* a sequential drafter proposes; see `DraftRequest.stop_below`.

    >>> stop_length([0.9, 0.5, 0.9], 0.5), stop_length([0.9, 0.5, 0.9], 0.0)
    (2, 3)
    """
    chance = 1.0
    for length, confidence in enumerate(confidences, 1):
        chance *= confidence
        if chance < stop_below:
            return length
    return len(confidences)


@frozen
class HiddenRows:
    """
    The target rows that a commit kept, for drafters that read hidden states.

    Row i holds the state after evaluating the i-th kept token; row i chose `committed[i]` when the
    rows are the anchor and its accepted proposal.

    Args:
        rows: The states of the rows; to be read before `observe` returns.
        start: Index of the first kept row.
        count: Kept rows.
        position: Absolute position of the first kept row. Positions have no gaps between two calls, but the
            first call may start above 0: rows before it came out of a prompt cache, and their states are not known.
    """

    rows: HiddenStates = field(repr=False)
    start: int
    count: int
    position: int

    def features(self, layers: Sequence[int]) -> NDArray[np.float32]:
        """float32[count, len(layers) * hidden]: for each row the outputs of *layers*, side by side; a copy."""
        block = slice(self.start, self.start + self.count)
        return np.concatenate([self.rows.hidden(block, layer) for layer in layers], axis=1)


class DraftSession(Protocol):
    """Draft state of several sequences. Used by one thread at a time."""

    def begin(self, seq: SeqId, tokens: Sequence[TokenId]) -> None:
        """Start *seq* with the prompt *tokens*. The sequence must not be open; a failure leaves nothing behind."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """
        One proposal a request, in order, each of at most its `max_tokens`.

        After a failure every sequence is restored, and the requests are asked again one by one.
        """

    def observe(self, seq: SeqId, committed: Sequence[TokenId], rows: HiddenRows | None) -> None:
        """
        The target committed *committed* (possibly none, during prefill) and evaluated *rows*.

        *rows* is None unless the drafter's requirements name hidden layers. Where they do, several steps may come as
        one, just before the next proposal: a drafter that is not asked is told nothing it would have to pay for.
        """

    def checkpoint(self, seq: SeqId) -> object:
        """Retain the state of *seq*; called before each step's `propose`, so it must be cheap."""

    def restore(self, seq: SeqId, checkpoint: object) -> None:
        """Forget everything that happened to *seq* since *checkpoint*."""

    def end(self, seq: SeqId) -> None:
        """Forget *seq*. Called once for each `begin` that returned, whatever happened in between."""

    def close(self) -> None:
        """Free everything. Idempotent."""


@runtime_checkable
class Drafter(Protocol):
    """What a plugin's strategy factory returns."""

    def requirements(self) -> DrafterRequirements:
        """What must be there before `open` is called."""

    def open(self, model: TargetModel, session: TargetSession) -> DraftSession:
        """
        Make a draft session for *session*. The drafter may read facts of both and must not change either.

        Raises:
            CapabilityError: This target cannot be drafted for.
        """
