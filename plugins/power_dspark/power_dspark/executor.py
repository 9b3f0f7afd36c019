"""What evaluates a DSpark drafter: the seam between the policy and the native and torch executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.types import SeqId, TokenId

__all__ = ["Chance", "Drafted", "Executor", "Round"]


@frozen
class Round:
    """
    One sequence's part of a draft round.

    Args:
        seq: The sequence.
        position: Absolute position of the anchor.
        anchor: The last committed token.
    """

    seq: SeqId
    position: int
    anchor: TokenId


@frozen
class Chance:
    """Softmax of a row over the drafter's vocabulary: its largest number, and the gap to the second."""

    top: float
    gap: float


@frozen
class Drafted:
    """
    The greedy chain of one sequence, each token under the Markov bias of the one before.

    Args:
        tokens: One a predicting row.
        confidences: The confidence head's chance that each is accepted if those before it were; None without a head.
        chances: Of each token, where they were asked for.
    """

    tokens: Sequence[TokenId]
    confidences: Sequence[float] | None = None
    chances: Sequence[Chance] | None = None


class Executor(Protocol):
    """Weights and draft K/V of the target session's sequences. Used by one thread."""

    @property
    def max_sequences(self) -> int:
        """Most sequences of one `draft` at the drafter's block size."""

    def open(self, seq: SeqId) -> None:
        """Make *seq* usable and empty."""

    def close(self, seq: SeqId) -> None:
        """Forget *seq*."""

    def end_position(self, seq: SeqId) -> int | None:
        """The position after the last injected row, or None where there is none."""

    def inject(self, seq: SeqId, position: int, features: NDArray[np.float32]) -> None:
        """Add K and V of target *features* [rows, k * hidden] from absolute *position* on."""

    def truncate(self, seq: SeqId, length: int) -> None:
        """Drop every row of *seq* from position *length* on."""

    def draft(self, rounds: Sequence[Round], rows: int, *, chances: bool) -> list[Drafted]:
        """
        Denoise a block of *rows* rows for each of *rounds* and walk its chain; no row of it stays.

        Args:
            rounds: At most one a sequence, at most `max_sequences`.
            rows: Rows of every block, the anchor's included; at most the block size.
            chances: Whether `Drafted.chances` is wanted.
        """

    def shutdown(self) -> None:
        """Free everything. Idempotent."""
