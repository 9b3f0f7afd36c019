"""From a `RowBatch` to chains: what is checked before any native code sees a row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from power_core.errors import BackendError
from power_core.shapes import WidthClass
from power_core.target import RowBatch

__all__ = ["Chain", "is_dense", "read_chains", "scratch_sequences", "widest_gap"]


class Chain(NamedTuple):
    """Consecutive rows of one sequence in a `RowBatch`: rows first .. first+rows-1, from `position` on."""

    seq: int
    first: int
    rows: int
    position: int


def refusal(what: str, got: object, expected: object = None) -> BackendError:
    """The error for rows that cannot be evaluated; nothing has happened yet when it is raised."""
    return BackendError(what, plugin="llamacpp", where="forward", got=got, expected=expected)


def read_chains(batch: RowBatch, vocab_size: int) -> list[Chain]:
    """
    The chains of *batch*, in order.

    Raises:
        BackendError: No rows, ids outside the vocabulary, a tree, or two chains of one sequence.
    """
    n = batch.n
    if n == 0:
        raise refusal("the batch has no rows", 0, "at least one row")
    tokens, parents = batch.tokens[:n], batch.parents[:n]
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        bad = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
        raise refusal(f"token id {bad} is not in the vocabulary", bad, f"0 to {vocab_size - 1}")
    starts = np.flatnonzero(parents < 0).tolist()
    _check_links(batch, len(starts))
    ends = [*starts[1:], n]
    seqs, positions = batch.seqs, batch.positions
    chains = [
        Chain(int(seqs[start]), start, end - start, int(positions[start]))
        for start, end in zip(starts, ends, strict=True)
    ]
    if len(chains) > 1 and len({chain.seq for chain in chains}) < len(chains):
        raise refusal("a sequence has two chains in one batch", [chain.seq for chain in chains])
    return chains


def _check_links(batch: RowBatch, num_chains: int) -> None:
    """Every row that does not start a chain continues the row before it."""
    n = batch.n
    if num_chains == n:
        return
    parents, seqs, positions = batch.parents[:n], batch.seqs[:n], batch.positions[:n]
    later = np.flatnonzero(parents >= 0)
    before = later - 1
    if later[0] == 0 or (parents[later] != before).any():
        raise refusal("rows form a tree", parents.tolist(), "chains: llama.cpp evaluates no trees")
    if (seqs[later] != seqs[before]).any() or (positions[later] != positions[before] + 1).any():
        raise refusal("a row does not continue its parent", (seqs.tolist(), positions.tolist()))


def is_dense(shape: WidthClass) -> bool:
    """Whether *shape* holds every row count from 1 to its largest: such rows need no padding and no order."""
    return len(shape.widths) == shape.max_rows


def widest_gap(shape: WidthClass) -> int:
    """Most pad rows a step of *shape* needs."""
    return max(after - before - 1 for before, after in zip((0, *shape.widths), shape.widths, strict=False))


def scratch_sequences(shape: WidthClass, rows: int) -> int | None:
    """
    How many scratch sequences of *rows* rows each bring *rows* rows into *shape*; None where no number does.

    For memories that pad rows cannot be cut from: the pad rows then belong to other sequences.

    >>> from power_core.shapes import ShapeIdentity
    >>> scratch_sequences(WidthClass(ShapeIdentity("x"), tuple(range(8, 17))), 3)
    2
    """
    return next((width // rows - 1 for width in shape.widths if width % rows == 0), None)
