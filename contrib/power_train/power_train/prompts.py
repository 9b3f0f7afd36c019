"""Questions for the target, from files, as token ids under its own chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

from power_core.errors import ArtifactError
from power_core.target import ChatMessage, Tokenizer
from power_core.types import TokenId

__all__ = ["Prompt", "encode_prompts", "read_prompts", "text_digest"]


@frozen
class Prompt:
    """
    A question, or the beginning of one.

    Args:
        text: What the user says.
        closing: Text after what the target adds to *text*, or None where *text* is the whole question.
    """

    text: str
    closing: str | None = None


@frozen
class EncodedPrompt:
    """
    A question as tokens.

    Args:
        tokens: Fed first.
        closing: Fed when the target has ended the question it was given the beginning of; empty for whole questions.
        index: Its place in the files, counted over all of them.
    """

    tokens: tuple[TokenId, ...]
    closing: tuple[TokenId, ...]
    index: int


def text_digest(paths: Sequence[Path]) -> str:
    """SHA-256 of the files' contents, in order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_prompts(paths: Sequence[Path]) -> list[Prompt]:
    """
    The prompts of *paths*: JSON lines with ``turns`` (the first is taken) or ``opening`` and ``closing``, or plain
    text in which blank lines separate prompts.

    Raises:
        ArtifactError: A file cannot be read, or a line is none of these.
    """
    prompts = [prompt for path in paths for prompt in _read(path)]
    if not prompts:
        raise ArtifactError("no prompt in the files given", who="power-train", fix="pass --text FILE with prompts")
    return prompts


def _read(path: Path) -> Iterator[Prompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ArtifactError(f"cannot be read: {exc.strerror}", who="power-train", where=str(path)) from exc
    except UnicodeDecodeError as exc:
        raise ArtifactError(f"not UTF-8 text (byte {exc.start})", who="power-train", where=str(path)) from exc
    if path.suffix != ".jsonl":
        yield from (Prompt(part.strip()) for part in text.split("\n\n") if part.strip())
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _parsed(line, f"{path}:{number}")


def _parsed(line: str, where: str) -> Prompt:
    try:
        match json.loads(line):
            case {"turns": [str(text), *_]}:
                return Prompt(text)
            case {"opening": str(opening), "closing": str(closing)}:
                return Prompt(opening, closing)
    except ValueError as exc:
        raise ArtifactError(f"no JSON: {exc}", who="power-train", where=where) from exc
    raise ArtifactError(
        "no prompt",
        who="power-train",
        where=where,
        got=line[:80],
        expected='{"turns": ["..."]} or {"opening": "...", "closing": "..."}',
    )


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, *, longest: int) -> list[EncodedPrompt]:
    """The prompts that have at most *longest* tokens, under the chat template where the model has one."""
    before, after = _frame(tokenizer)
    encoded = []
    for index, prompt in enumerate(prompts):
        if prompt.closing is not None and after:
            tokens = [*before, *tokenizer.encode(prompt.text, add_special=False)]
            closing = [*tokenizer.encode(prompt.closing, add_special=False), *after]
        else:
            tokens, closing = _whole(prompt.text, tokenizer), []
        if len(tokens) > 0 and len(tokens) + len(closing) <= longest:
            encoded.append(EncodedPrompt(tuple(tokens), tuple(closing), index))
    return encoded


def _whole(text: str, tokenizer: Tokenizer) -> list[TokenId]:
    if tokenizer.has_chat_template:
        return list(tokenizer.encode_chat([ChatMessage("user", text)]))
    return list(tokenizer.encode(text))


def _frame(tokenizer: Tokenizer) -> tuple[list[TokenId], list[TokenId]]:
    """The ids before and after a user's text under the template: what two chats have in common."""
    if not tokenizer.has_chat_template:
        return [], []
    a, b = _whole("A", tokenizer), _whole("Zebra", tokenizer)
    start = 0
    while a[start] == b[start]:
        start += 1
    end = 0
    while a[-1 - end] == b[-1 - end]:
        end += 1
    return a[:start], a[len(a) - end :]
