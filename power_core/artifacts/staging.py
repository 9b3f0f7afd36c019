"""
Folders that are being filled or emptied: hidden, locked while somebody works in them, swept when nobody does.

A process that is killed leaves its folder behind, with a whole drafter in it; its lock ends with it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from power_core.locks import HAS_LOCKS, try_lock

__all__ = ["hidden_folder", "sweep"]

_PREFIXES = (".admitting-", ".removing-")  # with the dot they are no names of artifacts
_YOUNG_S = 60.0  # a folder is made, and only then locked
_OLD_S = 86_400.0  # where there are no locks: longer than any copy takes


@contextmanager
def hidden_folder(root: Path, purpose: str) -> Iterator[Path]:
    """
    An empty folder in *root* that is locked until the block ends; what is left of it then is deleted.

    Args:
        root: An existing folder.
        purpose: `admitting` or `removing`.

    Raises:
        OSError: It cannot be made.
    """
    folder = Path(tempfile.mkdtemp(dir=root, prefix=f".{purpose}-"))
    lock = try_lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def sweep(root: Path) -> None:
    """Delete what killed processes left in *root*; what somebody works in, and what cannot be deleted, stays."""
    with suppress(OSError):
        for folder in root.iterdir():
            if folder.name.startswith(_PREFIXES) and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():  # none of ours
        return False
    age = time.time() - folder.stat().st_mtime
    if not HAS_LOCKS:
        return age > _OLD_S
    if age < _YOUNG_S or (lock := try_lock(folder)) is None:  # held; or no locks in this file system: it stays
        return False
    os.close(lock)
    return True
