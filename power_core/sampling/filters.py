"""
From processed logits to one token: top-k, typical, top-p, min-p, temperature, one draw.

Everything here is a pure function of the logits' bits. Sets of kept tokens are arrays of ascending ids
and ties go to the lower id, so that no result depends on how a sort or a partition was carried out.
Probabilities are float64 and every filter renormalises over what the filters before it kept, as
llama.cpp does.

Cost at a vocabulary of V: with top-k it is one pass over V float32 maxima plus work on k tokens. Without
top-k, V float64 exponentials are needed (about 0.4 ms at 49,152 and 2.5 ms at 262,144 on one core), and
top-p and typical add a selection of the few hundred best, more only where the mass is spread wider.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from power_core.errors import BackendError, RequestError
from power_core.request import SamplingSpec
from power_core.types import TokenId

__all__ = ["check_row", "draw", "largest"]

Ids = NDArray[np.intp]
Floats = NDArray[np.float64]

_HEAD = 256  # tokens that top-p and typical look at first
_HEAD_GROWTH = 8


def check_row(row: NDArray[np.float32], where: str) -> None:
    """
    Make sure a token can be chosen from *row*.

    Raises:
        RequestError: Every token is excluded (all -inf).
        BackendError: The row holds NaN or +inf.
    """
    top = float(row.max())  # NaN wins over everything in numpy's max
    if top == -math.inf:
        raise RequestError(
            "every token is excluded (all logits are -inf)",
            who="sampling",
            where=where,
            got=top,
            fix="relax the logit bias, the grammar or the logits processors",
        )
    if not math.isfinite(top):
        raise BackendError(f"the target's logits hold {top}", who="sampling", where=where, got=top, expected="numbers")


def largest(values: NDArray[Any], k: int) -> Ids:
    """
    Indices of the *k* largest of *values* (all if there are fewer), largest first, ties by index.

    A lower bound for the k-th largest comes first, as the k-th largest of at least 4k column maxima:
    for small k this leaves few candidates to select from, at the price of one vectorised pass.
    """
    n = values.size
    if k >= n:
        return np.argsort(-values, kind="stable")
    candidates: Ids | None = None
    pool = values
    rows = n // (4 * k)
    if rows >= 4:
        columns = n // rows
        maxima = values[: rows * columns].reshape(rows, columns).max(axis=0)
        candidates = np.flatnonzero(values >= np.partition(maxima, columns - k)[columns - k])
        pool = values[candidates]
    kth = np.partition(pool, pool.size - k)[pool.size - k]
    above = np.flatnonzero(pool > kth)
    chosen = np.sort(np.concatenate((above, np.flatnonzero(pool == kth)[: k - above.size])))
    order = chosen[np.argsort(-pool[chosen], kind="stable")]
    return order if candidates is None else candidates[order]


def draw(logits: NDArray[np.float32], spec: SamplingSpec, u: float) -> TokenId:
    """
    Choose a token from processed logits with the stages of *spec* and one uniform number.

    The kept tokens are laid out by ascending id; the token is the first whose cumulative weight
    exceeds u times the total.

    Args:
        logits: float32[vocab], after bias, penalties, grammar and processors; not changed.
        spec: Only the stages from top-k on are read; its temperature must be above 0.
        u: In [0, 1), see `power_core.sampling.uniform`.

    Returns:
        A token whose logit is not -inf.

    Raises:
        RequestError: Every logit is -inf.
        BackendError: A logit is NaN or +inf.
    """
    check_row(logits, "target row")
    ids = _top_k(logits, spec.top_k)
    values = logits[ids].astype(np.float64)
    for stage, setting in ((_typical, spec.typical_p), (_top_p, spec.top_p), (_min_p, spec.min_p)):
        kept = stage(values, setting)
        if kept is not None:
            ids, values = ids[kept], values[kept]
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, which is its meaning
        weights = np.exp((values - values.max()) / spec.temperature)
    return int(ids[_inverse_cdf(weights, u)])


def _top_k(logits: NDArray[np.float32], k: int) -> Ids:
    """Ascending ids of the k largest logits (all for 0), those that are -inf left out."""
    if k == 0:
        return np.flatnonzero(logits != -np.inf)
    ids = np.sort(largest(logits, k))
    return np.compress(logits[ids] != -np.inf, ids)


def _typical(values: Floats, mass: float) -> Ids | None:
    """Locally typical sampling: nearest to the entropy first (Meister et al. 2022, equation 8)."""
    if mass >= 1:
        return None
    log_p = _log_softmax(values)
    p = np.exp(log_p)
    entropy = -np.dot(p, log_p)
    return _smallest_set(-np.abs(entropy + log_p), p, mass)


def _top_p(values: Floats, mass: float) -> Ids | None:
    """Nucleus sampling: most likely first (Holtzman et al. 2020, equation 2)."""
    if mass >= 1:
        return None
    return _smallest_set(values, np.exp(_log_softmax(values)), mass)


def _min_p(values: Floats, ratio: float) -> Ids | None:
    """Tokens with p >= ratio * max p."""
    if ratio <= 0:
        return None
    return np.flatnonzero(np.exp(values - values.max()) >= ratio)


def _smallest_set(scores: Floats, p: Floats, mass: float) -> Ids:
    """Ascending indices of the shortest prefix by descending score whose probability reaches *mass*."""
    size = min(_HEAD, scores.size)
    while True:
        order = largest(scores, size)
        reached = np.cumsum(p[order])  # sequential, so a longer head has the same beginning
        if reached[-1] >= mass or size == scores.size:
            return np.sort(order[: int(np.searchsorted(reached, mass)) + 1])
        size = min(size * _HEAD_GROWTH, scores.size)


def _log_softmax(values: Floats) -> Floats:
    shifted = values - values.max()
    return np.asarray(shifted - math.log(np.exp(shifted).sum()))


def _inverse_cdf(weights: Floats, u: float) -> int:
    """First index whose cumulative weight exceeds u times the total; never one of weight 0."""
    cumulative = np.cumsum(weights)
    total = cumulative[-1]
    last = np.searchsorted(cumulative, total)  # u * total can round up to the total itself
    return int(min(np.searchsorted(cumulative, u * total, side="right"), last))
