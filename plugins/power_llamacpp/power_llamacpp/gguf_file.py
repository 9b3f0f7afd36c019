"""
Reading a GGUF container: header, metadata and tensor table, every length checked before it is used.

The format is ggml's (docs/gguf.md in the ggml project), versions 2 and 3, little-endian. The rules are
those of llama.cpp's own reader or stricter, so that what passes here parses there. The `gguf` package's
reader is not used: on a vocabulary of 49,152 tokens it takes 2 s where this one takes 25 ms, and it
answers damage with whatever exception numpy raises.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, overload

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from power_core.errors import ArtifactError
from power_llamacpp import cache

__all__ = ["TENSOR_TYPES", "GgufInfo", "StringArray", "TensorInfo", "TensorType", "read_gguf", "refuse"]

DOWNLOAD_AGAIN = "download the file again"
CONVERT_AGAIN = "convert the model again with llama.cpp's converter"


@frozen
class TensorType:
    """A ggml tensor type: values a block, bytes a block, whether kernels take it as a weight matrix."""

    name: str
    block: int
    nbytes: int
    weight: bool = True


TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36, weight=False),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292, weight=False),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1, weight=False),
    25: TensorType("I16", 1, 2, weight=False),
    26: TensorType("I32", 1, 4, weight=False),
    27: TensorType("I64", 1, 8, weight=False),
    28: TensorType("F64", 1, 8, weight=False),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}
"""ggml's types by their number in a file; numbers that were withdrawn are absent."""

