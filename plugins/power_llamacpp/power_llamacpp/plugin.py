"""Hook implementations. Importing this loads neither llama.cpp nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from power_core.hookspecs import RegisterTarget, hookimpl
from power_llamacpp.config import LlamaCppConfig

if TYPE_CHECKING:
    from power_core.target import TargetBackend

__all__ = ["make_llamacpp", "power_register_targets"]


def make_llamacpp(config: LlamaCppConfig) -> TargetBackend:
    """The backend for GGUF files."""
    from power_llamacpp.target import LlamaCppBackend

    return LlamaCppBackend(config)


@hookimpl
def power_register_targets(register: RegisterTarget) -> None:
    """Offer GGUF files through llama.cpp as the target backend `llamacpp`."""
    register("llamacpp", make_llamacpp, config=LlamaCppConfig)
