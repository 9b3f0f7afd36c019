"""Tables of settings into attrs classes, strictly: no unknown key, no value of another type."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import attrs
import cattrs

from power_core.errors import ConfigError
from power_core.names import one_of

__all__ = ["structured", "type_name", "unknown_name"]


def structured(cls: type, table: Mapping[str, Any], source_of: Callable[[str], str]) -> dict[str, Any]:
    """
    Constructor arguments of the attrs class *cls* from *table*.

    Args:
        cls: Its fields are the keys, their annotations the types; those with the metadata `internal` are none.
        table: Key -> value; keys that are absent stay absent.
        source_of: Where a key was set, for messages.

    Raises:
        ConfigError: A key is unknown or a value is of another type.
    """
    attrs.resolve_types(cls)
    keys = {attribute.name: attribute for attribute in attrs.fields(cls) if _is_key(attribute)}
    values = {}
    for key, value in table.items():
        if key not in keys:
            raise unknown_name(f"unknown key {key!r}", key, keys, source_of(key))
        try:
            values[str(keys[key].alias)] = _converter.structure(value, keys[key].type)
        except Exception as exc:
            wanted = type_name(keys[key].type) + (" without NUL" if "\0" in str(value) else "")
            raise ConfigError(
                f"{key} is {value!r:.120}",
                who="config",
                where=source_of(key),
                got=value,
                expected=wanted,
            ) from exc
    return values


def unknown_name(what: str, name: str, known: Iterable[str], where: str | None) -> ConfigError:
    """The error for a name that is none of *known*, with the nearest one."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return ConfigError(
        what,
        who="config",
        where=where,
        got=name,
        expected=one_of(known),
        fix=f"did you mean {near[0]!r}?" if near else None,
    )


def type_name(wanted: Any) -> str:
    """
    A type as a reader of a configuration file knows it.

    >>> type_name(int | None)
    'an integer'
    """
    if get_origin(wanted) in (Union, types.UnionType):
        return " or ".join(type_name(part) for part in get_args(wanted) if part is not type(None))
    if _is_enum(wanted):
        return " or ".join(repr(member.value) for member in wanted)
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", Path: "a path"}
    return names.get(wanted, str(wanted if get_origin(wanted) else getattr(wanted, "__name__", wanted)))


def _is_key(attribute: Any) -> bool:
    return attribute.init and not attribute.metadata.get("internal")


def _to_int(value: Any, _type: type[int]) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("not an integer")
    return value


def _to_float(value: Any, _type: type[float]) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError("not a number")
    return float(value)


def _to_bool(value: Any, _type: type[bool]) -> bool:
    if not isinstance(value, bool):
        raise TypeError("not a truth value")
    return value


def _to_str(value: Any, wanted: type[str]) -> str:
    if not isinstance(value, str) or "\0" in value:  # no name and no path has one, and C code would cut it there
        raise TypeError("not a string")
    return wanted(value) if _is_enum(wanted) else value  # cattrs gives a `StrEnum` to the hook of `str`


def _to_path(value: Any, _type: type[Path]) -> Path:
    return Path(_to_str(value, str)).expanduser()


def _to_sequence(value: Any, wanted: Any) -> Any:
    if not isinstance(value, list | tuple):  # text is a sequence, too: of its letters
        raise TypeError("not a list")
    (part, *_) = get_args(wanted)
    return get_origin(wanted)(_converter.structure(item, part) for item in value)


def _is_enum(wanted: Any) -> bool:
    return isinstance(wanted, type) and issubclass(wanted, Enum)


def _is_sequence(wanted: Any) -> bool:
    """Whether *wanted* is a list, or a tuple of any length, of one type."""
    origin, parts = get_origin(wanted), get_args(wanted)
    return (origin is list and len(parts) == 1) or (origin is tuple and parts[1:] == (...,))


def _to_optional(value: Any, wanted: Any) -> Any:
    if value is None:
        return None
    (part,) = (part for part in get_args(wanted) if part is not type(None))
    return _converter.structure(value, part)


def _is_optional(wanted: Any) -> bool:
    parts = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else ()
    return len(parts) == 2 and type(None) in parts


_converter = cattrs.Converter(forbid_extra_keys=True)
_converter.register_structure_hook(int, _to_int)
_converter.register_structure_hook(float, _to_float)
_converter.register_structure_hook(bool, _to_bool)
_converter.register_structure_hook(str, _to_str)
_converter.register_structure_hook(Path, _to_path)
_converter.register_structure_hook_func(_is_optional, _to_optional)
_converter.register_structure_hook_func(_is_sequence, _to_sequence)
