"""What evaluates a drafter: the seam between the policy and the native and torch executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.types import SeqId, TokenId
from power_dflash.chains import Chain

__all__ = ["Executor", "Round"]


@frozen
class Round:
    """
    One sequence's part of a draft round.

    Args:
        seq: The sequence.
        position: Absolute position of the anchor.
        tokens: Of the block: the anchor, then mask ids.
        wanted: Draft positions that are read, from the first on.
    """

    seq: SeqId
    position: int
    tokens: Sequence[TokenId]
    wanted: int


class Executor(Protocol):
    """Weights and draft K/V of the target session's sequences. Used by one thread."""

    def open(self, seq: SeqId) -> None:
        """Make *seq* usable and empty."""

    def close(self, seq: SeqId) -> None:
        """Forget *seq*."""

    def end(self, seq: SeqId) -> int | None:
        """The position after the last row of target features, or None where there is none."""

    def extend(self, seq: SeqId, position: int, features: NDArray[np.float32]) -> None:
        """Take in target features float32[rows, blocks * hidden] of positions *position*, *position* + 1, ..."""

    def rollback(self, seq: SeqId, length: int | None) -> None:
        """Drop every row of *seq* from absolute position *length* on; None drops all."""

    def draft(self, rounds: Sequence[Round]) -> list[Chain]:
        """
        Denoise one block a sequence; no row of it stays.

        Returns:
            For each of *rounds* a chain of at least `wanted` tokens.
        """

    def shutdown(self) -> None:
        """Free everything. Idempotent."""
