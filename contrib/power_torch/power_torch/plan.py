"""From a `RowBatch` to chains: what is checked before anything is computed."""

from __future__ import annotations

import numpy as np

from power_core.errors import BackendError
from power_core.target import RowBatch
from power_torch.step import Chain

__all__ = ["read_chains", "refusal"]


def refusal(what: str, got: object, expected: object = None) -> BackendError:
    """The error for rows that cannot be evaluated; nothing has happened yet when it is raised."""
    return BackendError(what, plugin="torch", where="forward", got=got, expected=expected)


def read_chains(batch: RowBatch, vocab_size: int) -> list[Chain]:
    """
    The chains of *batch*, in order.

    Raises:
        BackendError: No rows, ids outside the vocabulary, a tree, or two chains of one sequence.
    """
    n = batch.n
    if n == 0:
        raise refusal("the batch has no rows", 0, "at least one row")
    tokens = batch.tokens[:n]
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if outside.size:
        bad = int(tokens[outside[0]])
        raise refusal(f"token id {bad} is not in the vocabulary", bad, f"0 to {vocab_size - 1}")
    starts = np.flatnonzero(batch.parents[:n] < 0)
    if len(starts) < n:
        _check_links(batch)
    ends = np.append(starts[1:], n)
    chains = [
        Chain(int(batch.seqs[start]), int(start), int(end - start), int(batch.positions[start]))
        for start, end in zip(starts, ends, strict=True)
    ]
    if len({chain.seq for chain in chains}) < len(chains):
        raise refusal("a sequence has two chains in one batch", [chain.seq for chain in chains])
    return chains


def _check_links(batch: RowBatch) -> None:
    """Every row that does not start a chain continues the row before it."""
    parents, seqs, positions = batch.parents[: batch.n], batch.seqs[: batch.n], batch.positions[: batch.n]
    later = np.flatnonzero(parents >= 0)
    if later[0] == 0 or (parents[later] != later - 1).any():
        raise refusal("rows form a tree", parents.tolist(), "chains: trees are not evaluated")
    if (seqs[later] != seqs[later - 1]).any() or (positions[later] != positions[later - 1] + 1).any():
        raise refusal("a row does not continue its parent", (seqs.tolist(), positions.tolist()))
