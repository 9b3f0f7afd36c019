"""Rotary position embeddings as one complex multiplication."""

from __future__ import annotations

import torch

from power_torch.hparams import HyperParameters

__all__ = ["interleave", "rotation_table"]


def interleave(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """
    Reorder the first dimension, [heads * head_dim, ...], so that the two halves of each rotated pair are neighbours.

    A pair is then one complex number, and rotating it one multiplication. Products of queries and keys do not
    change, as both are reordered alike.
    """
    rows = heads.reshape(-1, 2, head_dim // 2, *heads.shape[1:])
    return rows.transpose(1, 2).reshape(heads.shape)


def rotation_table(hparams: HyperParameters, positions: int, *, windowed: bool) -> torch.Tensor:
    """complex64[positions, 1, head_dim / 2]: e^(i * position * frequency) of full or of windowed blocks."""
    base = hparams.rope_base_window if windowed else hparams.rope_base
    exponents = torch.arange(0, hparams.head_dim, 2, dtype=torch.float64) / hparams.head_dim
    frequencies = base**-exponents
    if not windowed:
        frequencies /= hparams.rope_scaling.factor
        if hparams.rope_scaling.factors:
            frequencies /= torch.tensor(hparams.rope_scaling.factors, dtype=torch.float64)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).unsqueeze(1)
