"""Writing safetensors files without the safetensors library: tests and conformance fixtures need no more than this."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["save_tensors"]

_TYPES = {"f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32"}


def save_tensors(
    folder: Path, tensors: Mapping[str, NDArray[Any]], config: Mapping[str, Any], name: str = "model.safetensors"
) -> Path:
    """
    Write a drafter as published ones are: `model.safetensors` and `config.json` in a folder.

    Args:
        folder: Where to; it is made.
        tensors: In file order; float64, float32, float16, int64 or int32.
        config: Content of `config.json`.
        name: Name of the weight file.

    Returns:
        The weight file's path.

    The container is a length, a JSON header and the values without gaps (github.com/huggingface/safetensors, "Format").
    """
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    end = 0
    for key, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        start, end = end, end + len(data)
        dtype = _TYPES[np.dtype(array.dtype).str[1:]]
        header[key] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, end]}
        parts.append(data)
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    path = folder / name
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return path
