"""
The draft KV ring: K and V of the last `cap` committed positions, in a fixed amount of memory.

Position p lives in slot p mod `slots`; keys keep the absolute rotation they were stored with, so nothing is ever
moved. Rows outside [committed - cap, committed) are masked with -inf. Pad rows go to one more slot, the trash slot,
which no mask ever shows. Every tensor has a fixed shape and every index is data, so a drafter's round is one graph.

Slots are grouped in chunks of `CHUNK`, and there is one chunk more than `cap` needs. A chunk then never shows old and
new positions at once, and attention, which adds chunk by chunk in order of position, gives the same bits as a cache
that forgets nothing and is masked to the same window. The spare chunk also makes a rollback of up to `CHUNK` rows
exact after the ring has wrapped: the rows it overwrote were out of the window already. Deeper rollbacks lose rows,
which are then masked, never misread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, frozen
from torch import Tensor

from power_core.errors import ShapeError

__all__ = ["CHUNK", "KvRing", "RingView"]

CHUNK = 64


@define
class _Extent:
    """Positions one sequence holds: [start, end) are valid; `high` is the highest end there ever was."""

    start: int
    end: int
    high: int


@frozen(eq=False)
class RingView:
    """
    What one round sees of the ring, for n sequences.

    Args:
        seqs: int64[n], rows of the ring's tensors.
        positions: int64[n, slots], the position each slot holds.
        visible: bool[n, slots].
        order: int64[n, chunks], chunks by the position they begin with.
    """

    seqs: Tensor
    positions: Tensor
    visible: Tensor
    order: Tensor


class KvRing:
    """
    K and V of a drafter's layers for several sequences.

    Args:
        layers: Layers of the drafter.
        kv_heads: Key and value heads.
        head_dim: Size of a head.
        cap: Committed rows that attention sees; the context size makes it a full cache.
        max_sequences: Sequence ids are 0 .. max_sequences - 1.
        dtype: Of the stored rows.
        device: Where they are.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        cap: int,
        max_sequences: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(layers, kv_heads, head_dim, cap, max_sequences) < 1:
            raise ShapeError("every size of a ring must be positive", who="KvRing", got=cap)
        self.cap = cap
        self.max_sequences = max_sequences
        self.chunks = -(-cap // CHUNK) + 1
        self.slots = self.chunks * CHUNK
        shape = (layers, max_sequences, kv_heads, self.slots + 1, head_dim)  # the last slot takes pad rows
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._slot = torch.arange(self.slots, device=device)
        self._extents: dict[int, _Extent | None] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors, pad slots included."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def open(self, seq: int) -> None:
        """Make *seq* usable and empty. Its slots are not cleared: masks hide what another request left."""
        if not 0 <= seq < self.max_sequences or seq in self._extents:
            raise ShapeError(f"sequence {seq} cannot be opened", who="KvRing", got=seq)
        self._extents[seq] = None

    def close(self, seq: int) -> None:
        """Forget *seq*."""
        del self._extents[seq]

    def end(self, seq: int) -> int | None:
        """The position after the last committed row, or None where there is none."""
        extent = self._extents[seq]
        return extent.end if extent is not None else None

    def place(self, seq: int, position: int, count: int, rows: int) -> Tensor:
        """
        Commit *count* rows from *position* on and say where they go.

        Args:
            seq: The sequence.
            position: Where the last row ended, or anything for the first one.
            count: Rows that are real, at most `cap`.
            rows: Rows that will be written: those after *count* are pad rows.

        Returns:
            int64[rows], the slot of each.

        Raises:
            ShapeError: A gap, or more rows than the ring has.
        """
        extent = self._extents[seq]
        if position < 0 or not 0 <= count <= min(rows, self.cap):
            raise ShapeError(f"{count} rows of {rows} at {position} do not fit", who="KvRing", got=count)
        if extent is not None and extent.end != position:
            raise ShapeError(f"rows begin at {position}", who="KvRing", got=position, expected=extent.end)
        if extent is None:
            extent = self._extents[seq] = _Extent(position, position, position)
        extent.end = position + count
        extent.high = max(extent.high, extent.end)
        index = torch.arange(rows, device=self._slot.device)
        return torch.where(index < count, (index + position) % self.slots, self.slots)

    def write(self, layer: int, seq: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store *keys* and *values* [kv_heads, rows, head_dim] of one layer at the slots `place` gave."""
        self.keys[layer, seq].index_copy_(1, slots, keys.to(self.keys.dtype))
        self.values[layer, seq].index_copy_(1, slots, values.to(self.values.dtype))

    def rollback(self, seq: int, length: int | None) -> None:
        """Take back every row of *seq* from position *length* on; None takes back all."""
        extent = self._extents[seq]
        if extent is None:
            return
        if length is None or length <= extent.start:
            self._extents[seq] = None
        else:
            extent.end = min(extent.end, length)

    def view(self, seqs: Sequence[int]) -> RingView:
        """What a round of *seqs* sees."""
        bounds = torch.tensor([self._bounds(seq) for seq in seqs], device=self._slot.device)
        low, end = bounds[:, :1], bounds[:, 1:]
        positions = end - 1 - (end - 1 - self._slot) % self.slots  # the latest position below `end` of each slot
        return RingView(
            seqs=torch.tensor(list(seqs), device=self._slot.device),
            positions=positions,
            visible=positions >= low,
            # The chunk `end` falls into holds new rows in front and masked ones behind, every other chunk one run of
            # positions: the first slot names a chunk's place in either case.
            order=torch.argsort(positions[:, ::CHUNK], dim=1),
        )

    def _bounds(self, seq: int) -> tuple[int, int]:
        """Lowest visible position and the end; slots above `high - slots` were not overwritten."""
        extent = self._extents[seq]
        if extent is None:
            return 0, 0
        return max(extent.start, extent.high - self.slots, extent.end - self.cap), extent.end
