"""RMSNorm and rotary positions as llama.cpp and the published drafters compute them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Rope", "rms_norm"]


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x) * gain over the last axis, computed in float32, in the type of *x*."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide if gain is None else wide * gain.float()).to(x.dtype)


class Rope:
    """
    Rotation of pairs (i, i + dims / 2) at absolute positions: the NeoX order.

    Args:
        base: The frequency base.
        dims: Leading dimensions of a head that rotate; even.
        device: Where the frequencies are kept.
    """

    def __init__(self, base: float, dims: int, device: torch.device | str = "cpu") -> None:
        self.dims = dims
        exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
        self.frequencies = (base**-exponents).to(torch.float32).to(device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines float32[..., dims / 2] of integer *positions*."""
        angles = positions.to(torch.float32)[..., None] * self.frequencies
        return angles.cos(), angles.sin()

    def rotate(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """
        Rotate *x*.

        Args:
            x: [..., rows, heads, head_dim].
            tables: Of the rows' positions, [..., rows, dims / 2].
        """
        cos, sin = (table[..., None, :] for table in tables)
        half = self.dims // 2
        first, second = x[..., :half].float(), x[..., half : self.dims].float()
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
        return turned if self.dims == x.shape[-1] else torch.cat([turned, x[..., self.dims :]], dim=-1)
