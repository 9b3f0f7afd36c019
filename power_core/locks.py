"""
Locks between processes: the system's own, on a folder, gone with the process that held them however that ended.

Nothing here is needed for correctness of what is read: files are replaced whole. A lock keeps two writers apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["HAS_LOCKS", "locked", "try_lock"]

_PAUSE_S = 0.02


def _flock() -> Callable[[int], None] | None:
    """Locks a descriptor, or raises; None on Windows, which has no such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    return lambda descriptor: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


_LOCK = _flock()
HAS_LOCKS = _LOCK is not None
"""Whether this system has them."""


def try_lock(folder: Path) -> int | None:
    """
    A descriptor that holds the lock of *folder* until it is closed.

    Returns:
        None where another one holds it, or where the system or the file system has no locks.
    """
    if _LOCK is None:
        return None
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        _LOCK(descriptor)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


@contextmanager
def locked(folder: Path, patience_s: float = 5.0) -> Iterator[None]:
    """Hold the lock of *folder*, as far as it can be had in *patience_s* seconds: a file system may have none."""
    end = time.monotonic() + patience_s
    lock = try_lock(folder)
    while lock is None and HAS_LOCKS and time.monotonic() < end:
        time.sleep(_PAUSE_S)
        lock = try_lock(folder)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)
