"""A cursor over the header of a GGUF container: every length is checked before it is used."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from power_core.artifacts.files import DOWNLOAD_AGAIN, refuse

__all__ = ["GgufHeader", "StringArray"]

# GGUF value types: number -> name, and numpy's little-endian type where the value is a number.
_VALUE_TYPES = dict(
    enumerate(["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "arr", "u64", "i64", "f64"])
)
_NUMPY_TYPES = {
    "u8": "<u1", "i8": "<i1", "u16": "<u2", "i16": "<i2", "u32": "<u4", "i32": "<i4",
    "f32": "<f4", "bool": "u1", "u64": "<u8", "i64": "<i8", "f64": "<f8",
}  # fmt: skip
_FIRST_READ = 4 << 20  # bytes; holds the header of most models


class StringArray(Sequence[str]):
    """
    An array of strings in a header, decoded when asked for: a vocabulary has up to 300,000 of them.

    Args:
        raw: The array's bytes: per string a u64 length and that many bytes.
        offsets: int64[n + 1]; where string i starts in *raw*, its length included.
    """

    def __init__(self, raw: bytes, offsets: NDArray[np.int64]) -> None:
        self.raw = raw
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self.raw[self._offsets[index] + 8 : self._offsets[index + 1]].decode("utf-8", "surrogateescape")

    def iter_bytes(self) -> Iterator[bytes]:
        """The strings as they are in the file."""
        offsets = self._offsets.tolist()
        return (self.raw[start + 8 : end] for start, end in pairwise(offsets))


class GgufHeader:
    """A cursor over the start of a file that never reads past what was asked or past the end."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.pos = 0
        self.buffer = b""
        self._grow(min(24, size))

    def _grow(self, end: int) -> bytes:
        """The buffer, made to reach *end* at least; reads ahead, in doubling steps."""
        if end > self.size:
            refuse(
                self.path, f"the file ends inside its header, at byte {self.size}", got=self.size, fix=DOWNLOAD_AGAIN
            )
        wanted = min(self.size, max(end, _FIRST_READ, 2 * len(self.buffer)))
        try:
            with self.path.open("rb") as file:
                self.buffer = file.read(wanted)
        except OSError as exc:
            refuse(self.path, f"the file cannot be read: {exc.strerror}", fix="check its permissions")
        if len(self.buffer) < end:
            refuse(self.path, "the file was cut while it was read", got=len(self.buffer), fix=DOWNLOAD_AGAIN)
        return self.buffer

    def take(self, count: int) -> bytes:
        end = self.pos + count
        buffer = self.buffer if end <= len(self.buffer) else self._grow(end)
        start, self.pos = self.pos, end
        return buffer[start:end]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def text(self, what: str) -> str:
        length = self.u64()
        if length > self.size - self.pos:
            refuse(self.path, f"the length of {what} points past the end of the file", got=length, fix=DOWNLOAD_AGAIN)
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            refuse(self.path, f"{what} is not UTF-8", fix=DOWNLOAD_AGAIN)

    def name(self, what: str, taken: Mapping[str, object]) -> str:
        """A key or tensor name: not empty, no NUL (C code would cut it there), not seen before."""
        name = self.text(f"a {what}")
        if not name or "\0" in name:
            refuse(self.path, f"{what} {len(taken)} has the name {name!r}", got=name, fix=DOWNLOAD_AGAIN)
        if name in taken:
            refuse(self.path, f"{what} {name!r} occurs twice", got=name)
        return name

    def value(self, key: str) -> tuple[str, object]:
        """The type and value of *key*."""
        kind = self._kind(key)
        if kind == "str":
            return kind, self.text(key)
        if kind != "arr":
            return kind, self._numbers(key, kind, 1)[0].item() if kind != "bool" else bool(self.take(1)[0])
        element, count = self._kind(key), self.u64()
        if element == "arr":
            refuse(self.path, f"{key} is an array of arrays", expected="an array of numbers or strings")
        values = self._strings(key, count) if element == "str" else self._numbers(key, element, count)
        return f"arr[{element}]", values

    def _kind(self, key: str) -> str:
        number = self.u32()
        if number not in _VALUE_TYPES:
            refuse(
                self.path,
                f"{key} has the unknown value type {number}",
                got=number,
                expected="0 to 12",
                fix=DOWNLOAD_AGAIN,
            )
        return _VALUE_TYPES[number]

    def _room(self, key: str, count: int, least: int) -> None:
        if count > (self.size - self.pos) // least:
            refuse(self.path, f"{key} claims {count} elements, more than the file holds", got=count, fix=DOWNLOAD_AGAIN)

    def _numbers(self, key: str, kind: str, count: int) -> NDArray[np.generic]:
        dtype = np.dtype(_NUMPY_TYPES[kind])
        self._room(key, count, dtype.itemsize)
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return values.astype(np.bool_) if kind == "bool" else values

    def _strings(self, key: str, count: int) -> StringArray:
        self._room(key, count, 8)
        start = pos = self.pos
        buffer, offsets, unpack = self.buffer, [0], struct.Struct("<Q").unpack_from
        for _ in range(count):  # the one hot loop: up to 300,000 rounds for a large vocabulary
            if pos + 8 > len(buffer):
                buffer = self._grow(pos + 8)
            pos += 8 + unpack(buffer, pos)[0]
            if pos > self.size:
                refuse(self.path, f"a string of {key} points past the end of the file", fix=DOWNLOAD_AGAIN)
            offsets.append(pos - start)
        raw = self.take(pos - start)
        return StringArray(raw, np.array(offsets, np.int64))
