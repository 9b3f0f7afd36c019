"""The ``power`` command. One command a file; nothing heavy is imported before a command needs it."""

from power_core.cli.app import cli, main

__all__ = ["cli", "main"]
