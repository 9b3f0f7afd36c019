"""Options that several commands have, spelt once. Parameter names are configuration keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = ["engine_options", "json_option", "prompt_options", "sampling_options"]

_DEVICES = ("/dev/null", "/dev/stdin", "/dev/tty")
F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")

_ENGINE = (
    click.option("--model", metavar="NAME|PATH", help="Model name or file."),
    click.option(
        "--artifact", "spec_artifact", metavar="NAME[,...]", help="Which drafter files to load, where several fit."
    ),
    click.option("--draft-max", "spec_draft_max", type=int, metavar="K", help="Most proposal tokens a round."),
    click.option(
        "--width-policy",
        "spec_width_policy",
        metavar="NAME",
        help="auto, cost-aware, adaptive or fixed: see docs/policies.md.",
    ),
    click.option("--backend", metavar="NAME", help="Target backend to load the model with: see `power plugins`."),
    click.option("--ctx", type=int, metavar="N", help="Context positions."),
    click.option("--threads", type=int, metavar="N", help="Compute threads."),
)
_PROMPT = (
    click.option(
        "--chat/--raw",
        default=None,
        help="Use the model's chat template, or the prompt as it is. [default: chat, where the model has a template]",
    ),
    click.option("--system", metavar="S", help="System message of the chat."),
    click.option("--max-tokens", type=int, metavar="N", help="Most tokens to emit; -1 for no limit."),
)
_SAMPLING = (
    click.option("--temperature", type=float, metavar="T", help="0 is greedy."),
    click.option("--top-k", type=int, metavar="K", help="Sample from the K most likely; 0 keeps all."),
    click.option("--top-p", type=float, metavar="P", help="Sample from the likeliest that make up P."),
    click.option("--min-p", type=float, metavar="P", help="Drop tokens below P times the likeliest."),
    click.option("--repeat-penalty", type=float, metavar="X", help="Divide logits of recent tokens."),
    click.option("--presence-penalty", type=float, metavar="X", help="Lower logits of recent tokens once."),
    click.option("--frequency-penalty", type=float, metavar="X", help="Lower logits for each recent use."),
    click.option("--seed", type=int, metavar="N", help="Seed of the draws; the receipt names it."),
)


def engine_options(command: F) -> F:
    """Which model, and how it is run."""
    return _all(_ENGINE, command)


def prompt_options(command: F) -> F:
    """How the prompt is read, and how much is emitted."""
    return _all(_PROMPT, command)


def sampling_options(command: F) -> F:
    """How tokens are chosen."""
    return _all(_SAMPLING, command)


class _FilePath(click.Path):
    """A path to an existing file, or a pipe; a device may never end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-" and not Path("-").exists():
            self.fail("File '-' does not exist; /dev/stdin is standard input.", param, ctx)
        path: Any = super().convert(value, param, ctx)
        if (path.is_char_device() or path.is_block_device()) and str(path) not in _DEVICES:
            self.fail(f"{str(path)!r} is a device, not a file.", param, ctx)
        return path


def file_path() -> click.Path:
    """The type of a path to an existing file."""
    return _FilePath(exists=True, dir_okay=False, path_type=Path)


def _all(options: tuple[Callable[[F], F], ...], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command
