"""Write docs/cli.md from the commands' own help: `make docs`. A test fails while the two differ."""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import click

from power_core.capabilities import CORE_COMMANDS
from power_core.cli import cli
from power_core.cli.state import State
from power_core.hookspecs import ENTRY_POINT_GROUP
from power_core.plugins import load_plugins

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cli.md"
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
- A command exits with 2 where the file of `--config` or `POWER_CONFIG` cannot be used, whether it needs one or not.
- Plugins may add commands; `power --help` shows them with the plugin's name. Those of this repository's packages are
  here, each with the package that brings it.
"""


def page() -> str:
    """The page as it should be."""
    state = State()
    ours = _distributions()
    points = entry_points(group=ENTRY_POINT_GROUP)
    state.plugins = load_plugins([point for point in points if point.dist and point.dist.name in ours], environ={})
    packages = dict.fromkeys(CORE_COMMANDS, "power-core")
    packages |= {item.name: item.owner.partition(" ")[0] for item in state.plugins.registry.commands}
    root = click.Context(cli, info_name="power", obj=state, max_content_width=100, terminal_width=100)
    sections = [INTRODUCTION]
    for name, package in sorted(packages.items()):
        command = cli.get_command(root, name)
        assert command is not None
        sections += _sections(command, root, name, package)
    return "\n".join(sections)


def _distributions() -> set[str]:
    """Names of the distributions that this repository holds: the page is the same whatever else is installed."""
    files = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("contrib/*/pyproject.toml")]
    return {tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"] for file in files}


def _sections(command: click.Command, parent: click.Context, name: str, package: str) -> list[str]:
    context = click.Context(command, parent=parent, info_name=name, max_content_width=100, terminal_width=100)
    context.help_option_names = ["-h", "--help"]
    brought = "" if package == "power-core" else f"From `{package}`.\n\n"
    found = [f"## {context.command_path}\n\n{brought}```text\n{command.get_help(context)}\n```\n"]
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found += _sections(command.commands[child], context, child, package)
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
