"""One view of the two container formats drafters come in: GGUF and safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.errors import ArtifactError

__all__ = ["TensorFile", "TensorInfo", "open_tensors"]


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


def open_tensors(path: Path) -> TensorFile:
    """
    Open a drafter's file and check its container; no value is read.

    Args:
        path: A GGUF or safetensors file, known by its content, or a folder with exactly one `*.safetensors`.

    Raises:
        ArtifactError: It is neither, or its header is damaged.
    """
    # The readers import the records above.
    from power_core.artifacts.files import FileStamp
    from power_core.artifacts.gguf import GgufFile
    from power_core.artifacts.safetensors_file import SafetensorsFile

    path = Path(path)
    file = _only_safetensors(path) if path.is_dir() else path
    FileStamp.of(file)
    start = _first_bytes(file)
    if start.startswith(b"GGUF"):
        return _whole(GgufFile.open(file))
    # A header begins with a brace after its length; the suffix lets a damaged file be explained as what it was.
    if start[8:] == b"{" or file.suffix == ".safetensors":
        return SafetensorsFile.open(file)
    found = "an empty file" if not start else f"a file that starts with {start!r}"
    raise ArtifactError(
        f"this is {found}", where=str(file), got=start, expected="a GGUF or safetensors file", fix="check the path"
    )


def _whole(file: TensorFile) -> TensorFile:
    """*file*, if it is all of a drafter: GGUF files may be cut into several."""
    parts = file.metadata.get("split.count", 1)
    if isinstance(parts, int) and parts <= 1:
        return file
    raise ArtifactError(
        f"the file is one of {parts} parts",
        where=str(file.path),
        got=parts,
        expected="a single file",
        fix="merge the parts with llama-gguf-split --merge",
    )


def _only_safetensors(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(file.name for file in found[:4])
    raise ArtifactError(
        f"the folder has {len(found)} safetensors files" + (f": {names}" if found else ""),
        where=str(folder),
        got=len(found),
        expected="exactly one",
        fix="give the file's path" if not found else "merge them into one file",
    )


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(9)
    except OSError as exc:
        raise ArtifactError(
            f"the file cannot be read: {exc.strerror or exc}", where=str(path), fix="check its permissions"
        ) from exc
