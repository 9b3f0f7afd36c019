"""Small random models of each kind of memory, for conformance runs: nothing has to be downloaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from power_core.errors import CapabilityError
from power_llamacpp.config import LlamaCppConfig

if TYPE_CHECKING:
    from power_core.target import TargetModel

__all__ = ["tiny_attention", "tiny_hybrid", "tiny_recurrent", "tiny_window"]


def tiny_attention(folder: Path) -> TargetModel:
    """Attention over everything: memory that can be cut anywhere."""
    from power_core.testing import gguf

    return _loaded(folder, gguf.tiny_llama)


def tiny_window(folder: Path) -> TargetModel:
    """A sliding window that forgets what it has passed."""
    from power_core.testing import gguf

    return _loaded(folder, gguf.tiny_gemma3, swa_full=False)


def tiny_recurrent(folder: Path) -> TargetModel:
    """A state that cannot be cut."""
    from power_core.testing import gguf

    return _loaded(folder, gguf.tiny_recurrent)


def tiny_hybrid(folder: Path) -> TargetModel:
    """Attention and recurrent layers in turn."""
    from power_core.testing import gguf

    return _loaded(folder, gguf.tiny_hybrid)


def _loaded(folder: Path, write: Callable[[Path], Path], *, swa_full: bool = True) -> TargetModel:
    from power_llamacpp.target import LlamaCppBackend

    if find_spec("gguf") is None:
        raise CapabilityError(
            "writing a small GGUF file needs the package gguf", who="llamacpp", plugin="llamacpp",
            fix="pip install 'power-core[testing]'",
        )  # fmt: skip
    return LlamaCppBackend(LlamaCppConfig(swa_full=swa_full)).load(write(folder / "tiny.gguf"))
