"""
What the probe found, kept: for the process, and in the user's cache directory for later ones.

A document is filed under everything known to decide a kernel. What is not known to is covered by its fingerprint: a
few forwards that are done again when it is read, and must come out bit for bit as they did.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from power_core import user_cache
from power_core.errors import ShapeError
from power_core.shapes import ExactnessLevel, ShapeIdentity, ShapeProfile
from power_core.types import JSON
from power_torch.cache import KvCache
from power_torch.network import Network
from power_torch.probe import fingerprint, measure

__all__ = ["profile_of"]

_SCHEMA = 2  # of what is kept; raise it when the probe measures differently
_KNOWN: dict[str, tuple[ShapeProfile, tuple[int, ...]]] = {}  # of this process: its kernels do not change


def profile_of(
    network: Network,
    cache: KvCache,
    *,
    max_rows: int,
    prefill_rows: int,
    sequences: int,
    facts: Mapping[str, JSON],
    folder: Path | None = None,
) -> ShapeProfile:
    """
    The width classes of a session, measured now or known already; *cache* is cut down to the spans that agree.

    A verdict that promises nothing is not kept: the next session is measured again.

    Args:
        network: The model.
        cache: As of `measure`.
        max_rows: Most rows of a decode step.
        prefill_rows: Most rows of a prompt step.
        sequences: Sequences of the session.
        facts: What else decides the numbers.
        folder: Where documents are kept instead of the user's cache directory.
    """
    sizes = {"max_rows": max_rows, "prefill_rows": prefill_rows, "sequences": sequences}
    key = {"backend": "torch", "schema": _SCHEMA, "spans": list(cache.spans), **sizes, **facts}
    digest = ShapeIdentity.of(key).digest
    if digest not in _KNOWN:
        document = user_cache.load(user_cache.PROBES, key, root=folder)
        profile = _confirmed(document, network, cache) if document is not None else None
        if profile is None:
            profile = measure(network, cache, **sizes, facts=facts)
            if profile.level is ExactnessLevel.UNVERIFIED:
                return profile
            kept = {**profile.to_json(), "fingerprint": fingerprint(network, cache, _widths(profile))}
            user_cache.store(user_cache.PROBES, key, kept, root=folder)
        _KNOWN[digest] = profile, cache.spans
    profile, cache.spans = _KNOWN[digest]
    return profile


def _confirmed(document: JSON, network: Network, cache: KvCache) -> ShapeProfile | None:
    """The profile in *document*, and its spans in *cache*, if this process computes as the one that stored it did."""
    all_spans = cache.spans
    try:
        profile, expected = ShapeProfile.from_json(document), document["fingerprint"]
        spans = tuple(profile.evidence["attention_spans"])
    except (KeyError, TypeError, ShapeError):  # another form
        return None
    if not spans or spans[-1] != all_spans[-1] or not set(spans) <= set(all_spans):
        return None
    cache.spans = spans
    if fingerprint(network, cache, _widths(profile)) == expected:
        return profile
    cache.spans = all_spans
    return None


def _widths(profile: ShapeProfile) -> set[int]:
    """Row counts that a fingerprint is taken of: the ends of both classes."""
    return {profile.decode.widths[0], profile.decode.max_rows, profile.prefill.max_rows}
