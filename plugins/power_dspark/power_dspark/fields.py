"""Metadata of a drafter file, read with a check at every value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from power_core.errors import ArtifactError

__all__ = ["Fields", "refuse"]

EXPORT_AGAIN = "export the drafter again, or ask whoever made it"
_MISSING: Any = object()


def refuse(path: Path, what: str, *, got: object = None, expected: object = None, fix: str = EXPORT_AGAIN) -> NoReturn:
    """Raise the `ArtifactError` that names the file *path*, what was found and what to do."""
    raise ArtifactError(
        what, who=f"drafter {path.name}", where=str(path), got=got, expected=expected, fix=fix, plugin="dspark"
    )


class Fields:
    """
    Keys of one header.

    Args:
        path: The file, for messages.
        values: Its metadata.
        prefix: What the keys begin with: ``dflash.`` in a GGUF, nothing in a config.json.
        kinds: The container's own types by key, where it has such: llama.cpp takes a u32 for nothing else.
    """

    def __init__(
        self, path: Path, values: Mapping[str, Any], prefix: str = "", kinds: Mapping[str, str] | None = None
    ) -> None:
        self._path = path
        self._values = values
        self._prefix = prefix
        self._kinds = kinds or {}

    def __contains__(self, key: str) -> bool:
        return self._values.get(self._prefix + key) is not None  # JSON writes null for "not set"

    def integer(self, key: str, *, least: int = 1, most: int = 2**31 - 1, default: int = _MISSING) -> int:
        """The whole number *key* within bounds."""
        value = self._get(key, default, f"a whole number from {least} to {most}")
        if not _is_whole(value):
            self._refuse(key, value, f"a whole number from {least} to {most}")
        if not least <= value <= most:
            self._refuse(key, value, f"{least} to {most}")
        kind = self._kinds.get(self._prefix + key, "u32")
        if kind != "u32":
            refuse(self._path, f"{self._prefix}{key} is of type {kind}", got=kind, expected="u32")
        return int(value)

    def number(self, key: str, least: float, most: float) -> float:
        """The number *key* within bounds."""
        value = self._get(key, _MISSING, f"a number from {least:g} to {most:g}")
        is_number = _is_whole(value) or isinstance(value, float | np.floating)
        if not is_number or not least <= value <= most:  # NaN compares false
            self._refuse(key, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, *, default: bool = _MISSING) -> bool:
        """The boolean *key*; llama.cpp takes every other type for false without a word."""
        value = self._get(key, default, "true or false")
        if not isinstance(value, bool | np.bool_):
            self._refuse(key, value, "true or false")
        return bool(value)

    def integers(self, key: str, *, least: int, most: int) -> tuple[int, ...]:
        """The array *key* of distinct whole numbers within bounds, at least one."""
        expected = f"an array of distinct whole numbers from {least} to {most}"
        value = self._get(key, _MISSING, expected)
        if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray) or len(value) == 0:
            self._refuse(key, value, expected)
        if not all(_is_whole(item) and least <= item <= most for item in value):
            self._refuse(key, value, expected)
        if len({int(item) for item in value}) != len(value):
            self._refuse(key, value, expected)
        return tuple(int(item) for item in value)

    def neutral(self, key: str, *neutral: object) -> None:
        """Refuse *key* unless it is absent or one of *neutral*: it would change the drafter's arithmetic."""
        if key in self and not any(_is_same(self._values[self._prefix + key], each) for each in neutral):
            expected = " or ".join(map(str, neutral)) or "a file without this key"
            fix = "use a drafter without it: neither executor of this plugin computes it"
            value = self._values[self._prefix + key]
            refuse(self._path, f"{self._prefix}{key} is {_short(value)}", got=value, expected=expected, fix=fix)

    def _get(self, key: str, default: object, expected: str) -> Any:
        value = self._values.get(self._prefix + key)
        if value is None:
            if default is _MISSING:
                refuse(self._path, f"the key {self._prefix}{key} is missing", expected=expected)
            return default
        return value

    def _refuse(self, key: str, value: object, expected: str) -> NoReturn:
        refuse(self._path, f"{self._prefix}{key} is {_short(value)}", got=value, expected=expected)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_same(value: object, neutral: object) -> bool:
    """Equal and of one kind: true is not 1, and an array is nothing but itself."""
    kinds = (bool | np.bool_, int | np.integer, float | np.floating, str)
    of_one_kind = any(isinstance(value, kind) and isinstance(neutral, kind) for kind in kinds)
    return of_one_kind and isinstance(value, bool | np.bool_) == isinstance(neutral, bool) and bool(value == neutral)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
