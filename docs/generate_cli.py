"""Write docs/cli.md from the commands' own help: `make docs`. A test fails while the two differ."""

from __future__ import annotations

from pathlib import Path

import click

from power_core.capabilities import CORE_COMMANDS
from power_core.cli import cli
from power_core.cli.state import State

PAGE = Path(__file__).with_name("cli.md")
INTRODUCTION = """\
# Command line

This page is generated from `--help` by `make docs`.

- `--json` prints exactly one JSON document on standard output, in canonical form (RFC 8785).
- Bad input is one line on standard error and exit code 2. A bug, in Power or a plugin, is one line and exit code 70.
  `POWER_DEBUG=1` gives the traceback of either.
- `generate` ends with exit code 130 after Ctrl-C, having printed what was made; a second Ctrl-C interrupts at once.
- `verify` ends with 1 where anything differs, `receipt verify` and `artifacts verify` where anything was changed,
  `doctor` where the model could not be opened.
- Flags win over `POWER_*` variables, those over `power.toml`: see [Configuration](config.md).
- Plugins may add commands; `power --help` shows them with the plugin's name.
"""


def page() -> str:
    """The page as it should be."""
    root = click.Context(cli, info_name="power", obj=State(), max_content_width=100, terminal_width=100)
    sections = [INTRODUCTION]
    for name in sorted(CORE_COMMANDS):
        command = cli.get_command(root, name)
        if command is not None:
            sections += _sections(command, root, name)
    return "\n".join(sections)


def _sections(command: click.Command, parent: click.Context, name: str) -> list[str]:
    context = click.Context(command, parent=parent, info_name=name, max_content_width=100, terminal_width=100)
    context.help_option_names = ["-h", "--help"]
    found = [f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"]
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found += _sections(command.commands[child], context, child)
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
