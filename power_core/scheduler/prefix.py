"""
What a cached prefix is: opaque snapshots, the protocol that makes them, the key they are filed under, and how
much of one may be reused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

from attrs import field, frozen

from power_core.shapes import ShapeProfile
from power_core.types import SeqId, TokenId

__all__ = ["PrefixStore", "ReuseRule", "Snapshot", "cache_key", "common_prefix"]


@frozen
class Snapshot:
    """
    One part of a request's state after some tokens.

    Args:
        payload: Whatever its store needs to load it again; never looked into.
        nbytes: What it takes.
        length: Tokens it covers.
        can_cut: Whether its store can load it for fewer tokens. Recurrent and sliding-window state can
            not: it is of use only where the prompt holds all the tokens it covers.
    """

    payload: object = field(repr=False)
    nbytes: int
    length: int
    can_cut: bool


class PrefixStore(Protocol):
    """What a backend or a drafter provides so that its state can be cached. Called from the thread that steps."""

    def save(self, seq: SeqId) -> Snapshot | None:
        """The state of *seq* as it is now, or None where no exact copy can be made."""

    def load(self, seq: SeqId, snapshot: Snapshot, length: int) -> None:
        """
        Give *seq*, which is open and empty, the state after the first *length* tokens.

        Raises:
            BackendError: It cannot; *seq* is empty as before.
        """

    def free(self, snapshot: Snapshot) -> None:
        """The snapshot will not be used again."""

    def to_bytes(self, snapshot: Snapshot) -> bytes | None:
        """The snapshot for the disk, or None where it cannot leave the process."""

    def from_bytes(self, data: bytes) -> Snapshot:
        """
        A snapshot that `to_bytes` wrote, perhaps in an earlier process.

        Raises:
            BackendError: The bytes are none of this store's.
        """


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
