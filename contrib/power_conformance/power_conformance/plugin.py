"""Hook implementations: two commands, imported only when they are run."""

from __future__ import annotations

from power_core.hookspecs import RegisterCommand, hookimpl

__all__ = ["power_register_commands"]


@hookimpl
def power_register_commands(register: RegisterCommand) -> None:
    """Offer ``power conformance`` and ``power new-plugin``."""
    register("conformance", "power_conformance.cli:conformance", help="Check that plugins keep their promises.")
    register("new-plugin", "power_conformance.new_plugin:new_plugin", help="Write a plugin project to start from.")
