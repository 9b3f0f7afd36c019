"""What a model or an artifact may be called: a name that every file system and every shell takes as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["NAME_RULE", "is_address", "is_name", "one_of"]

NAME_RULE = "1 to 100 of a-z, A-Z, 0-9, '.', '_' and '-', the first a letter or digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # two letters: one is a drive


def is_name(name: str) -> bool:
    """
    Whether *name* keeps to `NAME_RULE`.

    >>> is_name("smollm2-dspark"), is_name("größe"), is_name(".hidden")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None


def one_of(names: Iterable[str]) -> str | None:
    """
    What was expected in place of a name that nothing has: one of *names*, or nothing to say where there are none.

    >>> one_of({"b", "a"})
    'one of a, b'
    """
    listed = ", ".join(sorted(names))
    return f"one of {listed}" if listed else None


def is_address(path: str) -> bool:
    """
    Whether *path* is where something could be fetched, and no file; its slashes may have been folded already.

    >>> is_address("https://example.org/m.gguf"), is_address("models/m.gguf")
    (True, False)
    """
    return _ADDRESS.match(path) is not None
