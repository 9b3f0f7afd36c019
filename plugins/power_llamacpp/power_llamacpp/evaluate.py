"""
One forward as native decodes that stay inside a width class.

In a class that holds every row count from 1 on, all rows go into one decode: llama.cpp may split a
batch of several cache streams (8 rows of one sequence and 1 of another become parts of 2 and 7 rows),
and every part is in the class. In any other class each sequence is decoded alone, padded into the
class. Pad rows follow the sequence's last row and are cut afterwards; where the memory cannot be cut
they are rows of scratch sequences, which are emptied afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from power_core.errors import BackendError
from power_core.shapes import ShapeProfile, WidthClass
from power_core.target import RowBatch
from power_core.types import SeqId
from power_llamacpp.context import NativeContext
from power_llamacpp.plan import Chain, is_dense, scratch_sequences

__all__ = ["Computed", "Evaluator"]


class Computed(NamedTuple):
    """
    What a forward computed.

    Args:
        logits: float32[n, vocab]; a view of llama.cpp's buffer, or of the evaluator's.
        order: int[outputs]; the row of `logits` of each output asked for, in batch order.
        width: Rows computed, pad rows included.
        hidden: float32[rows, hidden] by layer, without pad rows; views like `logits`.
    """

    logits: NDArray[np.float32]
    order: NDArray[np.intp]
    width: int
    hidden: Mapping[int, NDArray[np.float32]]


class Evaluator:
    """
    Fills the native batch and decodes it.

    Args:
        context: The native context.
        profile: The classes to stay in.
        stride: Native ids per sequence: sequence s is native s * stride, followed by its scratch ids.
            They are neighbours because llama.cpp puts only consecutive ids into one part of a batch.
        is_recurrent: Whether rows cannot be cut from the memory, so that pad rows need scratch sequences.
        one_part: Whether a forward of several sequences must not be split into parts, because a later part
            could take what undoing an earlier one needs.
    """

    def __init__(
        self, context: NativeContext, profile: ShapeProfile, *, stride: int, is_recurrent: bool, one_part: bool
    ) -> None:
        self._context = context
        self._profile = profile
        self._stride = stride
        self._is_recurrent = is_recurrent
        self._one_part = one_part
        self._iota: NDArray[np.int32] = np.arange(context.batch_rows, dtype=np.int32)
        self._kept: NDArray[np.float32] | None = None

    def is_together(self, chains: Sequence[Chain], shape: WidthClass) -> bool:
        """Whether *chains* go into one decode."""
        return is_dense(shape) and (len(chains) == 1 or not self._one_part or self._is_one_part(chains))

    def _is_one_part(self, chains: Sequence[Chain]) -> bool:
        """Whether llama.cpp keeps *chains* in one part: equal row counts, consecutive native ids."""
        return self._stride == 1 and all(
            after.seq == before.seq + 1 and after.rows == before.rows for before, after in pairwise(chains)
        )

    def fits(self, chains: Sequence[Chain], shape: WidthClass) -> bool:
        """Whether every decode of *chains* would be inside *shape* and the native batch."""
        if self.is_together(chains, shape):
            widths: list[int | None] = [sum(chain.rows for chain in chains)]
        else:
            widths = [self._width(shape, chain.rows) for chain in chains]
        most = min(shape.max_rows, self._context.batch_rows)
        return all(width is not None and width <= most for width in widths)

    def _width(self, shape: WidthClass, rows: int) -> int | None:
        """Rows computed for *rows* rows of one sequence decoded alone, or None where *shape* has no such width."""
        if not self._is_recurrent:
            return shape.cover(rows)
        scratch = scratch_sequences(shape, rows)
        return None if scratch is None else rows * (1 + scratch)

    def run(self, batch: RowBatch, chains: Sequence[Chain], shape: WidthClass) -> Computed:
        """
        Decode *chains*, which `fits` has admitted.

        Raises:
            BackendError: llama.cpp failed; sequences may hold some of the rows.
        """
        if self.is_together(chains, shape):
            return self._run_together(batch)
        if len(chains) == 1:
            return self._run_alone(batch, chains[0], shape)
        return self._run_in_turn(batch, chains, shape)

    def _run_together(self, batch: RowBatch) -> Computed:
        n, native = batch.n, self._context.batch
        native.tokens[:n] = batch.tokens[:n]
        native.positions[:n] = batch.positions[:n]
        np.multiply(batch.seqs[:n], self._stride, out=native.seqs[:n])
        native.outputs[:n] = batch.outputs[:n]
        logits = self._context.decode(n)
        return Computed(logits, np.arange(len(logits)), n, self._context.hidden(n))

    def _run_alone(self, batch: RowBatch, chain: Chain, shape: WidthClass) -> Computed:
        width = self._width(shape, chain.rows) or chain.rows
        if self._is_recurrent:
            self._fill_scratch(batch, chain, width)
        else:
            self._fill_padded(batch, chain, width)
        flags = self._context.batch.outputs[:width]
        asked = np.flatnonzero(flags)
        self._widen_outputs(flags)
        logits = self._context.decode(width)
        self._drop_padding(chain, width)
        return Computed(logits, np.searchsorted(np.flatnonzero(flags), asked), width, self._context.hidden(chain.rows))

    def _run_in_turn(self, batch: RowBatch, chains: Sequence[Chain], shape: WidthClass) -> Computed:
        if self._kept is None:  # each decode overwrites llama.cpp's buffer
            self._kept = np.empty((self._context.max_outputs, self._context.model.vocab_size), np.float32)
        count = width = 0
        states: list[Mapping[int, NDArray[np.float32]]] = []
        for chain in chains:
            part = self._run_alone(batch, chain, shape)
            after = count + len(part.order)
            self._kept[count:after] = part.logits[part.order]
            count, width = after, width + part.width
            states.append({layer: rows.copy() for layer, rows in part.hidden.items()})
        hidden = {layer: np.concatenate([part[layer] for part in states]) for layer in states[0]}
        for rows in hidden.values():
            rows.flags.writeable = False
        return Computed(self._kept, np.arange(count), width, hidden)

    def _fill_padded(self, batch: RowBatch, chain: Chain, width: int) -> None:
        """*chain* and pad rows behind it, of the same sequence."""
        native, rows, end = self._context.batch, chain.rows, chain.first + chain.rows
        native.tokens[:rows] = batch.tokens[chain.first : end]
        native.tokens[rows:width] = batch.tokens[end - 1]
        native.positions[:width] = self._iota[:width] + chain.position
        native.seqs[:width] = self._native(chain.seq)
        native.outputs[:rows] = batch.outputs[chain.first : end]
        native.outputs[rows:width] = 0

    def _fill_scratch(self, batch: RowBatch, chain: Chain, width: int) -> None:
        """*chain* and copies of it in empty scratch sequences: equal row counts, so that they stay in one part."""
        native, rows, end = self._context.batch, chain.rows, chain.first + chain.rows
        blocks = width // rows
        native.tokens[:width].reshape(blocks, rows)[:] = batch.tokens[chain.first : end]
        native.positions[:width].reshape(blocks, rows)[:] = self._iota[:rows]
        native.positions[:rows] += chain.position
        native.seqs[:width].reshape(blocks, rows)[:] = self._native(chain.seq) + self._iota[:blocks, np.newaxis]
        native.outputs[:rows] = batch.outputs[chain.first : end]
        native.outputs[rows:width] = 0

    def _widen_outputs(self, flags: NDArray[np.int8]) -> None:
        """
        Flag further rows as outputs, last rows first, until their number is in the decode class.

        The last layer's feed-forward and the output matrix see only flagged rows: their number decides
        those kernels, as the number of rows decides the others.
        """
        count = int(np.count_nonzero(flags))
        wanted = self._profile.decode.cover(count) if count else None
        if wanted is not None and wanted > count:
            flags[np.flatnonzero(flags == 0)[count - wanted :]] = 1

    def _drop_padding(self, chain: Chain, width: int) -> None:
        if self._is_recurrent:
            dropped = self.empty_scratch(chain.seq)
        else:
            dropped = width == chain.rows or self._context.remove(self._native(chain.seq), chain.position + chain.rows)
        if not dropped:
            raise BackendError(f"llama.cpp would not drop the pad rows of sequence {chain.seq}", plugin="llamacpp")

    def empty_scratch(self, seq: SeqId) -> bool:
        """Empty the scratch sequences of *seq*; False where llama.cpp refused."""
        scratch = range(self._native(seq) + 1, self._native(seq) + self._stride)
        refused = [native for native in scratch if not self._context.remove(native, 0)]  # all are tried
        return not refused

    def _native(self, seq: SeqId) -> int:
        return seq * self._stride
