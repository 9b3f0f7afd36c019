"""
The disk tier of the prompt cache: one file an entry, written whole or not at all, believed only if its digest agrees.

A file holds a header (JSON), the tokens, the parts, and a SHA-256 over all of that. Headers and tokens are
read when the folder is opened; parts only on a hit, after the digest was checked. Whatever is wrong
with a file makes it a miss with a warning, and removes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from attrs import define, frozen

from power_core.errors import ConfigError
from power_core.types import TokenId

__all__ = ["DiskEntry", "DiskTier", "PartShape", "make_folder"]

log = structlog.get_logger("power.prompt_cache")

_MAGIC = b"PWRPC001"
_SUFFIX = ".powercache"
_DIGEST_BYTES = 32
_HEADER_MOST = 1 << 20


def make_folder(folder: Path) -> None:
    """
    Make the folder of a `DiskTier` where it is not there.

    Raises:
        ConfigError: It can be neither used nor made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"the folder cannot be made: {exc.strerror}", who="prompt cache", where=str(folder),
            fix="set prompt_cache_dir to a folder that can be written",
        ) from exc  # fmt: skip


@frozen
class PartShape:
    """A part of a stored entry: what it covers, whether it can be cut, and its bytes in the file."""

    length: int
    can_cut: bool
    nbytes: int


@define
class DiskEntry:
    """
    What is known of a file without reading its parts.

    Attributes:
        used: Seconds of the file's last use.
        size: Bytes of the file.
    """

    key: str
    tokens: tuple[TokenId, ...]
    prefilled: int
    parts: dict[str, PartShape]
    offset: int
    size: int
    used: float


class DiskTier:
    """
    Entries in a folder that processes may share.

    Args:
        folder: Made if it is not there.
        max_bytes: Most bytes of all files; the least recently used go first.
        ttl: Seconds after its last use that a file is removed; None keeps it.
        clock: Wall-clock seconds, as file times have them.

    Raises:
        ConfigError: The folder can be neither used nor made.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int, ttl: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.ttl = ttl
        self.damaged = 0
        self._clock = clock
        self._entries: dict[str, DiskEntry] = {}  # file name -> entry
        make_folder(folder)
        for file in folder.glob("*" + _SUFFIX):
            entry = self._read_head(file)
            if entry is not None:
                self._entries[file.name] = entry
        self._evict()

    @property
    def entries(self) -> Sequence[DiskEntry]:
        """What can be found."""
        self._expire()
        return list(self._entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self._entries.values())

    def write(
        self, key: str, tokens: Sequence[TokenId], prefilled: int, parts: Mapping[str, tuple[PartShape, bytes]]
    ) -> bool:
        """
        Store an entry, replacing one of the same key and tokens. Returns whether it is on the disk now.

        A full or read-only disk is a warning: the cache goes on without.
        """
        name = _file_name(key, tokens)
        head, body = _head(key, tokens, prefilled, parts), b"".join(data for _, data in parts.values())
        data = head + body
        if len(data) + _DIGEST_BYTES > self.max_bytes:
            return False
        try:
            _write_atomically(self.folder / name, data + hashlib.sha256(data).digest())
        except OSError as exc:
            log.warning("a prompt cache file could not be written", file=name, error=str(exc))
            return False
        entry = self._read_head(self.folder / name)
        if entry is not None:
            self._entries[name] = entry
        self._evict()
        return name in self._entries

    def read(self, entry: DiskEntry) -> dict[str, bytes] | None:
        """The parts of *entry*, or None where its file is gone or damaged."""
        name = _file_name(entry.key, entry.tokens)
        file = self.folder / name
        try:
            data = file.read_bytes()
            os.utime(file, (self._clock(), self._clock()))
        except OSError as exc:
            self._remove(name, f"cannot be read: {exc.strerror}")
            return None
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest or len(data) != entry.size:
            self._remove(name, "its digest does not agree")
            return None
        entry.used = self._clock()
        found, at = {}, entry.offset
        for part, shape in entry.parts.items():
            found[part] = body[at : at + shape.nbytes]
            at += shape.nbytes
        return found

    def drop(self, key: str, tokens: Sequence[TokenId]) -> None:
        """Remove the entry of *key* and *tokens*, if there is one: its parts could not be used."""
        name = _file_name(key, tokens)
        if name in self._entries:
            self._remove(name, "its content was refused")

    def _read_head(self, file: Path) -> DiskEntry | None:
        try:
            with file.open("rb") as data:
                return _parse_head(data.read, file.stat())
        except Exception as exc:  # noqa: BLE001 - whatever a file holds that is none of ours, it is a miss
            self._remove(file.name, f"{type(exc).__name__}: {exc}")
            return None

    def _remove(self, name: str, cause: str) -> None:
        self.damaged += 1
        log.warning("a prompt cache file was damaged and is removed", file=name, cause=cause)
        self._unlink(name)

    def _unlink(self, name: str) -> None:
        self._entries.pop(name, None)
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as exc:
            log.warning("a prompt cache file could not be removed", file=name, error=str(exc))

    def _expire(self) -> None:
        if self.ttl is not None:
            oldest = self._clock() - self.ttl
            for name in [name for name, entry in self._entries.items() if entry.used < oldest]:
                self._unlink(name)

    def _evict(self) -> None:
        self._expire()
        total = self.nbytes
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1].used):
            if total <= self.max_bytes:
                return
            total -= entry.size
            self._unlink(name)


def _file_name(key: str, tokens: Sequence[TokenId]) -> str:
    digest = hashlib.sha256(key.encode() + b"\0" + array("i", tokens).tobytes())
    return digest.hexdigest()[:40] + _SUFFIX


def _head(key: str, tokens: Sequence[TokenId], prefilled: int, parts: Mapping[str, tuple[PartShape, bytes]]) -> bytes:
    shapes = {name: [shape.length, shape.can_cut, len(data)] for name, (shape, data) in parts.items()}
    facts: dict[str, Any] = {"key": key, "tokens": len(tokens), "prefilled": prefilled, "parts": shapes}
    text = json.dumps(facts).encode()
    return _MAGIC + struct.pack("<I", len(text)) + text + array("i", tokens).tobytes()


def _parse_head(read: Callable[[int], bytes], stat: os.stat_result) -> DiskEntry:
    if read(len(_MAGIC)) != _MAGIC:
        raise ValueError("another format")
    (length,) = struct.unpack("<I", read(4))
    if length > _HEADER_MOST:
        raise ValueError(f"a header of {length} bytes")
    facts = json.loads(read(length))
    tokens = array("i")
    count = int(facts["tokens"])
    if not 0 <= count * tokens.itemsize <= stat.st_size:
        raise ValueError(f"{count} tokens in {stat.st_size} bytes")
    tokens.frombytes(read(count * tokens.itemsize))
    parts = {str(name): PartShape(int(n), bool(cut), int(size)) for name, (n, cut, size) in facts["parts"].items()}
    offset = len(_MAGIC) + 4 + length + count * tokens.itemsize
    expected = offset + sum(shape.nbytes for shape in parts.values()) + _DIGEST_BYTES
    if expected != stat.st_size or len(tokens) != count:
        raise ValueError(f"{stat.st_size} bytes where {expected} are due")
    return DiskEntry(
        str(facts["key"]), tuple(tokens), int(facts["prefilled"]), parts, offset, stat.st_size, stat.st_mtime
    )


def _write_atomically(file: Path, data: bytes) -> None:
    """A reader sees the old file or the whole new one, also after a crash."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
