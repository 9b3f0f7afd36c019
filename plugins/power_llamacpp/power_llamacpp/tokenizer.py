"""Text to ids and back through libllama's vocabulary; ids of chats with special tokens from the template only."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

from power_core.chat import ChatTemplate
from power_core.errors import BackendError, RequestError
from power_core.target import ChatMessage
from power_core.types import TokenId
from power_llamacpp.context import NativeModel
from power_llamacpp.native import library
from power_llamacpp.special import SpecialToken, SpecialTokens

__all__ = ["LlamaCppTokenizer"]

_TOO_LONG = -(2**31)  # llama_tokenize's answer where the number of ids does not fit an int32


class LlamaCppTokenizer:
    """
    The tokenizer of one model file.

    Args:
        model: The model, or its vocabulary alone; must stay open.
        template: Source of the file's chat template, or None where it has none.

    Attributes:
        vocab_size: Number of ids.
        bos_id: Begin-of-sequence id, or None.
        eos_id: End-of-sequence id, or None.
        end_ids: Every end-of-generation id of the file.
        special_ids: Control ids; they render as no text.
    """

    def __init__(self, model: NativeModel, template: str | None = None) -> None:
        self._lib = lib = library()
        self._model = model
        vocab = model.vocab
        self.vocab_size = model.vocab_size
        self.bos_id = _id_or_none(lib.llama_vocab_bos(vocab))
        self.eos_id = _id_or_none(lib.llama_vocab_eos(vocab))
        ids = range(self.vocab_size)
        is_end, attributes_of = lib.llama_vocab_is_eog, lib.llama_vocab_get_attr
        self.end_ids: frozenset[TokenId] = frozenset([i for i in ids if is_end(vocab, i)])
        attributes = [attributes_of(vocab, i) for i in ids]
        control = lib.LLAMA_TOKEN_ATTR_CONTROL
        self.special_ids: frozenset[TokenId] = frozenset([i for i in ids if attributes[i] & control])
        self._attributes = attributes
        self._pieces: dict[TokenId, bytes] = {}
        self._room = 32  # bytes a piece may have before the buffer must grow
        self._template_source = template
        self.has_chat_template = template is not None
        # Whether the file wants BOS is asked of the library itself: some vocabulary kinds ignore the flag.
        self._opening = self._tokenize(b"", add_special=True, parse_special=False)[:1]
        if self._opening != [self.bos_id]:
            self._opening = []

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[TokenId]:
        """
        Ids of *text*.

        Args:
            text: Any text that has a UTF-8 form.
            add_special: Begin with BOS where the file asks for it. No end-of-sequence id is added: the text
                is to be continued.
            parse_special: Read the spelling of a control token as that token.

        Raises:
            RequestError: The text has no UTF-8 form (a lone surrogate), or is too long.
        """
        ids = self._tokenize(_utf8(text), add_special=False, parse_special=parse_special)
        return self._with_opening(ids) if add_special else ids

    def _with_opening(self, ids: list[TokenId]) -> list[TokenId]:
        return ids if not self._opening or ids[:1] == self._opening else self._opening + ids

    def _tokenize(self, data: bytes, *, add_special: bool, parse_special: bool) -> list[TokenId]:
        room = len(data) + 8  # rarely more ids than bytes; asked again where it is
        while True:
            buffer = (ctypes.c_int32 * room)()
            count = self._lib.llama_tokenize(self._vocab(), data, len(data), buffer, room, add_special, parse_special)
            if count >= 0:
                return list(buffer[:count])
            if count == _TOO_LONG or -count <= room:
                raise RequestError(f"a text of {len(data)} bytes is too long", plugin="llamacpp", got=len(data))
            room = -count

    def _vocab(self) -> int:
        self._model.handle  # noqa: B018 - raises where the model is closed
        vocab: int = self._model.vocab
        return vocab

    def token_bytes(self, token_id: TokenId) -> bytes:
        """
        The bytes *token_id* contributes to text; empty for control ids.

        Raises:
            BackendError: There is no such id.
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def _piece(self, token_id: TokenId) -> bytes:
        self._check_id(token_id)
        while True:
            buffer = ctypes.create_string_buffer(self._room)
            length = self._lib.llama_token_to_piece(self._vocab(), token_id, buffer, self._room, 0, False)
            if length >= 0:
                return buffer.raw[:length]
            self._room = -length

    def token_name(self, token_id: TokenId) -> str:
        """
        The vocabulary's own spelling, control ids included.

        Raises:
            BackendError: There is no such id.
        """
        self._check_id(token_id)
        return self._spelling(token_id).decode("utf-8", "replace")

    def _spelling(self, token_id: TokenId) -> bytes:
        return self._lib.llama_vocab_get_text(self._vocab(), token_id) or b""

    def _check_id(self, token_id: TokenId) -> None:
        if not 0 <= token_id < self.vocab_size:  # the library throws through C frames
            raise BackendError(
                f"there is no token id {token_id}",
                plugin="llamacpp",
                got=token_id,
                expected=f"0 to {self.vocab_size - 1}",
            )

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[TokenId]:
        """
        Ids of *messages* under the file's chat template, ready for the assistant's turn.

        For messages without spellings of control tokens these are the ids of the rendered text, tokenized
        once. A spelling inside a message stays text. BOS comes from the template or, where the file asks
        for it, from here: once.

        Raises:
            RequestError: No template in the file, messages of another form, or the template refuses them.
        """
        if self._template is None:
            raise RequestError("the model file has no chat template", plugin="llamacpp", where="chat", fix="use --raw")
        rendered, originals = self._template.render(messages, self._special.spellings)
        ids: list[TokenId] = []
        for part in self._special.split(rendered):
            if isinstance(part, SpecialToken):
                ids.append(part.id)
            else:
                text = part.translate(originals)
                ids += self._tokenize(_utf8(text), add_special=False, parse_special=False)
        return self._with_opening(ids)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        if self._template_source is None:
            return None
        names = ((name, getattr(self, name)) for name in ("bos_id", "eos_id"))
        tokens = {name.replace("_id", "_token"): self.token_name(i) if i is not None else "" for name, i in names}
        return ChatTemplate(self._template_source, tokens, plugin="llamacpp")

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens.of(
            (self._spelling(i).decode("utf-8", "replace"), i, attributes)
            for i, attributes in enumerate(self._attributes)
        )


def _id_or_none(token_id: int) -> TokenId | None:
    return token_id if token_id >= 0 else None


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        raise RequestError(
            f"the text has no UTF-8 form: {exc.reason} at character {exc.start}",
            plugin="llamacpp",
            got=text[exc.start : exc.end],
            fix="remove the lone surrogate",
        ) from None
