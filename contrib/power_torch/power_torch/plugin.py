"""Hook implementations. Importing this loads neither torch nor numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from power_core.hookspecs import RegisterFixture, RegisterTarget, hookimpl
from power_torch import fixtures
from power_torch.config import TorchConfig

if TYPE_CHECKING:
    from power_core.target import TargetBackend

__all__ = ["make_torch", "power_register_fixtures", "power_register_targets"]


def make_torch(config: TorchConfig) -> TargetBackend:
    """The backend for llama-family models in torch."""
    from power_torch.target import TorchBackend

    return TorchBackend(config)


@hookimpl
def power_register_targets(register: RegisterTarget) -> None:
    """Offer safetensors folders, and GGUF files where it is asked for, as the target backend `torch`."""
    register("torch", make_torch, config=TorchConfig)


@hookimpl
def power_register_fixtures(register: RegisterFixture) -> None:
    """Offer a small model in each element type, and one with windows, to ``power conformance``."""
    register("fp32", fixtures.tiny_fp32, kind="target")
    register("bf16", fixtures.tiny_bf16, kind="target")
    register("window", fixtures.tiny_window, kind="target")
