"""Reading values of a file's metadata: a number is what it must be, or one line says why not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from power_core.artifacts import TensorFile
from power_core.artifacts.files import refuse

__all__ = ["EPSILONS", "ROPE_BASES", "Metadata"]

PLUGIN = "mtp"
EPSILONS = (1e-12, 0.1)
"""Least and most of a norm's epsilon; published ones are 1e-12 to 1e-5."""
ROPE_BASES = (2.0, 1e12)
"""Least and most base of the rotation; published ones are 1e4 to 3.6e9."""


class Metadata:
    """
    Typed access to the keys of *file*.

    Args:
        file: The file.
        prefix: Put before every key.
        names: Replaces keys by the file's own spelling.
    """

    def __init__(self, file: TensorFile, prefix: str = "", names: dict[str, str] | None = None) -> None:
        self._file = file
        self._prefix = prefix
        self._names = names or {}

    def spelled(self, key: str) -> str:
        """The key as the file has it."""
        return self._prefix + self._names.get(key, key)

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self._file.metadata.get(self.spelled(key))

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from *low* to *high*; *default* where the key is absent."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        number = _as_whole(value)
        if number is None or not low <= number <= high:
            self._refuse(key, value, f"a whole number from {low} to {high}")
        return number

    def real(self, key: str, low: float, high: float) -> float:
        """A number from *low* to *high*."""
        value = self.get(key)
        number = _as_real(value)
        if not low <= number <= high:  # NaN compares false
            self._refuse(key, value, f"a number from {low:g} to {high:g}")
        return number

    def wholes(self, key: str, low: int, high: int, *, longest: int) -> tuple[int, ...]:
        """One to *longest* whole numbers from *low* to *high*."""
        value = self.get(key)
        items = value.tolist() if isinstance(value, np.ndarray) else value
        numbers = [_as_whole(item) for item in items] if isinstance(items, list) else []
        found = tuple(number for number in numbers if number is not None and low <= number <= high)
        if not 1 <= len(numbers) <= longest or len(found) != len(numbers):
            self._refuse(key, value, f"1 to {longest} whole numbers from {low} to {high}")
        return found

    def text(self, key: str) -> str | None:
        """A text, or None where the key is absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            self._refuse(key, value, "a text")
        return value

    def strings(self, key: str) -> Sequence[str] | None:
        """A list of texts, or None where the key is absent."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            self._refuse(key, value, "a list of texts")
        return value

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Refuse the file for the value of *key*."""
        self._refuse(key, self.get(key), expected)

    def _refuse(self, key: str, value: object, expected: str) -> NoReturn:
        name = self.spelled(key)
        found = f"the key {name} is missing" if value is None else f"{name} is {value!r:.80}"
        refuse(self._file.path, found, got=value, expected=expected, plugin=PLUGIN)


def _as_whole(value: object) -> int | None:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        return None
    return int(value)


def _as_real(value: object) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        return math.nan
    try:
        return float(value)
    except (OverflowError, TypeError):  # an integer beyond every float; a complex number
        return math.nan
