"""
Special tokens in rendered text: where libllama would find them.

The order and the trimming follow libllama's own partition of a text, so that the ids of a text that is
partitioned here are those it would give for the text as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

from power_core.types import TokenId

__all__ = ["SpecialToken", "SpecialTokens"]

# llama_token_attr
_UNKNOWN, _CONTROL, _USER_DEFINED, _LSTRIP, _RSTRIP = 1 << 0, 1 << 3, 1 << 4, 1 << 7, 1 << 8
_SPACE = " \t\n\v\f\r"  # C's isspace


class SpecialToken(NamedTuple):
    """A token that is found in text as a whole, before the rest of the text is tokenized."""

    spelling: str
    id: TokenId
    attributes: int


class SpecialTokens:
    """
    The special tokens of a vocabulary.

    Args:
        tokens: Control, unknown and user-defined tokens.
    """

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        # The longest first: a token inside a longer one is part of that.
        self._tokens = sorted(tokens, key=lambda token: -len(token.spelling.encode()))

    @classmethod
    def of(cls, vocabulary: Iterable[tuple[str, TokenId, int]]) -> Self:
        """The special ones of (spelling, id, attributes)."""
        wanted = _UNKNOWN | _CONTROL | _USER_DEFINED
        return cls(SpecialToken(*entry) for entry in vocabulary if entry[2] & wanted and entry[0])

    @property
    def spellings(self) -> list[str]:
        """Spellings that only a template may use: those of control and unknown tokens, the longest first."""
        return [token.spelling for token in self._tokens if token.attributes & (_UNKNOWN | _CONTROL)]

    def split(self, text: str) -> list[str | SpecialToken]:
        """*text* as tokens and the pieces between them, in order; no piece is empty."""
        parts: list[str | SpecialToken] = [text] if text else []
        for token in self._tokens:
            if token.spelling in text:
                parts = [piece for part in parts for piece in _split_at(token, part)]
        return parts


def _split_at(token: SpecialToken, part: str | SpecialToken) -> Iterator[str | SpecialToken]:
    if isinstance(part, SpecialToken):
        yield part
        return
    start = 0
    while (found := part.find(token.spelling, start)) >= 0:
        left = part[start:found]
        left = left.rstrip(_SPACE) if token.attributes & _LSTRIP else left
        if left:
            yield left
        yield token
        start = found + len(token.spelling)
        if token.attributes & _RSTRIP:
            start = len(part) - len(part[start:].lstrip(_SPACE))
    if start < len(part):
        yield part[start:]
