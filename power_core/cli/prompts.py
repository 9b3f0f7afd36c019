"""Where a prompt comes from, and how it becomes token ids."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from power_core.types import TokenId

if TYPE_CHECKING:
    from power_core.engine import Engine

__all__ = ["encode_prompt", "read_prompt", "read_text"]

_MOST = 64 << 20  # bytes; what does not end is not read to its end


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt given as an argument, with ``-f``, or on standard input (``-``, or where it is no terminal)."""
    if prompt is not None and file is not None:
        raise click.UsageError("a prompt and -f FILE were given; give one of them")
    if file is not None:
        return read_text(file)
    if prompt is not None and prompt != "-":
        return _decoded(os.fsencode(prompt), "PROMPT")  # bytes that are no text came as surrogates
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("no prompt; give one as an argument, with -f FILE, or on standard input")
    return _decoded(sys.stdin.buffer.read(_MOST + 1), "standard input")


def read_text(file: Path) -> str:
    """The file's text, byte for byte."""
    try:
        with file.open("rb") as source:
            return _decoded(source.read(_MOST + 1), str(file))
    except OSError as exc:
        raise click.UsageError(f"{file}: cannot be read: {exc.strerror}") from exc


def encode_prompt(engine: Engine, text: str, *, chat: bool | None, system: str | None) -> Sequence[TokenId]:
    """Ids of *text*: as the user's turn of a chat where *chat* (None: where there is a template), else as it is."""
    from power_core.target import ChatMessage

    if chat is False or (chat is None and system is None and not engine.has_chat_template):
        if system is not None:
            raise click.UsageError("--system needs a chat; this prompt is raw")
        return engine.encode(text)
    turns = [] if system is None else [ChatMessage("system", system)]
    return engine.encode_chat([*turns, ChatMessage("user", text)])


def _decoded(data: bytes, source: str) -> str:
    if len(data) > _MOST:
        raise click.UsageError(f"{source}: more than {_MOST:,} bytes; no context holds as much")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise click.UsageError(f"{source}: not UTF-8 text (byte {exc.start})") from exc
