"""How cached prefixes are found: the key they are filed under, and how much of one may be reused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from attrs import frozen

from power_core.shapes import ShapeProfile
from power_core.types import TokenId

__all__ = ["ReuseRule", "cache_key", "common_prefix"]


def cache_key(
    prompt_cache_key: str,
    *,
    identity: str,
    endpoint: str,
    model_digest: str,
    settings_digest: str,
    adapters: Sequence[str] = (),
) -> str:
    """
    The digest that entries are filed under.

    Args:
        prompt_cache_key: The caller's.
        identity: Who asks, as authenticated.
        endpoint: Where.
        model_digest: SHA-256 of the model file.
        settings_digest: Of everything else that decides the numbers: shapes, KV types, context size.
        adapters: Digests and scales of adapters in use, in order.

    >>> cache_key("a", identity="b", endpoint="", model_digest="", settings_digest="") != cache_key(
    ...     "ab", identity="", endpoint="", model_digest="", settings_digest=""
    ... )
    True
    """
    parts = [prompt_cache_key, identity, endpoint, model_digest, settings_digest, list(adapters)]
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


def common_prefix(a: Sequence[TokenId], b: Sequence[TokenId]) -> int:
    """
    How many tokens *a* and *b* begin with in common; slices are compared, not tokens.

    >>> common_prefix((1, 2, 3), (1, 2, 4, 5))
    2
    """
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@frozen
class ReuseRule:
    """
    How much of a matching prefix may be reused so that a hit equals a miss bit for bit.

    Args:
        least_rows: Prompt rows that must be left to evaluate: the narrowest chunk of the prefill class.
        is_mixable: Whether generated rows are computed in the same class as prompt rows.
    """

    least_rows: int = 1
    is_mixable: bool = True

    @classmethod
    def of(cls, profile: ShapeProfile) -> ReuseRule:
        """The rule for a session's measured profile."""
        return cls(profile.prefill.widths[0], profile.mixable)

    def most(self, prompt: int, matched: int, prefilled: int) -> int:
        """
        Tokens that may be reused.

        Args:
            prompt: Tokens of the new prompt.
            matched: Those it has in common with the entry.
            prefilled: Tokens of the entry that were evaluated as prompt rows.

        >>> ReuseRule(least_rows=8, is_mixable=False).most(100, matched=90, prefilled=60)
        60
        """
        if not self.is_mixable:
            matched = min(matched, prefilled)
        return max(min(matched, prompt - self.least_rows), 0)
