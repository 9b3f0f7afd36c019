"""The native executor: a draft context of the target's own library evaluates the file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from power_core.artifacts import TensorFile
from power_core.draft_context import DraftBlock, DraftContext, DraftRows
from power_core.types import SeqId
from power_dspark.artifact import draft_ids
from power_dspark.executor import Chance, Drafted, Round
from power_dspark.header import Header

__all__ = ["NativeExecutor"]


class NativeExecutor:
    """
    Drives a `DraftContext`. Its rows carry the Markov bias along the same greedy chain already, and a row's extra
    output is the confidence head's number.

    Args:
        context: With the drafter loaded; owned.
        file: Where the reduced vocabulary is read from.
        header: Of the drafter.
    """

    def __init__(self, context: DraftContext, file: TensorFile, header: Header) -> None:
        self._context = context
        self._header = header
        self._ids = draft_ids(file)

    @property
    def max_sequences(self) -> int:
        return max(1, self._context.max_rows // self._header.block_size)

    def open(self, seq: SeqId) -> None:
        self._context.open(seq)

    def close(self, seq: SeqId) -> None:
        self._context.close(seq)

    def end_position(self, seq: SeqId) -> int | None:
        return self._context.end_position(seq)

    def inject(self, seq: SeqId, position: int, features: NDArray[np.float32]) -> None:
        self._context.inject(seq, position, features)

    def truncate(self, seq: SeqId, length: int) -> None:
        self._context.truncate(seq, length)

    def draft(self, rounds: Sequence[Round], rows: int, *, chances: bool) -> list[Drafted]:
        masks = [self._header.mask_id] * (rows - 1)
        try:
            answer = self._context.forward([DraftBlock(r.seq, r.position, [r.anchor, *masks]) for r in rounds])
            return [self._chain(answer, i * rows, rows, chances=chances) for i in range(len(rounds))]
        finally:
            for r in rounds:
                self._context.truncate(r.seq, r.position)

    def _chain(self, answer: DraftRows, start: int, rows: int, *, chances: bool) -> Drafted:
        predicting = range(start + self._header.first_row, start + rows)
        logits = [answer.logits(i) for i in predicting]
        confidences = self._confidences(answer, predicting)
        return Drafted(
            tokens=[int(row.argmax()) for row in logits],
            confidences=confidences,
            chances=[self._chance(row) for row in logits] if chances else None,
        )

    def _confidences(self, answer: DraftRows, rows: range) -> list[float] | None:
        if not self._header.dims.confidence:
            return None
        return [float(answer.extra(i)[0]) for i in rows]  # noqa: S610 - no Django query

    def _chance(self, row: NDArray[np.float32]) -> Chance:
        if self._ids is not None:
            row = row[self._ids]  # the others are -inf
        second, first = np.partition(row, len(row) - 2)[-2:] if len(row) > 1 else (-np.inf, row[0])
        top = 1.0 / float(np.exp(row - first).sum())
        return Chance(top, top * float(1.0 - np.exp(second - first)))

    def shutdown(self) -> None:
        self._context.shutdown()
