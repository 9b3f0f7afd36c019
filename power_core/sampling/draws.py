"""
Counter-based random draws: a pure function of (seed, emitted index).

No generator state is carried from token to token, so a rejected proposal cannot move the stream: the
draw for the n-th emitted token is the same under every strategy.
"""

from __future__ import annotations

import operator
import secrets

from power_core.errors import RequestError
from power_core.request import SamplingSpec

__all__ = ["reduce_seed", "resolve_seed", "uniform"]

_WORD = (1 << 64) - 1
# Multipliers and key increments of Philox4x64-10, table 2 and section 4.3 of the paper named below.
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def reduce_seed(seed: int) -> int:
    """
    Any integer as a 64-bit key: its value modulo 2**64, so -1 and 2**64 - 1 are one seed.

    Raises:
        RequestError: Not an integer.
    """
    try:
        return operator.index(seed) & _WORD
    except TypeError as exc:
        raise RequestError(f"seed is {seed!r}", who="sampling", where="seed", got=seed, expected="an integer") from exc


def resolve_seed(spec: SamplingSpec) -> int:
    """The seed of *spec* reduced to 64 bits, or a fresh one from the operating system's entropy."""
    return secrets.randbits(64) if spec.seed is None else reduce_seed(spec.seed)


def uniform(seed: int, index: int) -> float:
    """
    The uniform draw in [0, 1) for the *index*-th emitted token under *seed*.

    The first word of Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    SC 2011) with key (seed, 0) and counter (index, 0, 0, 0); its upper 53 bits are the fraction.
    Written in integers because building a numpy bit generator for one number costs three times as much.

    Args:
        seed: 64-bit key, see `reduce_seed`.
        index: Position in the output, 0-based.

    >>> uniform(7, 0) == uniform(7, 0) != uniform(7, 1)
    True
    """
    c0, c1, c2, c3 = index & _WORD, 0, 0, 0
    k0, k1 = seed & _WORD, 0
    m0, m1 = _MULTIPLIERS
    for _ in range(_ROUNDS):
        left, right = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & _WORD, (left >> 64) ^ c3 ^ k1, left & _WORD
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return (c0 >> 11) * 2.0**-53
