"""
From processed logits to one token: top-k, typical, top-p, min-p, temperature, one draw.

Everything here is a pure function of the logits' bits. Sets of kept tokens are arrays of ascending ids
and ties go to the lower id, so that no result depends on how a sort or a partition was carried out.
Probabilities are float64 and every filter renormalises over what the filters before it kept, as
llama.cpp does.

Cost with a vocabulary of V: with top-k one vectorised pass over V float32 logits and work on k tokens (about
0.1 ms at 49,152, 0.2 ms at 262,144). Without top-k some passes over V float64 numbers: 0.3 to 0.5 ms at
49,152 for a language model's rows, 3 to 9 ms at 262,144, where a top-k of a few hundred before top-p pays.
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

_BUCKETS_PER_NAT = 8
_LAST_BUCKET = 511


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
        values -= values.max()
        values /= spec.temperature
    return int(ids[_inverse_cdf(np.exp(values, out=values), u)])


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
    p, log_total = _softmax(values)
    surprise = log_total - values
    entropy = float(np.sum(p * surprise))
    return _smallest_set(-np.abs(surprise - entropy), p, mass)


def _top_p(values: Floats, mass: float) -> Ids | None:
    """Nucleus sampling: most likely first (Holtzman et al. 2020, equation 2)."""
    if mass >= 1:
        return None
    return _smallest_set(values, _softmax(values)[0], mass)


def _min_p(values: Floats, ratio: float) -> Ids | None:
    """Tokens with p >= ratio * max p."""
    if ratio <= 0:
        return None
    return np.flatnonzero(values >= values.max() + math.log(ratio))


def _smallest_set(scores: Floats, p: Floats, mass: float) -> Ids:
    """
    Ascending indices of the shortest prefix by descending score whose probability reaches *mass*.

    Scores are dropped into buckets, so that only the one in which the mass is reached is sorted.
    """
    depth = np.minimum((scores.max() - scores) * _BUCKETS_PER_NAT, _LAST_BUCKET)
    buckets = depth.astype(np.int32)  # a conversion that numpy vectorises, unlike the one to int64
    reached = np.cumsum(np.bincount(buckets, weights=p))
    edge = int(np.searchsorted(reached, mass))
    inside = np.flatnonzero(buckets == edge)  # none where rounding left the sum of all just below the mass
    inside = inside[np.argsort(-scores[inside], kind="stable")]
    before = reached[edge - 1] if edge else 0.0
    count = int(np.searchsorted(before + np.cumsum(p[inside]), mass)) + 1
    kept = buckets < edge
    kept[inside[:count]] = True
    return np.flatnonzero(kept)


def _softmax(values: Floats) -> tuple[Floats, float]:
    """Probabilities, and the logarithm of their normalizer: log p = values - log_total."""
    top = float(values.max())
    p = values - top
    np.exp(p, out=p)  # in place: a fresh array of a whole vocabulary costs more than the exponentials
    total = float(p.sum())
    p /= total
    return p, top + math.log(total)


def _inverse_cdf(weights: Floats, u: float) -> int:
    """First index whose cumulative weight exceeds u times the total; never one of weight 0."""
    cumulative = np.cumsum(weights)
    total = cumulative[-1]
    last = np.searchsorted(cumulative, total)  # u * total can round up to the total itself
    return int(min(np.searchsorted(cumulative, u * total, side="right"), last))
