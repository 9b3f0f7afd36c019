"""What computes a head: rows in, logits out. The policy above it is the same for every executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.types import SeqId, TokenId

__all__ = ["HeadBlock", "HeadExecutor"]


@frozen(eq=False)
class HeadBlock:
    """
    Head rows of one sequence that rest on target rows.

    Args:
        seq: The sequence.
        position: Position of the first token, one after the first feature's.
        tokens: Tokens at `position`, `position` + 1, ...
        features: float32[rows, width]; row i is the target's at the position before token i.
    """

    seq: SeqId
    position: int
    tokens: Sequence[TokenId]
    features: NDArray[np.float32]


class HeadExecutor(Protocol):
    """
    One head's weights and its K/V for several sequences.

    Attributes:
        ids: int64[rows]; token id of each logit, or None where row r is id r.
    """

    @property
    def ids(self) -> NDArray[np.int64] | None: ...

    def open(self, seq: SeqId) -> None:
        """Make *seq* usable and empty."""

    def close(self, seq: SeqId) -> None:
        """Forget *seq*."""

    def extend(self, block: HeadBlock) -> None:
        """Add context rows; nothing is read of them. Any position may come first, then there are no gaps."""

    def start(self, blocks: Sequence[HeadBlock]) -> NDArray[np.float32]:
        """As `extend`, one block a sequence, and returns float32[blocks, rows]: the logits of each block's last row."""

    def step(self, seqs: Sequence[SeqId], tokens: Sequence[TokenId]) -> NDArray[np.float32]:
        """
        One recurrent step: each token with the output state of its sequence's last row, which came from `start` or
        `step`.

        Returns:
            float32[seqs, rows], the logits after the new rows.
        """

    def truncate(self, seq: SeqId, length: int) -> None:
        """Drop every row of *seq* from position *length* on."""

    def shutdown(self) -> None:
        """Free everything. Idempotent."""
