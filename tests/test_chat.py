"""Chat templates: Hugging Face's conventions, and refusals that name the reason."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from power_core.chat import ChatTemplate
from power_core.errors import RequestError
from power_core.target import ChatMessage

USER = [ChatMessage("user", 'Say "<é>"')]


def render(source: str, messages: Sequence[ChatMessage] = USER) -> str:
    text, originals = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, ["<s>", "</s>"])
    return text.translate(originals)


@pytest.mark.parametrize(("source", "text"), [
    ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
    ("{% if add_generation_prompt %}go{% endif %}", "go"),
    ("{{ messages[0]['content'] | tojson }}", '"Say \\"<é>\\""'),
    ("{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
    ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    ("{% if tools %}tools{% else %}none{% endif %}{{ documents is none }}", "noneTrue"),
    ("{{ strftime_now('%%') }}", "%"),
])  # fmt: skip
def test_templates_render_as_hugging_face_does(source: str, text: str) -> None:
    """Block trimming, the extra globals and filters, and the special tokens' spellings."""
    assert render(source) == text


@pytest.mark.parametrize(("source", "reason"), [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages[3]['content'] }}", "refuses the messages"),
    ("{{ messages[0]['content'] + 1 }}", "refuses the messages"),
    ("{{ messages.append(1) }}", "refuses the messages"),
    ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
    ("{% for %}", "cannot be read"),
])  # fmt: skip
def test_what_goes_wrong_in_a_template_is_one_clear_error(source: str, reason: str) -> None:
    """Refusals, mistakes and attempts to leave the sandbox end the request, not the process."""
    with pytest.raises(RequestError, match=reason) as caught:
        render(source)
    assert "--raw" in str(caught.value)


@pytest.mark.parametrize(("messages", "reason"), [
    ([], "no messages"),
    ([ChatMessage("tool", "x")], "role 'tool'"),
    ([ChatMessage("user", [{"type": "text", "text": "x"}])], "content of type list"),
    ([ChatMessage("user", "".join(map(chr, range(0xE000, 0xF900))))], "private-use"),
])  # fmt: skip
def test_messages_of_another_form_are_refused(messages: list[ChatMessage], reason: str) -> None:
    """Nothing is guessed from parts, unknown roles or empty lists."""
    with pytest.raises(RequestError, match=reason):
        render("x", messages)
