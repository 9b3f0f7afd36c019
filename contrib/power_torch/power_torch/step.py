"""One forward as the network computes it: rows in fixed widths, attention in tiles of one sequence each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from attrs import field, frozen

from power_core.shapes import WidthClass

__all__ = ["Chain", "Step", "Tile", "make_step"]


class Chain(NamedTuple):
    """Consecutive rows of one sequence in a batch: rows first .. first+rows-1, from `position` on."""

    seq: int
    first: int
    rows: int
    position: int


@frozen(eq=False)
class Tile:
    """
    The attention of one chain.

    Args:
        chain: Its rows.
        width: Rows computed, pad rows included.
        span: Cache rows read.
        rows: int64[width]; the batch row of each tile row, or None where they are the batch's rows in order.
        mask: float32[1, group * width, span]: 0 where a row sees a position, -inf elsewhere.
        window_mask: The same for windowed blocks; `mask` itself where the model has none.
    """

    chain: Chain
    width: int
    span: int
    rows: torch.Tensor | None = field(repr=False)
    mask: torch.Tensor = field(repr=False)
    window_mask: torch.Tensor = field(repr=False)


@frozen(eq=False)
class Step:
    """
    Inputs of one forward.

    Args:
        width: Rows computed, pad rows included.
        tokens: int64[width]; pad rows hold id 0.
        positions: int64[width].
        tiles: One a chain.
        outputs: int64[outputs, padded into the class]; rows whose logits are computed, or None for all in order.
    """

    width: int
    tokens: torch.Tensor = field(repr=False)
    positions: torch.Tensor = field(repr=False)
    tiles: tuple[Tile, ...]
    outputs: torch.Tensor | None = field(repr=False)


def make_step(
    tokens: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]],
    chains: Sequence[Chain],
    wanted: np.ndarray[tuple[int], np.dtype[np.intp]],
    *,
    width: int,
    tiles: WidthClass,
    spans: Sequence[int],
    group: int,
    window: int,
    device: torch.device,
) -> Step:
    """
    Lay out the rows of *chains*.

    Args:
        tokens: Ids, one a row.
        chains: The rows' sequences and positions.
        wanted: Rows whose logits are asked for, ascending.
        width: Row count to compute; a member of *tiles*' class.
        tiles: Row counts for the parts that see fewer rows: a chain's attention and the output matrix.
        spans: Cache row counts, ascending.
        group: Query heads a key head.
        window: Positions that windowed blocks see; 0 for no such blocks.
        device: Where the network is.
    """
    n = len(tokens)
    ids = np.zeros(width, np.int64)
    ids[:n] = tokens
    positions = np.zeros(width, np.int64)
    for chain in chains:
        positions[chain.first : chain.first + chain.rows] = np.arange(chain.position, chain.position + chain.rows)
    return Step(
        width=width,
        tokens=torch.from_numpy(ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        tiles=tuple(_tile(chain, width, tiles, spans, group, window, device) for chain in chains),
        outputs=_outputs(wanted, width, tiles, device),
    )


def _tile(
    chain: Chain,
    batch_width: int,
    tiles: WidthClass,
    spans: Sequence[int],
    group: int,
    window: int,
    device: torch.device,
) -> Tile:
    width = tiles.cover(chain.rows) or batch_width
    last = chain.position + chain.rows
    span = next(span for span in spans if span >= last)
    rows = np.full(width, chain.first, np.int64)  # pad rows repeat the first: each sees at least one position
    rows[: chain.rows] = np.arange(chain.first, chain.first + chain.rows)
    queries = (rows - chain.first + chain.position)[:, None]
    keys = np.arange(span)[None, :]
    seen = keys <= queries
    in_order = chain.first == 0 and width == batch_width
    mask = _mask(seen, group, device)
    return Tile(
        chain=chain,
        width=width,
        span=span,
        rows=None if in_order else torch.from_numpy(rows).to(device),
        mask=mask,
        window_mask=_mask(seen & (keys > queries - window), group, device) if window else mask,
    )


def _mask(seen: np.ndarray[tuple[int, int], np.dtype[np.bool_]], group: int, device: torch.device) -> torch.Tensor:
    """float32[1, group * rows, span] for queries ordered by head, then by row."""
    values = np.where(seen, np.float32(0), np.float32(-np.inf))
    return torch.from_numpy(np.tile(values, (group, 1))[None]).to(device)


def _outputs(
    wanted: np.ndarray[tuple[int], np.dtype[np.intp]], width: int, tiles: WidthClass, device: torch.device
) -> torch.Tensor | None:
    count = len(wanted)
    padded = tiles.cover(count) or width
    if padded >= width:
        return None
    rows = np.zeros(padded, np.int64)
    rows[:count] = wanted
    return torch.from_numpy(rows).to(device)
