"""Good files taken apart, changed and written again: GGUF and safetensors with its config.json."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from attrs import evolve, frozen

from power_core.artifacts import TensorFile, open_tensors
from power_core.artifacts.gguf import TENSOR_TYPES, GgufFile, StringArray

__all__ = ["JSON_VALUE", "Container", "Key", "Tensor", "Value", "size_of"]

Key: TypeAlias = tuple[str, ...]
"""A GGUF key, or the path of one through the tables of a config.json."""

JSON_VALUE = "json"
_CONFIG = "config.json"
_TEXTS = "__metadata__"  # where a safetensors header keeps texts
_VALUE_TYPES = ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "arr", "u64", "i64", "f64"]
_CODES = dict(zip(_VALUE_TYPES, ["B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d"], strict=True))
_TYPE_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
_BLOCKS = {kind.name: (kind.block, kind.nbytes) for kind in TENSOR_TYPES.values()}
_BLOCKS |= {"BOOL": (1, 1), **{f"U{bits}": (1, bits // 8) for bits in (8, 16, 32, 64)}}  # safetensors' own


@frozen
class Value:
    """A key's value: *kind* is a GGUF type such as ``u32`` or ``arr[f32]``, or `JSON_VALUE`."""

    kind: str
    value: Any


@frozen
class Tensor:
    """A tensor with its bytes; the shape has the outermost dimension first."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def changed(self, *, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Another type or shape; the bytes are repeated or cut to what that takes."""
        dtype, shape = dtype or self.dtype, shape or self.shape
        nbytes = size_of(dtype, shape)
        copies = -(-nbytes // max(len(self.data), 1))
        return Tensor(dtype, shape, (self.data * copies)[:nbytes])


@frozen
class Container:
    """
    All of a drafter's file. Nothing here changes in place: each method returns another one.

    Args:
        name: The file's name.
        format: `gguf` or `safetensors`.
        keys: In order.
        tensors: In order.
    """

    name: str
    format: str
    keys: Mapping[Key, Value]
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Container:
        """The file at *path*, which must be whole."""
        file = open_tensors(path)
        data = file.path.read_bytes()
        tensors = {
            name: Tensor(t.dtype, t.shape, data[t.offset : t.offset + t.nbytes]) for name, t in file.tensors.items()
        }
        return cls(file.path.name, file.format, dict(_keys(file)), tensors)

    def with_key(self, key: Key, value: Value) -> Container:
        """With *key* replaced or added."""
        return evolve(self, keys={**self.keys, key: value})

    def without_key(self, key: Key) -> Container:
        """Without *key*, if it was there."""
        return evolve(self, keys={each: value for each, value in self.keys.items() if each != key})

    def with_tensor(self, name: str, tensor: Tensor) -> Container:
        """With the tensor *name* replaced or added."""
        return evolve(self, tensors={**self.tensors, name: tensor})

    def without_tensor(self, name: str) -> Container:
        """Without the tensor *name*, if it was there."""
        return evolve(self, tensors={each: tensor for each, tensor in self.tensors.items() if each != name})

    def write(self, folder: Path) -> Path:
        """Write the file, and its config.json where it has keys, into *folder*; the tensor file's path."""
        path = folder / self.name
        if self.format == "gguf":
            path.write_bytes(_gguf(self))
            return path
        tables = _nested(self.keys)
        texts = tables.pop(_TEXTS, None)
        path.write_bytes(_safetensors(self.tensors, texts))
        if tables:
            # JSON has no infinity, but numbers that Python reads as one.
            text = json.dumps(tables).replace("Infinity", "1e999")
            (folder / _CONFIG).write_text(text, encoding="utf-8")
        return path


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    block, nbytes = _BLOCKS[dtype]
    return math.prod(shape) // block * nbytes


def _keys(file: TensorFile) -> Iterator[tuple[Key, Value]]:
    if isinstance(file, GgufFile):
        for key, value in file.metadata.items():
            yield (key,), Value(file.value_types[key], list(value) if isinstance(value, StringArray) else value)
    else:
        yield from _flat((), file.metadata)


def _flat(path: Key, table: Mapping[str, Any]) -> Iterator[tuple[Key, Value]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat((*path, key), value)
        elif (*path, key) != (_TEXTS,):
            yield (*path, key), Value(JSON_VALUE, value)


def _nested(keys: Mapping[Key, Value]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for path, value in keys.items():
        table = tables
        for key in path[:-1]:
            inner = table.get(key)
            if not isinstance(inner, dict):  # a change put a plain value where a table was
                inner = table[key] = {}
            table = inner
        table[path[-1]] = value.value
    return tables


def _safetensors(tensors: Mapping[str, Tensor], texts: Any) -> bytes:
    header: dict[str, Any] = {} if texts is None else {_TEXTS: texts}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values())


def _gguf(container: Container) -> bytes:
    alignment = _alignment(container.keys)
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(container.tensors), len(container.keys))]
    for (key, *_), value in container.keys.items():
        parts += [_text(key), _value(value)]
    offset = 0
    for name, tensor in container.tensors.items():
        shape = tensor.shape[::-1]  # ggml has the fastest dimension first
        number = _TYPE_NUMBERS[tensor.dtype]
        parts += [_text(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset)]
        offset += -(-len(tensor.data) // alignment) * alignment
    header = b"".join(parts)
    values = [_padded(tensor.data, alignment) for tensor in container.tensors.values()]
    return _padded(header, alignment) + b"".join(values)


def _alignment(keys: Mapping[Key, Value]) -> int:
    stated = keys.get(("general.alignment",))
    return stated.value if stated is not None and stated.kind == "u32" and stated.value else 32


def _padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if not value.kind.startswith("arr["):
        return struct.pack("<I", _VALUE_TYPES.index(value.kind)) + _scalar(value.kind, value.value)
    element = value.kind[4:-1]
    head = struct.pack("<IIQ", _VALUE_TYPES.index("arr"), _VALUE_TYPES.index(element), len(value.value))
    return head + b"".join(_scalar(element, each) for each in value.value)


def _scalar(kind: str, value: Any) -> bytes:
    if kind == "str":
        return _text(value)
    return struct.pack(f"<{_CODES[kind]}", value.item() if isinstance(value, np.generic) else value)
