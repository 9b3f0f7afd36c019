"""
Chat templates in a sandbox, with messages that cannot forge a turn.

A control token counts only where the template wrote it. Where a message spells one, or could be completed to
one by the text around the message, a character is swapped for one of Unicode's private use until the control
tokens of the rendered text have been found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from power_core.errors import RequestError
from power_core.target import ChatMessage

__all__ = ["ChatTemplate"]

_ROLES = frozenset({"system", "user", "assistant"})
_PRIVATE_USE = range(0xE000, 0xF900)


class ChatTemplate:
    """
    A compiled template.

    Args:
        source: Jinja source.
        tokens: `bos_token` and `eos_token`, spelt.

    Raises:
        RequestError: The source is no template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=_now)
        self._source, self._tokens = source, dict(tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as exc:
            raise _refusal(f"the model's chat template cannot be read: {exc}", fix="use --raw") from exc

    def render(self, messages: Sequence[ChatMessage], spellings: Sequence[str]) -> tuple[str, dict[int, str]]:
        """
        Render *messages* with the assistant's turn opened.

        Args:
            messages: At least one.
            spellings: Control tokens, the longest first.

        Returns:
            The text, and a table for `str.translate` that puts swapped characters back.

        Raises:
            RequestError: Messages of another form, or the template refuses them.
        """
        _check(messages)
        swaps = self._swaps(messages, spellings)
        turns = [{"role": turn.role, "content": _disarmed(turn.content, spellings, swaps)} for turn in messages]
        try:
            text = self._template.render(
                messages=turns, add_generation_prompt=True, tools=None, documents=None, **self._tokens
            )
        except Exception as exc:  # template code may raise anything
            raise _refusal(f"the chat template refuses the messages: {exc}", fix="use --raw") from exc
        return text, {ord(swap): original for original, swap in swaps.items()}

    def _swaps(self, messages: Sequence[ChatMessage], spellings: Sequence[str]) -> dict[str, str]:
        """A private character, in use nowhere, for each character of *spellings*."""
        letters = sorted({*"".join(spellings)})
        used = {*self._source, *letters}.union(*(message.content for message in messages))
        free = [chr(code) for code in _PRIVATE_USE if chr(code) not in used]
        if len(free) < len(letters):
            raise _refusal("the messages hold too many private-use characters", fix="remove some")
        return dict(zip(letters, free, strict=False))


def _disarmed(content: str, spellings: Sequence[str], swaps: Mapping[str, str]) -> str:
    """*content* with a character swapped wherever it holds, begins or ends one of *spellings*."""
    for spelling in spellings:
        content = content.replace(spelling, swaps[spelling[0]] + spelling[1:])
    core = content.strip()  # templates strip: this is what their own text may come to touch
    if not core:
        return content
    letters = list(content)
    first = content.index(core)
    last = first + len(core) - 1
    if any(_overlaps(core, spelling) for spelling in spellings):
        letters[last] = swaps[letters[last]]
    if letters[first] in swaps and any(_overlaps(spelling, core) for spelling in spellings):
        letters[first] = swaps[letters[first]]
    return "".join(letters)


def _overlaps(left: str, right: str) -> bool:
    """Whether *left* ends as *right* begins."""
    return any(left.endswith(right[:length]) for length in range(1, min(len(left), len(right)) + 1))


def _check(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise _refusal("there are no messages", expected="at least one")
    for index, message in enumerate(messages):
        if message.role not in _ROLES:
            expected = ", ".join(sorted(_ROLES))
            raise _refusal(f"message {index} has role {message.role!r}", got=message.role, expected=expected)
        content: object = message.content  # callers may have JSON in hand
        if not isinstance(content, str):
            kind = type(content).__name__
            raise _refusal(f"message {index} has content of type {kind}", got=content, expected="text")


def _refusal(what: str, *, got: object = None, expected: object = None, fix: str | None = None) -> RequestError:
    return RequestError(what, plugin="torch", where="chat", got=got, expected=expected, fix=fix)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes for HTML; templates are written for this one."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
