"""The drafter evaluated by the target's own library, through the capability `draft-context`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from power_core.draft_context import DraftBlock, DraftContext, DraftRows
from power_core.types import SeqId
from power_dflash.chains import Chain, chain_of_logits, walk
from power_dflash.executor import Round
from power_dflash.header import Header

__all__ = ["NativeExecutor"]


class NativeExecutor:
    """
    Drives one draft context.

    Args:
        context: Opened with the drafter's file.
        header: Of that file.
        ids: Its reduced vocabulary, or None.
    """

    def __init__(self, context: DraftContext, header: Header, ids: NDArray[np.int64] | None) -> None:
        self._context = context
        self._header = header
        self._ids = ids

    def open(self, seq: SeqId) -> None:
        self._context.open(seq)

    def close(self, seq: SeqId) -> None:
        self._context.close(seq)

    def end(self, seq: SeqId) -> int | None:
        return self._context.end_position(seq)

    def extend(self, seq: SeqId, position: int, features: NDArray[np.float32]) -> None:
        self._context.inject(seq, position, features)

    def rollback(self, seq: SeqId, length: int | None) -> None:
        self._context.truncate(seq, length or 0)

    def draft(self, rounds: Sequence[Round]) -> list[Chain]:
        return [chain for batch in self._batches(rounds) for chain in self._draft(batch)]

    def shutdown(self) -> None:
        self._context.shutdown()

    def _batches(self, rounds: Sequence[Round]) -> Iterator[Sequence[Round]]:
        """Blocks that fit one pass; all of one length, as the library's convolution and lattice need them."""
        longest = max(len(each.tokens) for each in rounds)
        fit = max(self._context.max_rows // longest, 1)
        for length in sorted({len(each.tokens) for each in rounds}):
            alike = [each for each in rounds if len(each.tokens) == length]
            yield from (alike[start : start + fit] for start in range(0, len(alike), fit))

    def _draft(self, batch: Sequence[Round]) -> list[Chain]:
        blocks = [DraftBlock(each.seq, each.position, each.tokens) for each in batch]
        try:
            rows = self._context.forward(blocks, logits=self._header.selector is None)
            first = 0
            chains = []
            for each in batch:
                chains.append(self._chain(rows, first, each.wanted))
                first += len(each.tokens)
            return chains
        finally:
            for each in batch:  # masked rows must not be seen by the next round, nor block the next features
                self._context.truncate(each.seq, each.position)

    def _chain(self, rows: DraftRows, first: int, wanted: int) -> Chain:
        selector = self._header.selector
        start = first if self._header.anchor_drafts else first + 1
        if selector is None:
            logits = [rows.logits(row) for row in range(start, start + wanted)]
            if self._ids is not None:  # the other ids are -inf
                logits = [row[self._ids] for row in logits]
            return chain_of_logits(logits, self._ids)
        k = selector.top_k
        lattice = np.stack([rows.extra(row) for row in range(start, start + wanted)])  # noqa: S610 - no Django here
        return walk(lattice[:, :k].astype(np.int64), lattice[:, k : k + k * k].reshape(-1, k, k))
