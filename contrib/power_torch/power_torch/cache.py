"""The static key/value cache: every sequence has its place for the whole context from the start."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from power_torch.hparams import HyperParameters

__all__ = ["KvCache", "spans_of"]

_SPAN_STEP = 128
_FINE_SPANS = 8  # up to this many steps each multiple is a span; beyond, four spans lie between powers of two


def spans_of(context: int) -> tuple[int, ...]:
    """
    Row counts that attention reads a sequence's cache in, the last at least *context*: few, so that all are checked.

    >>> spans_of(300)
    (128, 256, 384)
    >>> spans_of(4096)[-4:]
    (2560, 3072, 3584, 4096)
    """
    spans = [_SPAN_STEP]
    while spans[-1] < context:
        steps = spans[-1] // _SPAN_STEP
        spans.append((steps + max(1, 1 << steps.bit_length() >> 3)) * _SPAN_STEP)
    return tuple(spans)


class KvCache:
    """
    Keys and values, float32[layers, sequences, 2 * kv_heads, context, head_dim], keys first.

    float32 whatever the matrices are: at the few rows of a step these products are not what costs, and on a
    CPU they are faster than in bf16. Memory is the system's zero pages until a row is written.

    Args:
        hparams: Of the model.
        sequences: Sequences kept.
        context: Positions each may hold.
        device: Where.
    """

    def __init__(self, hparams: HyperParameters, sequences: int, context: int, device: torch.device) -> None:
        self.spans = spans_of(context)
        self.kv_heads = hparams.num_kv_heads
        shape = (hparams.num_layers, sequences, 2 * self.kv_heads, self.spans[-1], hparams.head_dim)
        # Unwritten rows must be finite: attention multiplies them by 0.
        if device.type == "cpu":
            self._data = _lazy_zeros(shape)
        else:
            self._data = torch.zeros(shape, device=device)
        self._views: dict[int, tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def span(self, length: int) -> int:
        """The smallest span that holds *length* rows."""
        return next(span for span in self.spans if span >= length)

    def write(self, layer: int, seq: int, position: int, rows: torch.Tensor) -> None:
        """Store *rows*, [rows, 2 * kv_heads, head_dim], from *position* on."""
        place = self._data[layer, seq].narrow(1, position, rows.shape[0])
        place.copy_(rows.transpose(0, 1))

    def rows(self, seq: int, position: int, count: int) -> torch.Tensor:
        """[count, layers * 2 * kv_heads * head_dim]: a copy of what *count* rows left behind."""
        return self._data[:, seq, :, position : position + count].permute(2, 0, 1, 3).reshape(count, -1)

    def copy_out(self, seq: int, length: int) -> NDArray[np.float32]:
        """float32[layers, 2 * kv_heads, length, head_dim]: the first *length* rows of *seq*, in main memory."""
        rows = self._data[:, seq, :, :length].clone(memory_format=torch.contiguous_format)
        copy: NDArray[np.float32] = rows.cpu().numpy()
        return copy

    def accepts(self, rows: NDArray[np.float32]) -> bool:
        """Whether *rows* have the shape that `copy_out` gives."""
        layers, _, heads, context, width = self._data.shape
        return (
            rows.ndim == 4 and (*rows.shape[:2], rows.shape[3]) == (layers, heads, width) and rows.shape[2] <= context
        )

    def copy_in(self, seq: int, rows: NDArray[np.float32]) -> None:
        """Make *rows*, as `copy_out` gives them, the first ones of *seq*."""
        writable = np.require(rows, requirements="W")  # torch warns of memory that is not, as that of a file's bytes
        self._data[:, seq, :, : rows.shape[2]] = torch.from_numpy(writable).to(self._data.device)

    def views(self, seq: int, span: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each layer the first *span* keys, [kv_heads, head_dim, span], and values, [kv_heads, span, head_dim]."""
        known = self._views.get(seq)
        if known is not None and known[0] == span:
            return known[1]
        heads = self.kv_heads
        rows = self._data[:, seq, :, :span]
        views = [(layer[:heads].transpose(1, 2), layer[heads:]) for layer in rows]
        self._views[seq] = (span, views)
        return views


def _lazy_zeros(shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros that take memory when they are written, aligned as torch's own memory: kernels may depend on that."""
    count, alignment = math.prod(shape), 64
    memory = np.zeros(count + alignment // 4, np.float32)
    start = -memory.ctypes.data % alignment // 4
    return torch.from_numpy(memory[start : start + count]).view(shape)
