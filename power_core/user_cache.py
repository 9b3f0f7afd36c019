"""
Small facts that are expensive to find out again, kept in the user's cache directory.

A document is stored with a digest of itself, so that a damaged file reads as a miss. Nothing here is
needed for correctness: a directory that cannot be written to costs time only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

from power_core.types import JSON

__all__ = ["PROBES", "cache_dir", "found_again", "load", "misses_told", "store"]

PROBES = "probes"
"""The kind of document in which a backend keeps the width classes that it measured."""

_IGNORED: ContextVar[frozenset[str]] = ContextVar("ignored", default=frozenset())
_ON_MISS: ContextVar[Callable[[str], None] | None] = ContextVar("on_miss", default=None)


def cache_dir() -> Path:
    """`POWER_CACHE_DIR`, or the platform's user cache directory of "power"."""
    if override := os.environ.get("POWER_CACHE_DIR"):
        return Path(override)
    import platformdirs

    return Path(platformdirs.user_cache_dir("power", appauthor=False))


def load(kind: str, key: Mapping[str, JSON], *, root: Path | None = None) -> JSON | None:
    """The document stored for *key* under *root* (by default `cache_dir`), or None if none can be trusted."""
    content = None if kind in _IGNORED.get() else _stored(kind, key, root)
    if content is None and (on_miss := _ON_MISS.get()) is not None:
        on_miss(kind)
    return content


def _stored(kind: str, key: Mapping[str, JSON], root: Path | None) -> JSON | None:
    try:
        document = json.loads(_file(kind, key, root).read_bytes())
        content, digest = document["content"], document["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # absent, unreadable, or not what `store` wrote
        return None
    return content if digest == _digest({"key": key, "content": content}) else None


@contextlib.contextmanager
def found_again(kind: str) -> Iterator[None]:
    """Within it nothing stored of *kind* is found: what is needed is found out, and stored, again."""
    token = _IGNORED.set(_IGNORED.get() | {kind})
    try:
        yield
    finally:
        _IGNORED.reset(token)


@contextlib.contextmanager
def misses_told(on_miss: Callable[[str], None]) -> Iterator[None]:
    """Within it, in this thread, *on_miss* is called with the kind of what was not found and takes time to find out."""
    token = _ON_MISS.set(on_miss)
    try:
        yield
    finally:
        _ON_MISS.reset(token)


def store(kind: str, key: Mapping[str, JSON], content: JSON, *, root: Path | None = None) -> None:
    """Keep *content*; readers see the old file or the new one, never a part of it."""
    target = _file(kind, key, root)
    document = json.dumps({"content": content, "sha256": _digest({"key": key, "content": content})})
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(document)
            Path(name).replace(target)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def _file(kind: str, key: Mapping[str, JSON], root: Path | None) -> Path:
    return (root or cache_dir()) / kind / f"{_digest(key)[:32]}.json"


def _digest(value: JSON) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
