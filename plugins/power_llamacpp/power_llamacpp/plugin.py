"""Hook implementations. Importing this loads neither llama.cpp nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from power_core.hookspecs import RegisterFixture, RegisterTarget, hookimpl
from power_llamacpp import fixtures
from power_llamacpp.config import LlamaCppConfig

if TYPE_CHECKING:
    from power_core.target import TargetBackend

__all__ = ["make_llamacpp", "power_register_fixtures", "power_register_targets"]


def make_llamacpp(config: LlamaCppConfig) -> TargetBackend:
    """The backend for GGUF files."""
    from power_llamacpp.target import LlamaCppBackend

    return LlamaCppBackend(config)


@hookimpl
def power_register_targets(register: RegisterTarget) -> None:
    """Offer GGUF files through llama.cpp as the target backend `llamacpp`."""
    register("llamacpp", make_llamacpp, config=LlamaCppConfig)


@hookimpl
def power_register_fixtures(register: RegisterFixture) -> None:
    """Offer a small model of each kind of memory to ``power conformance``."""
    register("attention", fixtures.tiny_attention, kind="target")
    register("window", fixtures.tiny_window, kind="target")
    register("recurrent", fixtures.tiny_recurrent, kind="target")
    register("hybrid", fixtures.tiny_hybrid, kind="target")
