"""
What a draft round gives and what of it is proposed: chains, the walk through DFlash2's lattice, and the cuts.

A chain's tokens carry their probability and their margin over the runner-up. For DFlash v1 these come from each row's
own softmax, and the margin is a difference of probabilities. For DFlash2 they come from the scores under the
predecessor that was chosen, and the margin is a difference of log scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.drafter import Proposal
from power_core.types import TokenId

__all__ = ["Chain", "chain_of_logits", "proposed", "walk"]


@frozen
class Chain:
    """
    Drafted tokens, in order.

    Args:
        token_ids: Tokens after the anchor.
        chances: Of each, in [0, 1].
        margins: Of each, at least 0.
    """

    token_ids: Sequence[TokenId]
    chances: Sequence[float]
    margins: Sequence[float]


def chain_of_logits(rows: Sequence[NDArray[np.float32]], ids: NDArray[np.int64] | None) -> Chain:
    """
    The likeliest token of each row, independently: DFlash v1.

    Args:
        rows: float32[n], logits of one draft position each.
        ids: int64[n], the target ids of a row's entries; None where entry i is id i.
    """
    tokens, chances, margins = [], [], []
    for row in rows:
        best = int(row.argmax())
        weights = np.exp(row - row[best])
        total = float(weights.sum())
        weights[best] = 0.0
        tokens.append(best if ids is None else int(ids[best]))
        chances.append(1.0 / total)
        margins.append((1.0 - float(weights.max())) / total)
    return Chain(tokens, chances, margins)


def walk(candidates: NDArray[np.integer], scores: NDArray[np.float32]) -> Chain:
    """
    Follow the best successor of each chosen candidate: DFlash2's greedy path.

    Args:
        candidates: [positions, k], token ids in any order.
        scores: float32[positions, k, k], log score of [predecessor][candidate]; every row of position 0 is the
            anchor's.

    >>> walk(np.array([[7, 5], [3, 9]]), np.array([[[0, 1.5], [0, 1.5]], [[2, 0], [0, 4]]], np.float32)).token_ids
    [5, 9]
    """
    tokens, chances, margins = [], [], []
    predecessor = 0
    for ids, table in zip(candidates, scores, strict=True):
        row = table[predecessor]
        predecessor = int(row.argmax())
        top = row[predecessor]
        others = np.delete(row, predecessor)
        tokens.append(int(ids[predecessor]))
        chances.append(1.0 / (1.0 + float(np.exp(others - top).sum())))
        margins.append(float(top - others.max()) if len(others) else float("inf"))
    return Chain(tokens, chances, margins)


def proposed(chain: Chain, limit: int, *, margin: float, p_min: float) -> Proposal:
    """
    The first tokens of *chain*, up to *limit* and to the first that a cut refuses.

    >>> proposed(Chain([5, 6, 7], [0.9, 0.6, 0.8], [0.8, 0.1, 0.7]), 3, margin=0.2, p_min=0.0)
    Proposal(token_ids=[5], confidences=[0.9])
    """
    count = min(limit, len(chain.token_ids))
    for i in range(count):
        if chain.margins[i] < margin or chain.chances[i] < p_min:
            count = i
            break
    return Proposal(list(chain.token_ids[:count]), list(chain.chances[:count]))
