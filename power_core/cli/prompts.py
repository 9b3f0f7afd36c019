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
    from power_core.config import PowerConfig
    from power_core.request import GenerationRequest
    from power_core.target import TargetModel, Tokenizer

__all__ = ["check_servable", "encode_prompt", "read_prompt", "read_text"]

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
    text = _decoded(sys.stdin.buffer.read(_MOST + 1), "standard input")
    if prompt is None and not text:  # a pipe that broke, or none: an empty prompt is asked for with ""
        raise click.UsageError("no prompt: standard input is empty; give one as an argument or with -f FILE")
    return text


def read_text(file: Path) -> str:
    """The file's text, byte for byte."""
    try:
        with file.open("rb") as source:
            return _decoded(source.read(_MOST + 1), str(file))
    except OSError as exc:
        raise click.UsageError(f"{file}: cannot be read: {exc.strerror}") from exc


def encode_prompt(tokenizer: Tokenizer, text: str, *, chat: bool | None, system: str | None) -> Sequence[TokenId]:
    """Ids of *text*: as the user's turn of a chat where *chat* (None: where there is a template), else as it is."""
    from power_core.target import ChatMessage, encode_raw

    if chat is False or (chat is None and system is None and not tokenizer.has_chat_template):
        if system is not None:
            raise click.UsageError("--system needs a chat; this prompt is raw")
        return encode_raw(tokenizer, text)
    turns = [] if system is None else [ChatMessage("system", system)]
    return tokenizer.encode_chat([*turns, ChatMessage("user", text)])


def check_servable(request: GenerationRequest, model: TargetModel, config: PowerConfig) -> None:
    """
    Refuse before the model's widths are measured, which may take a minute, what its engine would refuse after it.

    Raises:
        RequestError: The prompt does not fit the context, or a setting does not fit the vocabulary.
    """
    from power_core.decoding import Decoder
    from power_core.sampling import Sampler
    from power_core.scheduler.checks import check_request
    from power_core.target import SessionOptions

    tokenizer = model.tokenizer
    context = SessionOptions(context_size=config.ctx).context_for(model.trained_context)
    check_request(request, tokenizer.vocab_size, context)
    Sampler(request.sampling, prompt=request.prompt, tokenizer=tokenizer, seed=0)
    Decoder(tokenizer, stop=request.stop, stop_ids=request.stop_ids)


def _decoded(data: bytes, source: str) -> str:
    if len(data) > _MOST:
        raise click.UsageError(f"{source}: more than {_MOST:,} bytes; no context holds as much")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise click.UsageError(f"{source}: not UTF-8 text (byte {exc.start})") from exc
