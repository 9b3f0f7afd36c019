"""
The vocabulary of a GGUF file: kinds of tokens, ids with a role, and what ends generation.

GGUF says too little, and llama.cpp fills the gaps from spellings; the rules here are those of its
`llama_vocab::impl::load` (src/llama-vocab.cpp), so that both backends stop at the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np
from attrs import field, frozen

from power_core.artifacts.gguf import GgufFile, StringArray
from power_core.types import TokenId
from power_torch.refusal import refuse
from power_torch.words import PATTERNS, ByteLevelWords, SentencePieceWords, Words

__all__ = ["Kind", "Vocabulary", "read_vocabulary"]


class Kind(IntEnum):
    """GGUF's token types."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@frozen(eq=False)
class Vocabulary:
    """
    Tokens and their roles.

    Args:
        spellings: By id, as the file has them.
        kinds: By id.
        words: The algorithm for plain text.
        is_byte_level: Whether spellings stand for bytes, one character each; else U+2581 stands for a space.
        bos_id: Begin of sequence, or None.
        eos_id: End of sequence, or None.
        end_ids: Every id that ends generation.
        adds_bos: Whether texts begin with BOS.
        adds_space: Whether a text, and what follows a special token, begins with a space.
    """

    spellings: list[str] = field(repr=False)
    kinds: list[Kind] = field(repr=False)
    words: Words = field(repr=False)
    is_byte_level: bool
    bos_id: TokenId | None
    eos_id: TokenId | None
    end_ids: frozenset[TokenId]
    adds_bos: bool
    adds_space: bool


_END_SPELLINGS = frozenset(
    """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>
    <\uff5cend\u2581of\u2581sentence\uff5c> [e~[
    """.split()  # noqa: SIM905 - spellings are compared more easily as a block
)
# Fill-in-the-middle ids end generation too; where the file has no key for one, the first of these is taken.
_FILL_SPELLINGS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Other spellings that are control tokens whatever the file says.
_CONTROL_SPELLINGS = frozenset(
    """
    <|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> <|code_prefix|> <|prefix|>
    <|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> <|code_suffix|> <|suffix|>
    <|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> <|code_middle|> <|middle|>
    """.split()  # noqa: SIM905 - the same
)
_PRE_ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "pixtral": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
}


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """
    The vocabulary of *file*.

    Raises:
        ArtifactError: It is incomplete, contradicts itself, or its tokenizer is not one of this backend's.
    """
    return _Reader(file).read()


class _Reader:
    """The `tokenizer.ggml.*` keys of one file."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        tokens = self._get("tokens")
        if not isinstance(tokens, StringArray) or not tokens:
            refuse(file.path, "tokenizer.ggml.tokens is missing or empty", expected="an array of strings")
        self.spellings = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        self.ids: Mapping[str, TokenId] = {token: i for i, token in enumerate(self.spellings)}
        if len(self.ids) != len(self.spellings):
            refuse(file.path, "tokenizer.ggml.tokens holds a token twice", expected="distinct tokens")

    def read(self) -> Vocabulary:
        model = self._get("model")
        if model not in ("gpt2", "llama"):
            self._refuse("model", model, "gpt2 or llama")
        is_byte_level = model == "gpt2"
        kinds, ends = self._kinds()
        words = self._byte_level() if is_byte_level else self._sentence_piece()
        pre = self._pre() if is_byte_level else ""
        defaults = (11, 11) if is_byte_level else (1, 2)  # llama.cpp's, for files without the keys
        return Vocabulary(
            spellings=self.spellings,
            kinds=kinds,
            words=words,
            is_byte_level=is_byte_level,
            bos_id=self._id("bos", defaults[0]),
            eos_id=self._id("eos", defaults[1]),
            end_ids=ends
            | {i for i in (self._id("eos", defaults[1]), self._id("eot"), self._id("eom")) if i is not None},
            adds_bos=self._flag("add_bos_token", default=pre == "llama-bpe" or not is_byte_level),
            adds_space=not is_byte_level and self._flag("add_space_prefix", default=True),
        )

    def _kinds(self) -> tuple[list[Kind], frozenset[TokenId]]:
        """Kinds by id, and the ids that end generation by their spelling."""
        count = len(self.spellings)
        values = self._get("token_type")
        if values is not None and (not isinstance(values, np.ndarray) or len(values) != count):
            self._refuse("token_type", values, f"{count} numbers")
        known = {int(kind) for kind in Kind}
        numbers = [1] * count if values is None else [int(value) for value in values]
        kinds = [Kind(number) if number in known else Kind.UNDEFINED for number in numbers]
        ends = {self.ids[spelling] for spelling in _END_SPELLINGS if spelling in self.ids}
        controls = ends | {self.ids[spelling] for spelling in _CONTROL_SPELLINGS if spelling in self.ids}
        for role, spellings in _FILL_SPELLINGS.items():
            given = self._id(role)
            found = [self.ids[spelling] for spelling in spellings if spelling in self.ids]
            if given is None and found:
                controls.add(found[0])
            ends |= {given} if given is not None else set(found[:1])
        for token in controls:
            kinds[token] = Kind.CONTROL
        return kinds, frozenset(ends)

    def _byte_level(self) -> Words:
        merges = self._get("merges")
        if not isinstance(merges, StringArray):
            self._refuse("merges", None, "an array of strings")
        pairs = [merge.partition(" ")[::2] for merge in merges]
        try:
            return ByteLevelWords(self.ids, pairs, PATTERNS[self._pre()], takes_whole_words=self._pre() == "llama-bpe")
        except ValueError as exc:
            refuse(self.file.path, f"tokenizer.ggml.merges cannot be used: {exc}", expected="pairs of tokens")

    def _pre(self) -> str:
        name = self._get("pre")
        name = _PRE_ALIASES.get(name, name) if isinstance(name, str) else name
        if not isinstance(name, str) or name not in PATTERNS:
            self._refuse("pre", name, " or ".join(PATTERNS))
        return name

    def _sentence_piece(self) -> Words:
        scores = self._get("scores")
        if not isinstance(scores, np.ndarray) or len(scores) != len(self.spellings):
            self._refuse("scores", scores, f"{len(self.spellings)} numbers")
        try:
            return SentencePieceWords(self.ids, scores.astype(np.float32).tolist())
        except ValueError as exc:
            refuse(self.file.path, str(exc), expected="one for all 256")

    def _get(self, name: str) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{name}")

    def _id(self, role: str, default: TokenId | None = None) -> TokenId | None:
        value = self._get(f"{role}_token_id")
        if value is None:
            return default if default is None or default < len(self.spellings) else None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.spellings):
            self._refuse(f"{role}_token_id", value, f"an id below {len(self.spellings)}")
        return value

    def _flag(self, name: str, *, default: bool) -> bool:
        value = self._get(name)
        if value is not None and not isinstance(value, bool):
            self._refuse(name, value, "a bool")
        return default if value is None else value

    def _refuse(self, name: str, got: object, expected: str) -> NoReturn:
        shown = got if isinstance(got, str | int | float | bool | None) else type(got).__name__
        fix = "use power-llamacpp for this model"
        refuse(self.file.path, f"tokenizer.ggml.{name} is {shown!r}", got=shown, expected=expected, fix=fix)
