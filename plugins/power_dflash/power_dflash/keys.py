"""Typed, range-checked access to a drafter file's metadata; a refusal names the key, what it holds and what fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from attrs import frozen

from power_core.artifacts import TensorFile
from power_core.artifacts.files import refuse

__all__ = ["FIX", "Keys", "deny"]

FIX = "convert or export the drafter again"
_MISSING = object()


def deny(file: TensorFile, what: str, *, got: object = None, expected: object = None, fix: str = FIX) -> NoReturn:
    """Raise the `ArtifactError` for *file*."""
    refuse(file.path, what, got=got, expected=expected, fix=fix, plugin="dflash")


@frozen
class Keys:
    """
    The keys of one file.

    Args:
        file: For messages, and for GGUF's value types.
        table: Key -> value.
        prefix: Put before every key that is asked for.
    """

    file: TensorFile
    table: Mapping[str, Any]
    prefix: str = ""

    def get(self, key: str) -> Any:
        """The value as the file has it, or None."""
        return self.table.get(self.prefix + key)

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer from *low* to *high*; in GGUF of type u32, as llama.cpp wants it."""
        value = self._value(key, default)
        if type(value) is not int or not low <= value <= high:
            self.refuse(key, value, f"a whole number from {low} to {high}")
        self._check_type(key, "u32")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number from *low* to *high*; in GGUF of type f32."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not low <= value <= high:  # NaN compares false, a bool is no number
            self.refuse(key, value, f"a number from {low:g} to {high:g}")
        self._check_type(key, "f32")
        return float(value)

    def is_zero(self, key: str) -> bool:
        """Whether *key* holds the number 0, which some files write for "none"."""
        value = self._value(key, None)
        return type(value) in (int, float) and value == 0

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if type(value) is not bool:
            self.refuse(key, value, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string, or None where the key is absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            self.refuse(key, value, "text")
        return value

    def wholes(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """A list of one or more integers from *low* to *high*, no two the same."""
        value = self._value(key, None)
        items = value.tolist() if isinstance(value, np.ndarray) else value
        fits = isinstance(items, Sequence) and not isinstance(items, str) and 0 < len(items) <= 64
        if not fits or any(type(item) is not int or not low <= item <= high for item in items):
            self.refuse(key, items, f"1 to 64 whole numbers from {low} to {high}")
        if len(set(items)) != len(items):
            self.refuse(key, items, "different numbers")
        return tuple(items)

    def absent(self, key: str, why: str, *neutral: object) -> None:
        """Refuse *key* unless it is absent or one of the values that change nothing."""
        value = self.get(key)
        if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
            self.refuse(key, value, why)

    def refuse(self, key: str, got: object, expected: str) -> NoReturn:
        """Raise the `ArtifactError` for a key."""
        if got is _MISSING:
            deny(self.file, f"the key {self.prefix}{key} is missing", expected=expected)
        deny(self.file, f"the key {self.prefix}{key} is {got!r:.60}", got=got, expected=expected)

    def _value(self, key: str, default: object) -> Any:
        value = self.get(key)
        if value is None:
            value = _MISSING if default is None else default
        return value.item() if isinstance(value, np.generic) else value

    def _check_type(self, key: str, wanted: str) -> None:
        types: Mapping[str, str] = getattr(self.file, "value_types", {})  # GGUF headers have them, JSON does not
        found = types.get(self.prefix + key, wanted)
        if found != wanted:
            deny(self.file, f"the key {self.prefix}{key} has type {found}", got=found, expected=wanted)
