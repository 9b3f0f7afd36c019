"""One view of the two container formats drafters come in: GGUF and safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

__all__ = ["TensorFile", "TensorInfo"]


@frozen
class TensorInfo:
    """
    A tensor as a file's table declares it; offsets and sizes have been checked against the file.

    Args:
        name: As the file spells it.
        dtype: ggml's name in capitals for either format: `F32`, `F16`, `BF16`, `I64`, `Q8_0`, ...
        shape: Outermost dimension first, as numpy and torch have it; a matrix is (rows out, columns in).
        offset: Bytes from the start of the file.
        nbytes: Size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class TensorFile(Protocol):
    """
    A checked container; values are read when asked for.

    Attributes:
        path: The file with the tensors.
        format: `gguf` or `safetensors`.
        metadata: Keys of a GGUF header; for safetensors the header's `__metadata__` under that key, and the
            keys of `config.json` in the same folder where there is one.
        tensors: Name -> declaration.
        files: Every file that was read, the first is `path`: what a manifest digests.
    """

    @property
    def path(self) -> Path: ...
    @property
    def format(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def files(self) -> tuple[Path, ...]: ...

    def read(self, name: str) -> NDArray[np.generic]:
        """
        The values of a tensor in its declared shape: float32 for every float and quantized type, integers as they are.

        Raises:
            ArtifactError: No such tensor, or its type cannot be read.
        """
