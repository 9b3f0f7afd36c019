"""
From plain text to ids, by the two algorithms of llama-family vocabularies.

Byte-level BPE runs in the `tokenizers` library, with the word patterns that llama.cpp (src/llama-vocab.cpp) has
for each pre-tokenizer name; SentencePiece's is here, because no rank of merges is in a GGUF file, only scores.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from power_core.types import TokenId

__all__ = ["PATTERNS", "ByteLevelWords", "SentencePieceWords", "Words", "byte_symbols"]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CASELESS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_CASELESS % r"\p{N}",),
    "llama-bpe": (_CASELESS % r"\p{N}{1,3}",),
}
"""Word patterns by pre-tokenizer, each applied to what the one before left."""


class Words(Protocol):
    """An algorithm with its vocabulary."""

    def encode(self, text: str) -> list[TokenId]:
        """Ids of *text*, in which nothing is special."""


class ByteLevelWords:
    """
    Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; over bytes as in GPT-2).

    Args:
        tokens: Spelling to id.
        merges: Pairs in order of rank.
        patterns: How text is cut into words.
        takes_whole_words: Whether a word that is a token is not merged from its bytes.

    Raises:
        ValueError: A merge names what is no token.
    """

    def __init__(
        self,
        tokens: Mapping[str, TokenId],
        merges: Sequence[tuple[str, str]],
        patterns: Sequence[str],
        *,
        takes_whole_words: bool,
    ) -> None:
        try:
            model = models.BPE(dict(tokens), list(merges), ignore_merges=takes_whole_words)
        except Exception as exc:  # the library raises Exception itself
            raise ValueError(str(exc)) from exc
        self._tokenizer = Tokenizer(model)
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])

    def encode(self, text: str) -> list[TokenId]:
        ids: list[TokenId] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class SentencePieceWords:
    """
    SentencePiece's BPE (Kudo and Richardson 2018, arXiv:1808.06226): the best-scored neighbours merge first.

    Args:
        tokens: Spelling to id.
        scores: One a token.

    Raises:
        ValueError: A byte has no token.
    """

    def __init__(self, tokens: Mapping[str, TokenId], scores: Sequence[float]) -> None:
        self._tokens = tokens
        self._scores = scores
        self._bytes: list[TokenId] = []
        for byte in range(256):
            token = tokens.get(f"<0x{byte:02X}>", tokens.get(chr(byte)))
            if token is None:
                raise ValueError(f"the vocabulary has no token for byte 0x{byte:02X}")
            self._bytes.append(token)

    def encode(self, text: str) -> list[TokenId]:
        pieces = list(text.replace(" ", "\u2581"))
        following = [*range(1, len(pieces)), -1]
        before = list(range(-1, len(pieces) - 1))
        queue: list[tuple[float, int, int, int]] = []  # -score, left, right, length: ties go to the left

        def offer(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            merged = pieces[left] + pieces[right]
            token = self._tokens.get(merged)
            if token is not None:
                heapq.heappush(queue, (-self._scores[token], left, right, len(merged)))

        for left in range(len(pieces) - 1):
            offer(left, left + 1)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != length:
                continue  # one of the two merged with another piece meanwhile
            pieces[left] += pieces[right]
            pieces[right] = ""
            following[left] = following[right]
            if following[right] >= 0:
                before[following[right]] = left
            offer(before[left], left)
            offer(left, following[left])
        return [token for piece in pieces if piece for token in self._ids(piece)]

    def _ids(self, piece: str) -> list[TokenId]:
        token = self._tokens.get(piece)
        if token is not None:
            return [token]
        return [self._bytes[byte] for byte in piece.encode()]


def byte_symbols() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, and the byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
