"""Rules of targets: text and ids."""

from __future__ import annotations

import random
from collections.abc import Iterator

from power_conformance.failures import fail, refuse
from power_conformance.registry import rule
from power_conformance.subjects import TargetSubject, ordinary_ids
from power_core.errors import RequestError
from power_core.target import ChatMessage, Tokenizer
from power_core.types import TokenId

_TOKENIZER = "Tokenizer in power_core/target.py"
_TEXTS = (
    "The quick brown fox",
    "  two spaces,\ttab\nand line",
    "def f(x):\n    return x + 1\n",
    "Größe, 推测解码, naïve café 🙂",
    "<|user|> is no marker here",
)


@rule("T-TOKENIZER-01", look=_TOKENIZER)
def check_round_trip(subject: TargetSubject) -> None:
    """
    The bytes of a text's ids are the text (a leading space apart, which some vocabularies add), because output is
    joined from them.
    """
    tokenizer = subject.model.tokenizer
    for text, ids in _encoded(subject):
        got = b"".join(tokenizer.token_bytes(token) for token in ids)
        if got not in (text.encode(), b" " + text.encode()):
            fail(f"turned {text!r} into ids whose bytes are {got!r}", "the same text")


@rule("T-TOKENIZER-02", look=_TOKENIZER)
def check_specials_from_text(subject: TargetSubject) -> None:
    """The spelling of a special token in a text stays text, because users must not be able to forge turns."""
    tokenizer = subject.model.tokenizer
    for special in _specials(tokenizer):
        name = tokenizer.token_name(special)
        ids = _encode(tokenizer, f"a{name}b")
        if ids is not None and tokenizer.special_ids & set(ids):
            fail(f"encoded {f'a{name}b'!r} to {ids}, the special id {special} among them", "ordinary ids only")


@rule("T-TOKENIZER-03", look=_TOKENIZER)
def check_begin_of_sequence(subject: TargetSubject) -> None:
    """
    `add_special` adds BOS in front and nothing else there, and without it nothing is added, because chat templates
    add their own.
    """
    tokenizer = subject.model.tokenizer
    for text, bare in _encoded(subject):
        full = tokenizer.encode(text)
        if tokenizer.bos_id in bare:
            fail(f"encoded {text!r} without add_special to {bare}, BOS {tokenizer.bos_id} among them", "no BOS")
        head = full[:1] if full[:1] == [tokenizer.bos_id] else []
        if full[len(head) : len(head) + len(bare)] != bare:
            fail(f"encoded {text!r} to {full} with add_special and {bare} without", "the same ids after BOS")


@rule("T-TOKENIZER-04", look=_TOKENIZER)
def check_token_bytes(subject: TargetSubject) -> None:
    """
    Every id has bytes and a name, and special ids no bytes, because any id may be emitted and markers are not text.
    """
    tokenizer = subject.model.tokenizer
    for token in range(tokenizer.vocab_size):
        data, name = tokenizer.token_bytes(token), tokenizer.token_name(token)
        if not isinstance(data, bytes) or not isinstance(name, str):
            fail(f"answered {data!r} and {name!r} for id {token}", "bytes and a str")
        if data and token in tokenizer.special_ids:
            fail(f"renders the special id {token} as {data!r}", "b''")


@rule("T-TOKENIZER-05", look=_TOKENIZER)
def check_ids_in_vocabulary(subject: TargetSubject) -> None:
    """Encoding gives a list of ints of the vocabulary, because every id is an index."""
    tokenizer = subject.model.tokenizer
    for text, ids in _encoded(subject):
        for token in ids:
            if type(token) is not int or not 0 <= token < tokenizer.vocab_size:
                fail(f"encoded {text!r} to {ids}", f"ints from 0 to {tokenizer.vocab_size - 1}")


@rule("T-END-01", look=_TOKENIZER)
def check_end_ids(subject: TargetSubject) -> None:
    """
    End-of-generation and special ids are fixed and of the vocabulary, `eos_id` an end id, because any of them ends
    an answer.
    """
    tokenizer = subject.model.tokenizer
    for name in ("end_ids", "special_ids"):
        ids = getattr(tokenizer, name)
        if not isinstance(ids, frozenset) or ids != getattr(tokenizer, name):
            fail(f"has {name} {ids!r}", "a frozenset that stays the same")
        outside = sorted(token for token in ids if not 0 <= token < tokenizer.vocab_size)
        if outside:
            fail(f"has {outside[0]} among its {name}", f"ids from 0 to {tokenizer.vocab_size - 1}")
    if tokenizer.eos_id is not None and tokenizer.eos_id not in tokenizer.end_ids:
        fail(f"has eos_id {tokenizer.eos_id}, which is not in end_ids {sorted(tokenizer.end_ids)}", "eos_id in end_ids")


@rule("T-CHAT-01", look="Tokenizer.encode_chat in power_core/target.py")
def check_chat_markers(subject: TargetSubject) -> None:
    """
    Special ids of a chat come from its template only, because a message that spells a marker must not open a turn.
    """
    tokenizer = subject.model.tokenizer
    if not tokenizer.has_chat_template:
        refuse("the model has no chat template")
    expected = _count_specials(tokenizer, "hello")
    for special in _specials(tokenizer):
        name = tokenizer.token_name(special)
        try:
            count = _count_specials(tokenizer, f"hello {name} there")
        except RequestError:  # a small vocabulary may have no way to write it
            continue
        if count != expected:
            fail(f"a message with {name!r} has {count} special ids, one without {expected}", f"{expected}")


@rule("T-CHAT-02", look="Tokenizer.has_chat_template in power_core/target.py")
def check_chat_template(subject: TargetSubject) -> None:
    """`has_chat_template` says whether `encode_chat` works, because the command line chats by default where it can."""
    tokenizer = subject.model.tokenizer
    try:
        _count_specials(tokenizer, "hello")
    except RequestError as exc:
        if tokenizer.has_chat_template:
            fail(f"has a chat template and refuses a user's turn: {exc}", "ids, or has_chat_template = False")
    else:
        if not tokenizer.has_chat_template:
            fail("encodes a chat without a chat template", "a RequestError, or has_chat_template = True")


def _count_specials(tokenizer: Tokenizer, content: str) -> int:
    return sum(token in tokenizer.special_ids for token in tokenizer.encode_chat([ChatMessage("user", content)]))


def _encoded(subject: TargetSubject) -> Iterator[tuple[str, list[TokenId]]]:
    """Texts and their ids; those that a small vocabulary cannot write are passed over."""
    tokenizer, draw = subject.model.tokenizer, random.Random(subject.seed)  # noqa: S311 - texts, not secrets
    pieces = [tokenizer.token_bytes(token) for token in ordinary_ids(subject.model)]
    words = [piece.decode() for piece in pieces if piece and piece.isascii() and not piece.startswith(b" ")]
    own = ["".join(draw.choices(words, k=6)) for _ in range(20)] if words else []
    for text in (*_TEXTS, *own):
        ids = _encode(tokenizer, text)
        if ids is not None:
            yield text, ids


def _encode(tokenizer: Tokenizer, text: str) -> list[TokenId] | None:
    try:
        return tokenizer.encode(text, add_special=False)
    except RequestError:
        return None


def _specials(tokenizer: Tokenizer) -> list[TokenId]:
    if not tokenizer.special_ids:
        refuse("the vocabulary has no special ids")
    return sorted(tokenizer.special_ids)[:64]
