"""What a model or an artifact may be called: a name that every file system and every shell takes as it is."""

from __future__ import annotations

import re

__all__ = ["NAME_RULE", "is_name"]

NAME_RULE = "1 to 100 of a-z, A-Z, 0-9, '.', '_' and '-', the first a letter or digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_name(name: str) -> bool:
    """
    Whether *name* keeps to `NAME_RULE`.

    >>> is_name("smollm2-dspark"), is_name("größe"), is_name(".hidden")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None
