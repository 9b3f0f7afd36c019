"""The command group, and the one boundary where errors become a line and an exit code."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import click

from power_core.cli.output import shown
from power_core.cli.state import EXIT_INTERRUPTED, State, check_named_file
from power_core.errors import PluginError, PowerError

__all__ = ["EXIT_BAD_INPUT", "cli", "main"]

EXIT_BAD_INPUT = 2
EXIT_BUG = 70  # EX_SOFTWARE of sysexits.h

# Help lines stand here so that `power --help` imports none of the modules; a test holds them to the docstrings.
_COMMANDS = {
    "artifacts": (
        "power_core.cli.artifacts:artifacts",
        "Inspect, admit, list, verify and remove drafter files.",
    ),
    "doctor": ("power_core.cli.doctor:doctor", "Say what this machine, build and model can do, and what would help."),
    "generate": ("power_core.cli.generate:generate", "Generate text from a prompt."),
    "models": ("power_core.cli.models:models", "List models, or add and remove named ones."),
    "plugins": ("power_core.cli.plugins:plugins", "List plugins, what each provides, and which failed to load."),
    "receipt": ("power_core.cli.receipt:receipt", "Check receipts."),
    "simulate": ("power_core.cli.simulate:simulate", "Replay recorded acceptance against another machine's costs."),
    "verify": ("power_core.cli.verify:verify", "Compare strategies with plain decoding, token by token."),
}


class PowerGroup(click.Group):
    """Core commands by name, then those that plugins registered."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_COMMANDS, *ctx.ensure_object(State).plugins.registry.commands.names()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS:
            return _imported(_COMMANDS[cmd_name][0])
        commands = ctx.ensure_object(State).plugins.registry.commands
        if cmd_name not in commands:
            return None
        registered = commands.get(cmd_name)
        try:
            return _imported(registered.value)
        except Exception as exc:
            raise PluginError(
                f"its command {cmd_name!r} cannot be imported: {type(exc).__name__}: {exc}",
                who=registered.owner,
                got=registered.value,
                plugin=registered.plugin,
            ) from exc

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in (known := self.list_commands(ctx)):
            near = difflib.get_close_matches(name, known, n=1)
            ctx.fail(f"no command {name!r}" + (f"; did you mean {near[0]!r}?" if near else "; see `power --help`"))
        # Here, and not in each command: most need no configuration, and would pass over a file that is not there.
        if not ctx.resilient_parsing and not set(ctx.help_option_names) & set(args):
            check_named_file(ctx.params.get("config"))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = ctx.ensure_object(State).plugins.registry.commands
        lines = {name: help_line for name, (_, help_line) in _COMMANDS.items()}
        lines |= {item.name: f"{item.options['help']} [{item.plugin}]" for item in commands}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(lines.items()))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and render whatever was raised; leaves the process where *standalone_mode*."""
        code = self._run(args, prog_name, complete_var, **extra)
        if standalone_mode:
            sys.exit(_flushed(code))
        return code

    def _run(self, args: Sequence[str] | None, prog_name: str | None, complete_var: str | None, **extra: Any) -> int:
        try:
            code = super().main(args, prog_name or "power", complete_var, standalone_mode=False, **extra)
        except click.Abort:  # Ctrl-C outside a generation; click has ended the line
            return EXIT_INTERRUPTED
        except click.exceptions.NoArgsIsHelpError as exc:  # its message is the whole help
            return _complain(f"{exc.ctx.command_path}: no command was named; see `{exc.ctx.command_path} --help`")
        except click.ClickException as exc:
            context = getattr(exc, "ctx", None)
            if isinstance(exc, click.NoSuchOption) and context and (begun := _begun_with(exc.option_name, context)):
                exc = click.NoSuchOption(exc.option_name, possibilities=begun, ctx=context)
            return _complain(f"{context.command_path if context else 'power'}: {exc.format_message()}")
        except Exception as exc:
            if os.environ.get("POWER_DEBUG") == "1":
                raise
            return _explain(exc)
        return code if isinstance(code, int) else 0


def _begun_with(text: str, context: click.Context) -> list[str]:
    """Options that *text* abbreviates: likelier meant than those that click finds to be like it."""
    names = (name for option in context.command.get_params(context) for name in option.opts)
    return sorted(name for name in names if name.startswith(text))


def _explain(exc: Exception) -> int:
    if isinstance(exc, PowerError):
        return _complain(f"power: {exc}")
    if isinstance(exc, OSError):  # of the streams: files that can fail have errors of their own
        return _complain(": ".join(str(part) for part in ("power", exc.filename, exc.strerror or exc) if part))
    _complain(f"power: a bug, here or in a plugin: {type(exc).__name__}: {exc}; POWER_DEBUG=1 shows where")
    return EXIT_BUG


def _complain(message: str) -> int:
    with contextlib.suppress(OSError):  # a full disk, or nobody reads it: the exit code still says so
        click.echo(shown(" ".join(message.split())), err=True)
    return EXIT_BAD_INPUT


def _flushed(code: int) -> int:
    """The exit code, after standard output took what is left or gave it up: Python would try again, and say so."""
    try:
        sys.stdout.flush()
    except OSError as exc:
        sys.stdout = io.StringIO()
        return code or _explain(exc)
    return code


def _nowhere(flags: int) -> IO[Any]:
    """A stream of the null device, open as long as the process is."""
    return open(os.open(os.devnull, flags), "r" if flags == os.O_RDONLY else "w", closefd=False)


def _imported(import_path: str) -> click.Command:
    module, _, attribute = import_path.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    if not isinstance(command, click.Command):
        raise TypeError(f"{import_path} is a {type(command).__name__}, not a click command")
    return command


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        try:
            click.echo(f"power {version('power-core')}")
        except PackageNotFoundError:
            click.echo("power, not installed")
        ctx.exit()


@click.group(
    name="power", cls=PowerGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Read this power.toml.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
@click.pass_context
def cli(ctx: click.Context, config: Path | None) -> None:
    """Exact speculative decoding: faster text, token for token the same."""
    ctx.ensure_object(State).config_path = config
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Entry point of the ``power`` script."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it; its number must not go to a file opened later
            setattr(sys, name, _nowhere(os.O_RDONLY if name == "stdin" else os.O_WRONLY))
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a terminal without Unicode shows '?' instead of ending the answer
    cli.main()
