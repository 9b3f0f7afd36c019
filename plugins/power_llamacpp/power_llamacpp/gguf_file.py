"""A GGUF container as a llama.cpp model: the core's reader, and the facts that llama.cpp takes from its header."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import NoReturn

import numpy as np
from attrs import frozen

from power_core import user_cache
from power_core.artifacts import files
from power_core.artifacts.files import CONVERT_AGAIN, DOWNLOAD_AGAIN
from power_core.artifacts.gguf import TENSOR_TYPES, GgufFile, StringArray
from power_core.errors import ArtifactError

__all__ = ["DOWNLOAD_AGAIN", "TENSOR_TYPES", "GgufInfo", "StringArray", "read_gguf", "refuse"]

_SETTLED_NS = 2_000_000_000  # a file younger than this may still change within its timestamp's tick


@frozen(eq=False)
class GgufInfo(GgufFile):
    """What a GGUF model says about itself, without its weights."""

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
        self.stamp.check(self.path)
        key = {
            "path": str(self.path.resolve()),
            "size": self.stamp.size,
            "mtime_ns": self.stamp.mtime_ns,
            "inode": self.stamp.inode,
        }
        known = user_cache.load("digests", key)
        if isinstance(known, str):
            return known
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if time.time_ns() - self.stamp.mtime_ns > _SETTLED_NS:
            user_cache.store("digests", key, digest)
        return digest

    def tokenizer_sha256(self) -> str:
        """Digest of every `tokenizer.*` key: files that agree here turn text into the same ids."""
        return self.keys_sha256("tokenizer.")


def refuse(path: Path, what: str, *, got: object = None, expected: object = None, fix: str = CONVERT_AGAIN) -> NoReturn:
    """Raise the `ArtifactError` for *path*: one line, with its data attributes filled."""
    files.refuse(path, what, got=got, expected=expected, fix=fix, plugin="llamacpp")


def read_gguf(path: Path) -> GgufInfo:
    """
    Read the header of *path* and check the container: nothing in it points outside the file.

    Raises:
        ArtifactError: Not a GGUF file of a supported version, truncated, or inconsistent.
    """
    try:
        return GgufInfo.open(path)
    except ArtifactError as exc:
        raise ArtifactError(
            exc.what, plugin="llamacpp", where=exc.where, got=exc.got, expected=exc.expected, fix=exc.fix
        ) from exc
