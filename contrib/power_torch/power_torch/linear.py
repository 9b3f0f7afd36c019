"""Matrix products with fixed weights, through the fastest kernel the device offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["Linear", "has_packed_kernels", "make_linear"]

Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in] -> [rows, out], in the weight's dtype."""

_LAYOUT_ROWS = 8  # the row count the packed layout is chosen for: that of a verify step


def has_packed_kernels() -> bool:
    """Whether this build of torch has oneDNN's linear kernels over weights packed once, which torch.compile uses."""
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch does not annotate it
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return bool(is_built) and all(hasattr(torch.ops.mkldnn, name) for name in names)


def make_linear(weight: torch.Tensor) -> Linear:
    """
    The product with *weight*, [out, in].

    On a CPU the weight is packed: for the few rows of a decode step that is about twice as fast as
    `torch.nn.functional.linear`, which meets the plain layout anew at each call. Whether rows come out the
    same at every width is not assumed of either: it is measured when a session is opened.
    """
    if weight.device.type == "cpu" and has_packed_kernels():
        try:
            return _packed(weight)
        except RuntimeError:  # a dtype that oneDNN cannot multiply on this processor
            pass
    return _plain(weight)


def _packed(weight: torch.Tensor) -> Linear:
    packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _LAYOUT_ROWS)  # noqa: SLF001 - no public one
    kernel = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - the same

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = kernel(x, packed, None, "none", [], "")
        return result

    product(weight.new_zeros((1, weight.shape[1])))  # raises here, rather than in a step, where it cannot run
    return product


def _plain(weight: torch.Tensor) -> Linear:
    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)

    return product
