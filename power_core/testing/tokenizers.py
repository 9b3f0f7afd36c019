"""A tokenizer whose whole vocabulary fits in a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from power_core.errors import RequestError
from power_core.target import ChatMessage
from power_core.testing.faults import Faults
from power_core.types import TokenId

__all__ = ["ScriptedTokenizer", "small_vocabulary"]

# Ordinary text first, then characters of two, three and four bytes that only exist as single bytes,
# so that a text can be cut inside each of them.
_LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?\n"
_SPLIT = "é€😀"


def small_vocabulary(size: int) -> list[bytes]:
    r"""
    *size* distinct pieces: letters, then the bytes of "é€😀" one by one, then two-letter words.

    >>> small_vocabulary(4)
    [b'a', b'b', b'c', b'd']
    >>> b"\xf0" in small_vocabulary(100)
    True
    """
    letters = [char.encode() for char in _LETTERS]
    single = dict.fromkeys(bytes([byte]) for byte in _SPLIT.encode())
    pairs = [a + b for a in letters[:26] for b in letters[:26]]
    pieces = [*letters, *single, *pairs]
    if not 1 <= size <= len(pieces):
        raise ValueError(f"a small vocabulary has 1 to {len(pieces)} pieces, not {size}")
    return pieces[:size]


class ScriptedTokenizer:
    """
    A `power_core.target.Tokenizer` over explicit byte pieces; encodes by longest match.

    Args:
        pieces: The bytes of each id, in order.
        end_ids: End-of-generation ids.
        special_ids: Control ids; their piece is their name and they render as nothing.
        bos_id: Put before a text where `add_special`; must be special.
        eos_id: The id constrained decoding ends with.
        roles: Role -> control id that opens its turn in a chat; without it there is no template.
        turn_end: Control id that closes a turn.
        faults: Where `encode`, `token_bytes` and `encode_chat` fail on purpose.

    >>> tokenizer = ScriptedTokenizer([b"a", b"b", b"ab", b"</s>"], end_ids={3}, special_ids={3})
    >>> tokenizer.encode("abba")
    [2, 1, 0]
    >>> tokenizer.token_bytes(2), tokenizer.token_bytes(3), tokenizer.token_name(3)
    (b'ab', b'', '</s>')
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        end_ids: frozenset[TokenId] | set[TokenId] = frozenset(),
        special_ids: frozenset[TokenId] | set[TokenId] = frozenset(),
        bos_id: TokenId | None = None,
        eos_id: TokenId | None = None,
        roles: Mapping[str, TokenId] | None = None,
        turn_end: TokenId | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.pieces = list(pieces)
        self.vocab_size = len(self.pieces)
        self.end_ids = frozenset(end_ids)
        self.special_ids = frozenset(special_ids)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.roles = dict(roles or {})
        self.turn_end = turn_end
        self.has_chat_template = bool(roles) and turn_end is not None
        self.faults = faults or Faults()
        self._text_ids = {piece: i for i, piece in reversed(list(enumerate(pieces))) if i not in self.special_ids}
        self._special = {self.pieces[i]: i for i in self.special_ids}
        self._longest = max(map(len, self.pieces))

    @classmethod
    def chat(cls, size: int = 100) -> ScriptedTokenizer:
        """
        A `small_vocabulary` of *size* pieces and, after it, BOS, EOS and the markers of a chat.

        >>> tokenizer = ScriptedTokenizer.chat(4)
        >>> tokenizer.encode_chat([ChatMessage("user", "ab")])
        [4, 7, 0, 1, 5, 8]
        >>> tokenizer.encode("<|user|>", parse_special=True, add_special=False)
        [7]
        """
        markers = [b"<s>", b"</s>", b"<|system|>", b"<|user|>", b"<|assistant|>"]
        return cls(
            small_vocabulary(size) + markers,
            end_ids={size + 1},
            special_ids=set(range(size, size + len(markers))),
            bos_id=size,
            eos_id=size + 1,
            roles={"system": size + 2, "user": size + 3, "assistant": size + 4},
            turn_end=size + 1,
        )

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[TokenId]:
        self.faults.enter("encode")
        ids = [self.bos_id] if add_special and self.bos_id is not None else []
        tables = (self._special, self._text_ids) if parse_special else (self._text_ids,)
        data, start = text.encode(), 0
        while start < len(data):
            found = self._match(data, start, tables)
            if found is None:
                raise RequestError(f"no token for the byte {data[start]:#04x} at {start}", who="scripted tokenizer")
            ids.append(found)
            start += len(self.pieces[found])
        self.faults.leave("encode")
        return ids

    def _match(self, data: bytes, start: int, tables: Sequence[Mapping[bytes, TokenId]]) -> TokenId | None:
        for table in tables:
            for end in range(min(len(data), start + self._longest), start, -1):
                if data[start:end] in table:
                    return table[data[start:end]]
        return None

    def token_bytes(self, token_id: TokenId) -> bytes:
        self.faults.enter("token_bytes")
        piece = b"" if token_id in self.special_ids else self.pieces[token_id]
        self.faults.leave("token_bytes")
        return piece

    def token_name(self, token_id: TokenId) -> str:
        return self.pieces[token_id].decode(errors="backslashreplace")

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[TokenId]:
        self.faults.enter("encode_chat")
        if not self.roles or self.turn_end is None:
            raise RequestError("has no chat template", who="scripted tokenizer")
        ids = [] if self.bos_id is None else [self.bos_id]
        for message in messages:
            if message.role not in self.roles:
                raise RequestError(f"unknown role {message.role!r}", who="scripted tokenizer", got=message.role)
            text = self.encode(message.content, add_special=False)
            ids += [self.roles[message.role], *text, self.turn_end]
        self.faults.leave("encode_chat")
        return [*ids, self.roles["assistant"]]
