"""Small random models of each kind of memory, for conformance runs: nothing has to be downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from power_llamacpp.config import LlamaCppConfig

if TYPE_CHECKING:
    from power_core.target import SessionOptions, TargetModel

__all__ = ["tiny_attention", "tiny_hybrid", "tiny_recurrent", "tiny_window"]


def tiny_attention(folder: Path) -> tuple[TargetModel, list[SessionOptions]]:
    """Attention over everything: memory that can be cut anywhere; every block but the last gives its states."""
    from power_core.testing import gguf

    model = _loaded(folder, partial(gguf.tiny_llama, layers=4))
    return model, [_options((0, 2))]


def tiny_window(folder: Path) -> tuple[TargetModel, list[SessionOptions]]:
    """A sliding window that forgets what it has passed."""
    from power_core.testing import gguf

    return _loaded(folder, gguf.tiny_gemma3, swa_full=False), [_options()]


def tiny_recurrent(folder: Path) -> tuple[TargetModel, list[SessionOptions]]:
    """A state that cannot be cut."""
    from power_core.testing import gguf

    return _loaded(folder, gguf.tiny_recurrent), [_options()]


def tiny_hybrid(folder: Path) -> tuple[TargetModel, list[SessionOptions]]:
    """Attention and recurrent layers in turn, and a prediction layer whose state is read."""
    from power_core.draft_context import NEXTN_STATE
    from power_core.testing import gguf

    model = _loaded(folder, partial(gguf.tiny_hybrid, nextn_layers=1))
    return model, [_options((NEXTN_STATE, 0))]


def _options(hidden_layers: tuple[int, ...] = ()) -> SessionOptions:
    """What the conformance kit tries targets with, layers to read, and one thread, as is enough for these models."""
    from power_core.target import SessionOptions

    return SessionOptions(
        context_size=64, max_sequences=3, max_rows=8, rollback_rows=4, hidden_layers=hidden_layers, threads=1
    )


def _loaded(folder: Path, write: Callable[[Path], Path], *, swa_full: bool = True) -> TargetModel:
    from power_llamacpp.target import LlamaCppBackend

    return LlamaCppBackend(LlamaCppConfig(swa_full=swa_full)).load(write(folder / "tiny.gguf"))
