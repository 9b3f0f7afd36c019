"""Canonical JSON (RFC 8785) and the digests taken over it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import rfc8785

from power_core.errors import ReceiptError
from power_core.types import JSON

__all__ = ["canonical", "digest", "parse", "plain"]

SAFE_INTEGER = 2**53 - 1  # the largest integer a JSON number holds exactly (RFC 8785, section 3.2.2.3)


def canonical(value: JSON) -> bytes:
    """
    The one byte string that stands for *value*.

    >>> canonical({"b": 1.0, "a": [True, None]})
    b'{"a":[true,null],"b":1}'

    Raises:
        ReceiptError: A float is not finite, an integer is not exact in JSON, or a value is no JSON.
    """
    try:
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as exc:
        raise ReceiptError(f"no canonical form: {exc}", who="receipt", expected="finite, exact JSON values") from exc
    except RecursionError as exc:
        raise ReceiptError("no canonical form: nested too deeply", who="receipt") from exc


def digest(value: JSON) -> str:
    """SHA-256 over the canonical form of *value*, as ``sha256:`` and 64 hex digits."""
    return "sha256:" + hashlib.sha256(canonical(value)).hexdigest()


def parse(data: bytes) -> JSON:
    """
    Read JSON whose meaning is beyond doubt: UTF-8, no repeated key, no NaN.

    Raises:
        ReceiptError: *data* is something else.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
            parse_int=_number,
        )
    except ValueError as exc:  # broken UTF-8 and broken JSON
        raise ReceiptError(f"not JSON: {exc}", who="receipt") from exc
    except RecursionError as exc:
        raise ReceiptError("not a receipt: nested too deeply", who="receipt") from exc


def plain(value: object) -> JSON:
    """
    *value* as JSON: mappings and sequences throughout, anything foreign as its text.

    For free-form facts of backends, which may hold paths, tuples, enums or non-finite numbers.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # an enum's text is its value
        return str(value)
    if isinstance(value, int):
        return int(value) if abs(value) <= SAFE_INTEGER else str(value)
    if isinstance(value, float):
        return float(value) if value - value == 0 else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    return str(value)


def _unique_keys(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return table


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _number(digits: str) -> int | float:
    # Canonical JSON writes the float 1e20 as twenty-one digits: reading them as an integer would not write back.
    # Longer runs of digits than any canonical number are not worth converting (it is quadratic).
    if len(digits) > 32:
        raise ValueError("a number has too many digits")
    number = int(digits)
    return number if abs(number) <= SAFE_INTEGER else float(digits)
