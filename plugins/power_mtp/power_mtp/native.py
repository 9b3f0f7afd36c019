"""The native executor: a draft context of the target's own backend computes the head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from power_core.draft_context import DraftBlock, DraftContext
from power_core.types import SeqId, TokenId
from power_mtp.executor import HeadBlock

__all__ = ["NativeHead"]


class NativeHead:
    """
    Drives a draft context with a prediction (NextN) layer.

    Args:
        context: The context; it is shut down with the executor.
    """

    ids = None  # logits come over the whole vocabulary

    def __init__(self, context: DraftContext) -> None:
        self._context = context
        self._ends: dict[SeqId, int] = {}
        self._states: dict[SeqId, NDArray[np.float32]] = {}  # the last row's, for the next step

    def open(self, seq: SeqId) -> None:
        self._context.open(seq)

    def close(self, seq: SeqId) -> None:
        self._ends.pop(seq, None)
        self._states.pop(seq, None)
        self._context.close(seq)

    def extend(self, block: HeadBlock) -> None:
        rows = DraftBlock(block.seq, block.position, block.tokens, block.features, outputs=0)
        self._context.forward([rows], logits=False)
        self._ends[block.seq] = block.position + len(block.tokens)

    def start(self, blocks: Sequence[HeadBlock]) -> NDArray[np.float32]:
        return self._forward([DraftBlock(b.seq, b.position, b.tokens, b.features, outputs=1) for b in blocks])

    def step(self, seqs: Sequence[SeqId], tokens: Sequence[TokenId]) -> NDArray[np.float32]:
        return self._forward(
            [
                DraftBlock(seq, self._ends[seq], [token], self._states[seq][None], outputs=1)
                for seq, token in zip(seqs, tokens, strict=True)
            ]
        )

    def truncate(self, seq: SeqId, length: int) -> None:
        if self._ends.get(seq, 0) > length:
            self._context.truncate(seq, length)
            self._ends[seq] = length

    def shutdown(self) -> None:
        self._context.shutdown()

    def _forward(self, blocks: Sequence[DraftBlock]) -> NDArray[np.float32]:
        """Evaluate *blocks*; keeps each block's last state and returns the logits of its last row."""
        rows = self._context.forward(blocks)
        last, found = -1, []
        for block in blocks:
            last += len(block.tokens)
            self._ends[block.seq] = block.position + len(block.tokens)
            self._states[block.seq] = rows.extra(last).copy()  # noqa: S610 - no query; the row is gone at the next call
            found.append(rows.logits(last))
        return np.stack(found)
