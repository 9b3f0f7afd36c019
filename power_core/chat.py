"""
Chat templates from the model file, rendered so that messages cannot forge a turn.

Wherever a message spells a control token, or could be completed to one by the text around the message, one
character is replaced by a private-use stand-in. The caller finds control tokens in the rendered text, where
only the template's own are whole, and puts the characters back in what is left.
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

__all__ = ["ChatTemplate", "guarded"]

_ROLES = ("system", "user", "assistant")
_PRIVATE_USE = range(0xE000, 0xF900)


class ChatTemplate:
    """
    A compiled template.

    Args:
        source: Jinja source, as Hugging Face's tokenizers take it.
        tokens: `bos_token` and `eos_token`, spelled out.
        plugin: The backend's, for messages.

    Raises:
        RequestError: The source is no template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], *, plugin: str | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._source = source
        self._tokens = dict(tokens)
        self._plugin = plugin
        try:
            self._template = environment.from_string(source)
        except TemplateError as exc:
            raise self._refusal(f"the model file's chat template cannot be read: {exc}", fix="use --raw") from exc

    def render(self, messages: Sequence[ChatMessage], spellings: Sequence[str]) -> tuple[str, dict[int, str]]:
        """
        Render *messages* with the assistant's turn opened.

        Args:
            messages: At least one.
            spellings: Control tokens, which count as such only where the template itself wrote them.

        Returns:
            The text, and a table for `str.translate` that puts replaced characters back.

        Raises:
            RequestError: Messages of another form, or the template refuses them.
        """
        self._check(messages)
        stand_ins = self._stand_ins(messages, spellings)
        turns = [{"role": m.role, "content": guarded(m.content, spellings, stand_ins)} for m in messages]
        try:
            text = self._template.render(
                messages=turns, add_generation_prompt=True, tools=None, documents=None, **self._tokens
            )
        except Exception as exc:  # template code may raise anything
            raise self._refusal(f"the chat template refuses the messages: {exc}", fix="use --raw") from exc
        return text, {ord(stand_in): original for original, stand_in in stand_ins.items()}

    def _stand_ins(self, messages: Sequence[ChatMessage], spellings: Sequence[str]) -> dict[str, str]:
        """For each character of *spellings* a private-use one that occurs nowhere else."""
        wanted = sorted(set("".join(spellings)))
        taken = set(self._source).union(wanted, *(message.content for message in messages))
        free = [chr(code) for code in _PRIVATE_USE if chr(code) not in taken]
        if len(free) < len(wanted):
            raise self._refusal("the messages use too many private-use characters", fix="remove some")
        return dict(zip(wanted, free, strict=False))

    def _check(self, messages: Sequence[ChatMessage]) -> None:
        if not messages:
            raise self._refusal("there are no messages", expected="at least one")
        for index, message in enumerate(messages):
            if message.role not in _ROLES:
                raise self._refusal(
                    f"message {index} has role {message.role!r}", got=message.role, expected=", ".join(_ROLES)
                )
            if not isinstance(message.content, str):
                raise self._refusal(
                    f"message {index} has content of type {type(message.content).__name__}",
                    got=message.content,
                    expected="text",
                    fix="join the parts into one text",
                )

    def _refusal(
        self, what: str, *, got: object = None, expected: object = None, fix: str | None = None
    ) -> RequestError:
        return RequestError(what, plugin=self._plugin, where="chat", got=got, expected=expected, fix=fix)


def guarded(content: str, spellings: Sequence[str], stand_ins: Mapping[str, str]) -> str:
    """
    *content* without any of *spellings*, whatever stands around it: single characters are replaced.

    >>> guarded("a <end> b", ["<end>"], {"<": "1", "n": "2"})
    'a 1end> b'
    >>> guarded("cut <en ", ["<end>"], {"<": "1", "n": "2"})
    'cut <e2 '
    """
    for spelling in spellings:
        if spelling in content:
            content = content.replace(spelling, stand_ins[spelling[0]] + spelling[1:])
    core = content.strip()  # what meets the template's text where the template strips
    if not core:
        return content
    start = content.index(core)
    last = start + len(core) - 1
    if any(_meets(core, spelling) for spelling in spellings):
        content = content[:last] + stand_ins[content[last]] + content[last + 1 :]
    if any(_meets(spelling, core) for spelling in spellings) and content[start] in stand_ins:
        content = content[:start] + stand_ins[content[start]] + content[start + 1 :]
    return content


def _meets(left: str, right: str) -> bool:
    """Whether *left* ends as *right* begins."""
    return any(left.endswith(right[:length]) for length in range(1, len(right)) if right[length - 1] == left[-1])


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes for HTML; templates are written for this one."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
