"""Attention of a block of queries over the ring's rows and over rows that never enter it."""

from __future__ import annotations

import torch
from torch import Tensor

from power_torch.drafting.ring import CHUNK, KvRing, RingView

__all__ = ["attend"]


def attend(
    queries: Tensor,
    ring: KvRing,
    layer: int,
    view: RingView,
    own: tuple[Tensor, Tensor],
    *,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    own_mask: Tensor | None = None,
) -> Tensor:
    """
    Attend to committed rows in the ring and to the block's own rows, softmax over both.

    Sums run over the block's own rows first, then chunk by chunk in order of position: a masked chunk adds zeros, so
    the result depends on the visible rows alone, bit for bit, and not on the size of the ring.

    Args:
        queries: [n, rows, heads, head_dim], rotated.
        ring: Where the committed rows are.
        layer: Whose.
        view: Of the n sequences, from `KvRing.view`.
        own: Keys (rotated) and values [n, own_rows, kv_heads, head_dim] of the block's own rows.
        positions: int64[n, rows], of the queries; read where there is a window.
        scale: Factor of the scores.
        window: A committed row is visible while query position - its position < window.
        own_mask: bool[rows, own_rows], or for each sequence [n, rows, own_rows]; None shows all of them.

    Returns:
        [n, rows, heads * head_dim].
    """
    n, rows, heads, dim = queries.shape
    kv_heads = own[0].shape[2]
    group = heads // kv_heads
    grouped = queries.transpose(1, 2).reshape(n, kv_heads, group * rows, dim)
    own_keys, own_values = (part.transpose(1, 2) for part in own)
    chunked = (n, kv_heads, ring.chunks, CHUNK, dim)
    keys = ring.keys[layer].index_select(0, view.seqs)[:, :, : ring.slots].reshape(chunked).to(queries.dtype)
    values = ring.values[layer].index_select(0, view.seqs)[:, :, : ring.slots].reshape(chunked).to(queries.dtype)

    near = (grouped @ own_keys.transpose(-1, -2)).float() * scale
    far = (grouped[:, :, None] @ keys.transpose(-1, -2)).float() * scale
    if own_mask is not None:
        shown = own_mask.reshape(-1, 1, 1, rows, own_mask.shape[-1])
        near = near.view(n, kv_heads, group, rows, -1).masked_fill(~shown, -torch.inf).view(near.shape)
    far = _masked(far, view, positions, group, window)
    top = torch.maximum(near.amax(-1), far.amax(-1).amax(2))
    near_weights, far_weights = torch.exp(near - top[..., None]), torch.exp(far - top[:, :, None, :, None])

    totals = near_weights.sum(-1)
    mixed = (near_weights.to(own_values.dtype) @ own_values).float()
    sums, parts = far_weights.sum(-1), (far_weights.to(values.dtype) @ values).float()
    order = view.order[:, None, :, None].expand_as(sums)
    sums, parts = sums.gather(2, order), parts.gather(2, order[..., None].expand_as(parts))
    for chunk in range(ring.chunks):  # one by one: a reduction over the axis may pair terms by its length
        totals, mixed = totals + sums[:, :, chunk], mixed + parts[:, :, chunk]
    out = (mixed / totals[..., None]).view(n, heads, rows, dim)
    return out.transpose(1, 2).reshape(n, rows, heads * dim).to(queries.dtype)


def _masked(scores: Tensor, view: RingView, positions: Tensor, group: int, window: int | None) -> Tensor:
    """*scores* [n, kv_heads, chunks, group * rows, CHUNK] with -inf where a query may not look."""
    n, _, chunks, _, _ = scores.shape
    if window is None:
        shown = view.visible.view(n, 1, chunks, 1, CHUNK)
    else:
        near = positions[:, :, None] - view.positions[:, None, :] < window
        by_row = (near & view.visible[:, None, :]).view(n, -1, chunks, CHUNK).transpose(1, 2)
        shown = by_row.repeat(1, 1, group, 1)[:, None]
    return scores.masked_fill(~shown, -torch.inf)
