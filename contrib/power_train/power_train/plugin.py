"""Registers the commands ``power train`` and ``power convert-drafter``."""

from __future__ import annotations

from power_core.hookspecs import RegisterCommand, hookimpl

__all__ = ["power_register_commands"]


@hookimpl
def power_register_commands(register: RegisterCommand) -> None:
    """Offer training and conversion; their modules are imported when a command is run."""
    register("train", "power_train.cli:train", help="Train a drafter for a target on the target's own text.")
    register("convert-drafter", "power_train.cli:convert", help="Convert a drafter between safetensors and GGUF.")
