"""
Whether matrix kernels add in the same order at every row count.

A bf16 result hides most differences of its float32 sum: two orders of addition agree in thousands of values
and part in the next. Here every sum cancels, to nothing but what rounding leaves of it; that is another number
in every other order, and its leading bits survive bf16. Kernels are chosen by shape and type, never by value, so that
made-up matrices of the model's shapes stand for its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from attrs import field, frozen

from power_torch.hparams import HyperParameters
from power_torch.linear import Linear, make_linear

__all__ = ["KernelProbe"]

_BLOCK = 256  # distinct rows of a made-up matrix; more would only take longer to draw


@frozen(eq=False)
class _Case:
    """A product and rows whose results are rounding alone."""

    product: Linear
    rows: torch.Tensor
    _known: dict[int, tuple[torch.Tensor, bool]] = field(factory=dict, init=False)

    def agree(self, width: int, other: int) -> bool:
        """Whether calls of *width* rows and of *other*, no fewer, give a row the same bits at whatever index."""
        (narrow, is_narrow_stable), (wide, is_wide_stable) = self._result(width), self._result(other)
        return is_narrow_stable and is_wide_stable and torch.equal(narrow, wide[:width])

    def _result(self, width: int) -> tuple[torch.Tensor, bool]:
        """The first *width* rows in one call, and whether each is the same at other indices of it."""
        if width not in self._known:
            rows = self.rows[:width]
            result = self.product(rows)
            shifts = {1, width // 2} - {0, width}
            is_stable = all(torch.equal(self.product(rows.roll(n, 0)), result.roll(n, 0)) for n in shifts)
            self._known[width] = result, is_stable
        return self._known[width]


class KernelProbe:
    """
    Products of every shape in a model.

    Args:
        hparams: The model's sizes.
        dtype: Of its matrices.
        device: Where they are.
        most: The widest call.
    """

    def __init__(self, hparams: HyperParameters, dtype: torch.dtype, device: torch.device, most: int) -> None:
        self._shapes = sorted({*_shapes(hparams)})
        self._settings = most, dtype, device

    @cached_property
    def _cases(self) -> list[_Case]:
        generator = torch.Generator().manual_seed(0)
        return [_case(outputs, inputs, *self._settings, generator) for outputs, inputs in self._shapes]

    def agree(self, width: int, other: int) -> bool:
        """Whether forwards of both row counts add in one order, at every index of a row."""
        return all(case.agree(min(width, other), max(width, other)) for case in self._cases)


def _shapes(hparams: HyperParameters) -> Iterator[tuple[int, int]]:
    hidden = hparams.hidden_size
    yield hparams.query_size + 2 * hparams.kv_size, hidden
    yield hidden, hparams.query_size
    yield 2 * hparams.ffn_size, hidden
    yield hidden, hparams.ffn_size
    yield hparams.vocab_size, hidden


def _case(
    outputs: int, inputs: int, most: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> _Case:
    """A product of [outputs, inputs] in which each term has its negative somewhere else in the sum."""
    half = inputs // 2
    order = torch.randperm(inputs, generator=generator)
    block = torch.zeros(min(outputs, _BLOCK), inputs)
    block[:, :half] = torch.randn((len(block), half), generator=generator)
    block[:, half : 2 * half] = -block[:, :half]
    rows = torch.zeros(most, inputs)
    rows[:, :half] = torch.randn((most, half), generator=generator)
    rows[:, half : 2 * half] = rows[:, :half]
    matrix = block[:, order].to(dtype).repeat(-(-outputs // len(block)), 1)[:outputs]
    return _Case(make_linear(matrix.to(device)), rows[:, order].to(dtype).to(device))
