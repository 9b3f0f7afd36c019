"""Tokens that are found in text as a whole, before the rest of it is cut into words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from power_core.types import TokenId

__all__ = ["SpecialToken", "SpecialTokens"]


class SpecialToken(NamedTuple):
    """A token found as a whole; one that `is_control` counts only where the caller says so."""

    spelling: str
    id: TokenId
    is_control: bool


class SpecialTokens:
    """
    The special tokens of a vocabulary, looked for one after the other, the longest first, as llama.cpp does.

    Args:
        tokens: In the vocabulary's order.
    """

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self._tokens = sorted(tokens, key=lambda token: -len(token.spelling.encode()))

    @property
    def spellings(self) -> list[str]:
        """Spellings that only a chat template may use, the longest first."""
        return [token.spelling for token in self._tokens if token.is_control]

    def split(self, text: str, *, with_control: bool) -> list[str | TokenId]:
        """
        *text* as ids of special tokens and the pieces between them; no piece is empty.

        >>> tokens = SpecialTokens([SpecialToken("<a>", 7, True), SpecialToken("  ", 8, False)])
        >>> tokens.split("x<a>  y", with_control=True), tokens.split("<a>  y", with_control=False)
        (['x', 7, 8, 'y'], ['<a>', 8, 'y'])
        """
        parts: list[str | TokenId] = [text] if text else []
        for token in self._tokens:
            if token.spelling in text and (with_control or not token.is_control):
                parts = [piece for part in parts for piece in _split_at(token, part)]
        return parts


def _split_at(token: SpecialToken, part: str | TokenId) -> list[str | TokenId]:
    if not isinstance(part, str):
        return [part]
    pieces: list[str | TokenId] = []
    for index, piece in enumerate(part.split(token.spelling)):
        if index:
            pieces.append(token.id)
        if piece:
            pieces.append(piece)
    return pieces