# GGUF value types: number -> name, and numpy's little-endian type where the value is a number.
_VALUE_TYPES = dict(
    enumerate(["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "arr", "u64", "i64", "f64"])
)
_NUMPY_TYPES = {
    "u8": "<u1", "i8": "<i1", "u16": "<u2", "i16": "<i2", "u32": "<u4", "i32": "<i4",
    "f32": "<f4", "bool": "u1", "u64": "<u8", "i64": "<i8", "f64": "<f8",
}  # fmt: skip
_MAX_NAME = 63  # ggml keeps tensor names in 64 bytes
_FIRST_READ = 4 << 20  # bytes; holds the header of most models
_SETTLED_NS = 2_000_000_000  # a file younger than this may still change within its timestamp's tick


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


@frozen
class TensorInfo:
    """
    One entry of the tensor table.

    Args:
        shape: Dimensions in ggml's order, fastest first: a matrix is (inputs, outputs).
        type_name: ggml's type.
        offset: First byte in the file.
        nbytes: Bytes.
    """

    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


@frozen(eq=False)
class GgufInfo:
    """
    What a GGUF file says about itself, without its weights.

    Args:
        path: The file.
        version: Container version.
        architecture: `general.architecture`.
        metadata: Values by key: numbers, strings, numpy arrays, `StringArray`s.
        value_types: GGUF type by key: "u32", "str", "arr[f32]".
        tensors: Tensors by name, in file order.
        file_size: Bytes.
    """

    path: Path
    version: int
    architecture: str
    metadata: Mapping[str, object]
    value_types: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    file_size: int
    _stat: tuple[int, int] = field(repr=False)  # modification time in ns and inode when the header was read

    def integer(self, key: str, default: int = 0) -> int:
        """The architecture's own integer *key*; the largest element where the file has one a layer."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        return int(np.max(value)) if isinstance(value, int | np.ndarray) and np.size(value) else default

    @property
    def context_length(self) -> int:
        """Positions the model was trained for."""
        return self.integer("context_length")

    @property
    def hidden_size(self) -> int:
        return self.integer("embedding_length")

    @property
    def num_layers(self) -> int:
        """Blocks of the trunk: prediction (NextN) blocks are not among them."""
        return self.integer("block_count") - self.nextn_layers

    @property
    def nextn_layers(self) -> int:
        """Prediction blocks behind the trunk."""
        return self.integer("nextn_predict_layers")

    @property
    def sliding_window(self) -> int:
        """Positions that windowed layers see; 0 where every layer sees all."""
        return self.integer("attention.sliding_window")

    @property
    def vocab_size(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if isinstance(tokens, StringArray) else self.integer("vocab_size")

    def sha256(self) -> str:
        """
        Digest of the whole file; kept between processes for as long as size, time and inode stay the same.

        Raises:
            ArtifactError: The file cannot be read, or is no longer the one whose header was read.
        """
        now = _regular_file(self.path)
        if (now.st_size, now.st_mtime_ns, now.st_ino) != (self.file_size, *self._stat):
            refuse(self.path, "the file changed after it was opened", fix="let the download or copy finish first")
        key = {
            "path": str(self.path.resolve()),
            "size": self.file_size,
            "mtime_ns": self._stat[0],
            "inode": self._stat[1],
        }
        known = cache.load("digests", key)
        if isinstance(known, str):
            return known
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if time.time_ns() - self._stat[0] > _SETTLED_NS:
            cache.store("digests", key, digest)
        return digest

    def tokenizer_sha256(self) -> str:
        """Digest of every `tokenizer.*` key: files that agree here turn text into the same ids."""
        digest = hashlib.sha256()
        for key in sorted(key for key in self.metadata if key.startswith("tokenizer.")):
            value = self.metadata[key]
            raw = value.raw if isinstance(value, StringArray) else np.asarray(value)
            data = raw if isinstance(raw, bytes) else str(raw.tolist()).encode()
            digest.update(f"{key}:{self.value_types[key]}:{len(data)}:".encode() + data)
        return digest.hexdigest()


def refuse(path: Path, what: str, *, got: object = None, expected: object = None, fix: str = CONVERT_AGAIN) -> NoReturn:
    """Raise the `ArtifactError` for *path*: one line, with its data attributes filled."""
    raise ArtifactError(what, plugin="llamacpp", where=str(path), got=got, expected=expected, fix=fix)


def read_gguf(path: Path) -> GgufInfo:
    """
    Read the header of *path* and check the container: nothing in it points outside the file.

    Raises:
        ArtifactError: Not a GGUF file of a supported version, truncated, or inconsistent.
    """
    facts = _regular_file(path)
    header = _Header(path, facts.st_size)
    version, tensor_count, key_count = _read_preamble(header)
    metadata: dict[str, object] = {}
    types: dict[str, str] = {}
    for _ in range(key_count):
        key = header.name("key", metadata)
        types[key], metadata[key] = header.value(key)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        refuse(path, "the key general.architecture is missing", expected="a model's GGUF file")
    alignment = _alignment(path, metadata, types)
    tensors = _read_tensors(header, tensor_count, alignment)
    return GgufInfo(
        path=path,
        version=version,
        architecture=architecture,
        metadata=metadata,
        value_types=types,
        tensors=tensors,
        file_size=facts.st_size,
        stat=(facts.st_mtime_ns, facts.st_ino),
    )


def _regular_file(path: Path) -> os.stat_result:
    try:
        facts = path.stat()
    except OSError as exc:
        refuse(path, f"the file cannot be read: {exc.strerror}", fix="check the path")
    if not stat.S_ISREG(facts.st_mode):
        refuse(path, "this is not a regular file", expected="a GGUF file", fix="check the path")
    return facts


class _Header:
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


def _read_preamble(header: _Header) -> tuple[int, int, int]:
    """Version, tensor count and key count."""
    path = header.path
    magic = header.take(4) if header.size >= 4 else header.buffer
    if magic != b"GGUF":
        found = "an empty file" if not magic else f"a file that starts with {magic!r}"
        refuse(path, f"this is {found}", got=magic, expected="b'GGUF'", fix="give the path of a GGUF model")
    version = header.u32()
    if version & 0xFFFF == 0 and version:
        refuse(path, "the file is big-endian", got=version, expected="little-endian")
    if version not in (2, 3):
        refuse(path, f"GGUF version {version} is not supported", got=version, expected="2 or 3")
    tensor_count, key_count = header.u64(), header.u64()
    # Smallest entries: a key has a length, a byte, a type and a value; a tensor a length, a byte and 24 bytes.
    for what, count, least in (("tensors", tensor_count, 33), ("keys", key_count, 14)):
        if count > header.size // least:
            refuse(path, f"the header claims {count} {what}, more than the file holds", got=count, fix=DOWNLOAD_AGAIN)
    return version, tensor_count, key_count


def _alignment(path: Path, metadata: Mapping[str, object], types: Mapping[str, str]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if types.get("general.alignment", "u32") != "u32" or not isinstance(alignment, int):
        refuse(path, "general.alignment has the wrong type", got=types["general.alignment"], expected="u32")
    if not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        refuse(path, f"general.alignment is {alignment}", got=alignment, expected="a power of two from 8 on")
    return alignment


def _read_tensors(header: _Header, count: int, alignment: int) -> dict[str, TensorInfo]:
    """The tensor table, with offsets from the start of the file."""
    table: dict[str, TensorInfo] = {}
    expected = 0  # tensors follow each other without gaps: llama.cpp wants it so, and nothing can overlap
    for _ in range(count):
        name = header.name("tensor", table)
        tensor = _read_tensor(header, name)
        if tensor.offset != expected:
            refuse(
                header.path,
                f"tensor {name} starts at {tensor.offset}",
                got=tensor.offset,
                expected=expected,
                fix=DOWNLOAD_AGAIN,
            )
        table[name] = tensor
        expected += -(-tensor.nbytes // alignment) * alignment
    start = -(-header.pos // alignment) * alignment
    for name, tensor in table.items():
        if start + tensor.offset + tensor.nbytes > header.size:
            missing = start + tensor.offset + tensor.nbytes - header.size
            refuse(
                header.path,
                f"the file is cut: tensor {name} ends {missing} bytes after it",
                got=header.size,
                fix=DOWNLOAD_AGAIN,
            )
    return {
        name: TensorInfo(tensor.shape, tensor.type_name, start + tensor.offset, tensor.nbytes)
        for name, tensor in table.items()
    }


def _read_tensor(header: _Header, name: str) -> TensorInfo:
    """One entry; its offset is still relative to the data section."""
    path = header.path
    if len(name.encode()) > _MAX_NAME:
        refuse(path, f"tensor name {name[:80]!r} is too long", got=len(name), expected=f"{_MAX_NAME} bytes or less")
    dimensions = header.u32()
    if not 1 <= dimensions <= 4:
        refuse(path, f"tensor {name} has {dimensions} dimensions", got=dimensions, expected="1 to 4")
    shape = tuple(header.u64() for _ in range(dimensions))
    number = header.u32()
    if number not in TENSOR_TYPES:
        refuse(path, f"tensor {name} has the unknown type {number}", got=number, fix="use a type this llama.cpp knows")
    kind = TENSOR_TYPES[number]
    if min(shape) < 1 or shape[0] % kind.block:
        refuse(
            path, f"tensor {name} has shape {shape}", got=shape, expected=f"rows of a multiple of {kind.block} values"
        )
    nbytes = int(np.prod(shape, dtype=object)) // kind.block * kind.nbytes
    if nbytes > header.size:
        refuse(path, f"tensor {name} would take {nbytes} bytes, more than the file", got=nbytes, fix=DOWNLOAD_AGAIN)
    return TensorInfo(shape, kind.name, header.u64(), nbytes)
