"""Prompts of the parity suite: prose, code, copy, chat and Unicode, short and long."""

from __future__ import annotations

from attrs import frozen

__all__ = ["PROMPTS", "ParityPrompt"]


@frozen
class ParityPrompt:
    """A prompt by name; *chat* sends it as a user's turn through the model's template."""

    name: str
    text: str
    chat: bool = False


def _p(name: str, text: str, *, chat: bool = False) -> ParityPrompt:
    return ParityPrompt(name, text, chat)


_ITEMS = "\n".join(
    f"item {i}: {word}, quantity {i * 3}" for i, word in enumerate(["bolt", "nut", "gear", "cam", "rod"], 1)
)
_LOG = "\n".join(f"2024-03-0{i} 12:0{i}:00 INFO worker-{i % 3} finished job {100 + i} in {i}.5 s" for i in range(1, 9))

PROMPTS = (
    _p("prose-harbour", "The old lighthouse keeper climbed the stairs every evening, and"),
    _p("prose-science", "Photosynthesis is the process by which plants"),
    _p("prose-history", "In the year 1492, three ships left the port of Palos. The crew"),
    _p("prose-list", "Three reasons to learn a second language are: 1."),
    _p("prose-one-word", "Once"),
    _p("prose-dialogue", '"Where were you last night?" asked the inspector.\n"At home," she said.\n"'),
    _p(
        "code-merge",
        "def merge_sort(items):\n    if len(items) <= 1:\n        return items\n    middle = len(items) // 2\n",
    ),
    _p("code-class", "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"),
    _p("code-c", "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n"),
    _p(
        "code-sql",
        "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT);\nINSERT INTO users VALUES (1, 'ann');\nINSERT",
    ),
    _p("code-json", '[{"id": 1, "name": "red"}, {"id": 2, "name": "green"}, {"id": 3, "name":'),
    _p("copy-words", "alpha beta gamma\n" * 30),
    _p("copy-items", f"{_ITEMS}\n\nThe same list again:\n{_ITEMS[:40]}"),
    _p("copy-log", f"{_LOG}\n{_LOG[:60]}"),
    _p("copy-laugh", "ha ha ha ha ha ha ha ha ha ha ha ha"),
    _p("copy-abc", "a b c d e f g a b c d e f g a b c d"),
    _p("chat-capital", "What is the capital of France?", chat=True),
    _p("chat-poem", "Write a short poem about the sea.", chat=True),
    _p("chat-python", "Write a Python function that reverses a string, and explain it.", chat=True),
    _p("chat-rewrite", f"Repeat this list exactly, then add one item:\n{_ITEMS}", chat=True),
    _p("unicode-german", "Der schnelle braune Fuchs springt über den faulen Hund. Größe, Straße,"),
    _p("unicode-cjk", "推测解码是一项运行时能力。每一个最终输出 token 都由目标模型裁决。推测解码"),
    _p("unicode-emoji", "🙂🙃🙂🙃🙂🙃 naïve café — “quotes” … 🙂"),
    _p("unicode-cyrillic", "Москва — столица России. Париж — столица Франции. Рим —"),
)
