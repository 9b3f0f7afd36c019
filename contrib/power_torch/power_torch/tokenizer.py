"""Text to ids and back, from a GGUF file's vocabulary or a `tokenizer.json`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

from power_core.chat import ChatTemplate
from power_core.errors import BackendError, RequestError
from power_core.target import ChatMessage
from power_core.types import TokenId
from power_torch.special import SpecialToken, SpecialTokens
from power_torch.vocabulary import Kind, Vocabulary
from power_torch.words import byte_symbols

__all__ = ["GgufTokenizer", "TorchTokenizer", "byte_value"]

PLUGIN = "torch"
_BYTES = byte_symbols()


class TorchTokenizer(ABC):
    """
    What both kinds of tokenizer share.

    Args:
        spellings: By id.
        special: Tokens found as a whole.
        template: Source of the chat template, or None.

    Attributes:
        vocab_size: Number of ids.
        bos_id: Begin-of-sequence id, or None.
        eos_id: End-of-sequence id, or None.
        end_ids: Every end-of-generation id.
        special_ids: Control ids; they render as no text.
        adds_bos: Whether texts begin with BOS.
    """

    bos_id: TokenId | None
    eos_id: TokenId | None
    end_ids: frozenset[TokenId]
    special_ids: frozenset[TokenId]
    adds_bos: bool

    def __init__(self, spellings: Sequence[str], special: SpecialTokens, template: str | None) -> None:
        self.vocab_size = len(spellings)
        self.has_chat_template = template is not None
        self._spellings = spellings
        self._special = special
        self._template_source = template
        self._pieces: dict[TokenId, bytes] = {}

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[TokenId]:
        """
        Ids of *text*.

        Args:
            text: Any text that has a UTF-8 form.
            add_special: Begin with BOS where the model asks for it. No end-of-sequence id is added: the text
                is to be continued.
            parse_special: Read the spelling of a control token as that token.

        Raises:
            RequestError: The text has no UTF-8 form (a lone surrogate).
        """
        ids = self._tokenized(text, parse_special=parse_special)
        return self._with_bos(ids) if add_special else ids

    def _with_bos(self, ids: list[TokenId]) -> list[TokenId]:
        if not self.adds_bos or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def _tokenized(self, text: str, *, parse_special: bool) -> list[TokenId]:
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise RequestError(
                f"the text has no UTF-8 form: {exc.reason} at character {exc.start}",
                plugin=PLUGIN,
                got=text[exc.start : exc.end],
                fix="remove the lone surrogate",
            ) from None
        ids: list[TokenId] = []
        is_after_special = True
        for part in self._special.split(text, with_control=parse_special):
            if isinstance(part, str):
                ids += self._plain(part, is_after_special=is_after_special)
            else:
                ids.append(part)
            is_after_special = not isinstance(part, str)
        return ids

    @abstractmethod
    def _plain(self, text: str, *, is_after_special: bool) -> list[TokenId]:
        """Ids of *text*, in which nothing is special."""

    @abstractmethod
    def _piece(self, token_id: TokenId) -> bytes:
        """The bytes of a token of the vocabulary."""

    def token_bytes(self, token_id: TokenId) -> bytes:
        """
        The bytes *token_id* contributes to text; empty for control ids.

        Raises:
            BackendError: There is no such id.
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            self._check_id(token_id)
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def token_name(self, token_id: TokenId) -> str:
        """
        The vocabulary's own spelling, control ids included.

        Raises:
            BackendError: There is no such id.
        """
        self._check_id(token_id)
        return self._spellings[token_id].encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _check_id(self, token_id: TokenId) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise BackendError(
                f"there is no token id {token_id}", plugin=PLUGIN, got=token_id, expected=f"0 to {self.vocab_size - 1}"
            )

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[TokenId]:
        """
        Ids of *messages* under the model's chat template, ready for the assistant's turn.

        Raises:
            RequestError: There is no template, messages of another form, or the template refuses them.
        """
        if self._template is None:
            raise RequestError("the model has no chat template", plugin=PLUGIN, where="chat", fix="use --raw")
        text, originals = self._template.render(messages, self._special.spellings)
        ids: list[TokenId] = []
        for part in self._special.split(text, with_control=True):
            ids += self._tokenized(part.translate(originals), parse_special=False) if isinstance(part, str) else [part]
        return self._with_bos(ids)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        if self._template_source is None:
            return None
        roles = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        spelt = {name: "" if token is None else self.token_name(token) for name, token in roles.items()}
        return ChatTemplate(self._template_source, spelt, plugin="torch")


class GgufTokenizer(TorchTokenizer):
    """
    The tokenizer of a GGUF file; gives the ids that llama.cpp gives for it.

    Args:
        vocabulary: What the file says.
        template: Source of the file's chat template, or None.
    """

    def __init__(self, vocabulary: Vocabulary, template: str | None = None) -> None:
        controls = (Kind.CONTROL, Kind.UNKNOWN)
        tokens = zip(vocabulary.spellings, vocabulary.kinds, strict=True)
        super().__init__(
            vocabulary.spellings,
            SpecialTokens(
                SpecialToken(spelling, i, kind in controls)
                for i, (spelling, kind) in enumerate(tokens)
                if kind in (*controls, Kind.USER_DEFINED)
            ),
            template,
        )
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.end_ids = vocabulary.end_ids
        self.special_ids = frozenset(i for i, kind in enumerate(vocabulary.kinds) if kind is Kind.CONTROL)
        self.adds_bos = vocabulary.adds_bos
        self._vocabulary = vocabulary

    def _plain(self, text: str, *, is_after_special: bool) -> list[TokenId]:
        prefix = " " if self._vocabulary.adds_space and is_after_special else ""
        return self._vocabulary.words.encode(prefix + text)

    def _piece(self, token_id: TokenId) -> bytes:
        kind, spelling = self._vocabulary.kinds[token_id], self._spellings[token_id]
        if kind is Kind.USER_DEFINED:
            return spelling.encode("utf-8", "surrogateescape")
        if kind is Kind.BYTE:
            return bytes([int(spelling[3:-1], 16)])
        if kind is not Kind.NORMAL:
            return b""
        if self._vocabulary.is_byte_level:
            return b"".join(byte_value(symbol) for symbol in spelling)
        return spelling.replace("\u2581", " ").encode("utf-8", "surrogateescape")


def byte_value(symbol: str) -> bytes:
    """The byte that *symbol* stands for, or its own bytes where a vocabulary has one that stands for none."""
    value = _BYTES.get(symbol)
    return symbol.encode("utf-8", "surrogateescape") if value is None else bytes([value])
