"""
How large a regular expression or a JSON schema becomes once its repetitions are written out.

Repetitions inside repetitions multiply. The automaton would try to build them for minutes before it gives up,
so they are counted first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from power_core.errors import RequestError

__all__ = ["MOST_STATES", "check_regex", "check_schema", "regex_size"]

MOST_STATES = 50_000
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d*)(,?)(\d*)\}|[()|]|.", re.DOTALL)


def regex_size(pattern: str) -> int:
    """
    About how many characters *pattern* matches one after the other, repetitions written out.

    >>> regex_size("(ab{3}){100}c")
    401
    """
    total, last, stack = 0, 0, []  # `last` is the size of what a repetition would repeat
    for found in _TOKEN.finditer(pattern):
        text = found.group()
        if found.group(2) is not None and (found.group(1) or found.group(3)):
            total += last * (max(int(found.group(1) or 0), int(found.group(3) or 0), 1) - 1)
            last = 0
        elif text == "(":
            stack.append(total)
            total = last = 0
        elif text == ")" and stack:
            last = total
            total += stack.pop()
        else:
            last = text not in "|?*+"
            total += last
    return total


def check_regex(pattern: str, where: str) -> None:
    """
    Refuse a *pattern* that would be too large.

    Raises:
        RequestError: It is.
    """
    size = regex_size(pattern)
    if size > MOST_STATES:
        raise RequestError(
            f"its repetitions come to {size} characters", who="grammar", where=where, got=size,
            expected=f"at most {MOST_STATES}", fix="repeat less, or leave the repetition open with + or *",
        )  # fmt: skip


def check_schema(schema: Any) -> None:
    """
    Refuse a JSON *schema* with a pattern that would be too large, or with that many items inside items.

    Raises:
        RequestError: It is too large.
    """
    _check_node(schema, 1)


def _check_node(node: Any, times: int) -> None:
    if isinstance(node, list):
        for each in node:
            _check_node(each, times)
    if not isinstance(node, Mapping):
        return
    if isinstance(node.get("pattern"), str):
        check_regex(node["pattern"], "json_schema")
    for key in ("minItems", "maxItems", "minLength", "maxLength"):
        count = node.get(key)
        if isinstance(count, int) and count > 1:
            size = times * count
            if size > MOST_STATES:
                raise RequestError(
                    f"{key} {count} comes to {size} parts", who="grammar", where="json_schema", got=size,
                    expected=f"at most {MOST_STATES}", fix="ask for fewer, or leave it open",
                )  # fmt: skip
    items = max((node[key] for key in ("minItems", "maxItems") if isinstance(node.get(key), int)), default=1)
    for key, each in node.items():
        _check_node(each, times * max(items, 1) if key in ("items", "prefixItems", "contains") else times)
