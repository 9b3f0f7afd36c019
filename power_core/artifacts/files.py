"""What both formats and the store need of files: regular ones only, the same bytes twice, one-line refusals."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.artifacts.tensors import TensorInfo
from power_core.errors import ArtifactError

__all__ = ["CONVERT_AGAIN", "DOWNLOAD_AGAIN", "FileStamp", "file_sha256", "read_values", "refuse", "widened"]

CHECK_PATH = "check the path"
CONVERT_AGAIN = "convert the model again"
DOWNLOAD_AGAIN = "download the file again"


def refuse(
    path: Path,
    what: str,
    *,
    got: object = None,
    expected: object = None,
    fix: str = CONVERT_AGAIN,
    plugin: str | None = None,
) -> NoReturn:
    """Raise the `ArtifactError` for *path*: one line, with its data attributes filled."""
    raise ArtifactError(what, plugin=plugin, where=str(path), got=got, expected=expected, fix=fix)


@frozen
class FileStamp:
    """Size, modification time and inode: enough to notice that a file is being replaced, no proof that it was not."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, *, follow: bool = True) -> FileStamp:
        """
        The stamp of a regular file.

        Args:
            path: The file.
            follow: Whether a symbolic link to one will do.

        Raises:
            ArtifactError: It is something else, or cannot be read.
        """
        try:
            facts = path.stat(follow_symlinks=follow)
        except (OSError, ValueError) as exc:  # ValueError: a path with a NUL
            refuse(path, f"the file cannot be read: {getattr(exc, 'strerror', None) or exc}", fix=CHECK_PATH)
        if not stat.S_ISREG(facts.st_mode):
            found = "a symbolic link" if stat.S_ISLNK(facts.st_mode) else "not a regular file"
            refuse(path, f"this is {found}", expected="a file", fix=CHECK_PATH)
        return cls(facts.st_size, facts.st_mtime_ns, facts.st_ino)

    def check(self, path: Path) -> None:
        """
        Check that *path* still is the file that was stamped.

        Raises:
            ArtifactError: It changed.
        """
        if FileStamp.of(path) != self:
            refuse(path, "the file changed after it was opened", fix="let the download or copy finish first")


def read_values(path: Path, stamp: FileStamp, tensor: TensorInfo, dtype: np.dtype[Any]) -> NDArray[Any]:
    """
    The bytes of *tensor* as a flat array of *dtype*, from the file whose header was read.

    Raises:
        ArtifactError: The file changed since, or cannot be read.
    """
    stamp.check(path)
    count = tensor.nbytes // dtype.itemsize
    try:
        values = np.fromfile(path, dtype, count=count, offset=tensor.offset)
    except OSError as exc:
        refuse(path, f"the file cannot be read: {exc.strerror or exc}", fix="check its permissions")
    if len(values) != count:
        refuse(path, f"the file was cut while tensor {tensor.name} was read", got=len(values), fix=DOWNLOAD_AGAIN)
    return values


def widened(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Floats of the file's *dtype* as float32; a BF16 number, read as uint16, is the upper half of one."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if values.dtype.kind == "f" else values.astype(values.dtype.newbyteorder("="))


def file_sha256(path: Path) -> str:
    """
    The file's digest, 64 hex digits, computed now.

    Raises:
        ArtifactError: It is no regular file or cannot be read.
    """
    FileStamp.of(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        refuse(path, f"the file cannot be read: {exc.strerror or exc}", fix="check its permissions")
