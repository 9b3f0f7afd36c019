"""
Reading a safetensors container: eight bytes of length, a JSON header, then the values without gaps.

The format is that of https://github.com/huggingface/safetensors (README, "Format"). The rules are those of
its own reader or stricter, so that what passes here loads there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from power_core.artifacts.files import DOWNLOAD_AGAIN, FileStamp, read_values, refuse, widened
from power_core.artifacts.tensors import TensorInfo

__all__ = ["CONFIG_FILE", "SafetensorsFile"]

CONFIG_FILE = "config.json"
METADATA_KEY = "__metadata__"
_MAX_HEADER = 16 << 20  # bytes; a drafter's header has some kilobytes, the format allows 100 MB
_MAX_CONFIG = 1 << 20
_MAX_DIMENSIONS = 8
_SAVE_AGAIN = "save the file again with the safetensors library"
_NUMPY_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "?",
}  # fmt: skip


@frozen(eq=False)
class SafetensorsFile:
    """
    A safetensors file whose header was read and checked: a `TensorFile`.

    Args:
        path: The file.
        metadata: The keys of `config.json` beside it, and the header's own texts under `__metadata__`.
        tensors: Tensors by name, in the order of their values.
        files: *path*, and `config.json` where there is one.
        stamp: Size, time and inode of the file when its header was read.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]
    stamp: FileStamp = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """
        Read the header of *path*, check the container, and read `config.json` in its folder.

        Raises:
            ArtifactError: One of the two is damaged.
        """
        stamp = FileStamp.of(path)
        header, start = _read_header(path, stamp.size)
        texts = _texts(path, header.pop(METADATA_KEY, {}))
        tensors = _tensors(path, header, start, stamp.size)
        config = path.with_name(CONFIG_FILE)
        if not config.exists():
            return cls(path, {METADATA_KEY: texts}, tensors, (path,), stamp)
        return cls(path, {**_read_config(config), METADATA_KEY: texts}, tensors, (path, config), stamp)

    @property
    def format(self) -> Literal["safetensors"]:
        return "safetensors"

    def read(self, name: str) -> NDArray[np.generic]:
        """
        The values of a tensor: see `TensorFile.read`.

        Raises:
            ArtifactError: No such tensor, or the file changed.
        """
        if name not in self.tensors:
            refuse(
                self.path, f"the tensor {name!r} is missing", got=name, expected="a tensor of the file", fix=_SAVE_AGAIN
            )
        tensor = self.tensors[name]
        values = read_values(self.path, self.stamp, tensor, np.dtype(_NUMPY_TYPES[tensor.dtype]))
        return widened(values, tensor.dtype).reshape(tensor.shape)


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The header's object, and where the values start."""
    if size < 8:
        refuse(path, f"the file has {size} bytes", got=size, expected="a safetensors file", fix=DOWNLOAD_AGAIN)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(_MAX_HEADER, size - 8):
                what = f"the header claims {length} bytes"
                most = f"at most {min(_MAX_HEADER, size - 8)}"
                refuse(path, what, got=length, expected=most, fix=DOWNLOAD_AGAIN)
            data = file.read(length)
    except OSError as exc:
        refuse(path, f"the file cannot be read: {exc.strerror or exc}", fix="check its permissions")
    if not data.startswith(b"{"):
        refuse(path, "the header is no JSON object", expected="a safetensors file", fix=DOWNLOAD_AGAIN)
    return _json_object(path, data, "the header"), 8 + length


def _read_config(path: Path) -> dict[str, Any]:
    stamp = FileStamp.of(path)
    if stamp.size > _MAX_CONFIG:
        refuse(path, f"the file has {stamp.size} bytes", expected=f"at most {_MAX_CONFIG}", fix=DOWNLOAD_AGAIN)
    try:
        data = path.read_bytes()
    except OSError as exc:
        refuse(path, f"the file cannot be read: {exc.strerror or exc}", fix="check its permissions")
    config = _json_object(path, data, "the file")
    if METADATA_KEY in config:
        refuse(path, f"the key {METADATA_KEY} is the weight file's", expected="a model's config.json")
    return config


def _json_object(path: Path, data: bytes, what: str) -> dict[str, Any]:
    """A JSON object without a doubt: no key twice, no NaN."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except ValueError as exc:  # broken UTF-8 and broken JSON
        refuse(path, f"{what} is not JSON: {str(exc)[:160]}", fix=DOWNLOAD_AGAIN)
    except RecursionError:
        refuse(path, f"{what} is nested too deeply", fix=DOWNLOAD_AGAIN)
    if not isinstance(value, dict):
        refuse(path, f"{what} is no JSON object", got=type(value).__name__, expected="an object", fix=DOWNLOAD_AGAIN)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {key!r:.80} occurs twice")
        table[key] = value
    return table


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _texts(path: Path, value: object) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        refuse(path, f"{METADATA_KEY} is {value!r:.80}", got=value, expected="an object of texts", fix=_SAVE_AGAIN)
    return value


def _tensors(path: Path, header: Mapping[str, Any], start: int, size: int) -> dict[str, TensorInfo]:
    """The table by offset: each tensor begins where the one before it ends, the last ends with the file."""
    found = sorted((_tensor(path, name, entry) for name, entry in header.items()), key=lambda t: (t.offset, t.nbytes))
    expected = 0
    for tensor in found:
        if tensor.offset != expected:
            what = f"tensor {tensor.name!r:.80} starts at {tensor.offset}"
            refuse(path, what, got=tensor.offset, expected=expected, fix=_SAVE_AGAIN)
        expected += tensor.nbytes
    if start + expected != size:
        what = f"the values take {expected} bytes, the file has {size - start} for them"
        refuse(path, what, got=size - start, expected=expected, fix=DOWNLOAD_AGAIN)
    return {t.name: TensorInfo(t.name, t.dtype, t.shape, start + t.offset, t.nbytes) for t in found}


def _tensor(path: Path, name: str, entry: object) -> TensorInfo:
    """One entry; its offset is still relative to the values."""
    label = f"tensor {name!r:.80}"
    if not name or "\0" in name:
        refuse(path, f"a tensor has the name {name!r:.80}", got=name, fix=_SAVE_AGAIN)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        refuse(path, f"{label} is {entry!r:.80}", expected="dtype, shape and data_offsets", fix=_SAVE_AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _NUMPY_TYPES:
        refuse(
            path, f"{label} has the type {dtype!r:.40}", got=dtype, expected=", ".join(_NUMPY_TYPES), fix=_SAVE_AGAIN
        )
    if not _are_sizes(shape, least=1) or len(shape) > _MAX_DIMENSIONS:
        refuse(path, f"{label} has the shape {shape!r:.80}", got=shape, expected="sizes from 1 on", fix=_SAVE_AGAIN)
    if not _are_sizes(offsets, least=0) or len(offsets) != 2:
        refuse(path, f"{label} has the offsets {offsets!r:.80}", got=offsets, expected="[begin, end]", fix=_SAVE_AGAIN)
    nbytes = math.prod(shape) * np.dtype(_NUMPY_TYPES[dtype]).itemsize
    if offsets[1] - offsets[0] != nbytes:
        what = f"{label} takes {offsets[1] - offsets[0]} bytes"
        refuse(path, what, got=offsets, expected=f"{nbytes}, for its type and shape", fix=_SAVE_AGAIN)
    return TensorInfo(name, dtype, tuple(shape), offsets[0], nbytes)


def _are_sizes(value: object, *, least: int) -> bool:
    # `type`, for True is an int.
    return isinstance(value, list) and all(type(size) is int and least <= size < 2**48 for size in value)
