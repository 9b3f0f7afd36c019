"""
Grammar-constrained decoding: JSON schemas and regular expressions, as a transaction participant.

The automaton is llguidance's, which parses bytes: any split of a legal text into tokens keeps the
grammar valid. Where the grammar forces the next bytes, it allows only the first token of the
tokenizer's own encoding of them, because models continue badly after splits they never saw. Either way
the mask is a function of the tokens consumed so far and nothing else.

JSON is written on one line with ", " between items and ": " after keys, the way models write it
unasked. Free whitespace is off unless the schema says ``"x-guidance": {"whitespace_flexible": true}``:
it is legal JSON for ever, and a small model can fall into it and never come back.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.errors import RequestError, TransactionError
from power_core.grammar_size import check_regex, check_schema
from power_core.request import SamplingSpec
from power_core.target import Tokenizer
from power_core.types import TokenId

__all__ = ["GrammarConstraint"]

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NOTHING_FITS = "no text fits it, or none that this vocabulary can write"


@frozen
class _Checkpoint:
    length: int
    is_ended: bool


class GrammarConstraint:
    """
    One request's position in its grammar.

    Args:
        tokenizer: The target's; must be weakly referable. Its end ids are open where the text may end.
        json_schema: A JSON schema as text or object. Exactly one of the two must be given.
        regex: A regular expression in Rust's syntax without look-around, for the whole output.
            Its classes are Unicode's: digits of all scripts match the digit class.

    Raises:
        RequestError: The grammar does not parse, or asks for something the automaton cannot do.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        json_schema: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
    ) -> None:
        if json_schema is not None and regex is None:
            self._where, self._grammar = "json_schema", _json_grammar(json_schema)
        elif regex is not None and json_schema is None:
            self._where, self._grammar = "regex", _regex_grammar(regex)
        else:
            raise RequestError("one output cannot follow two grammars", who="grammar", fix="give a schema or a regex")
        self._tokenizer = tokenizer  # keeps it alive: the automaton refers to it weakly
        self._vocab_size = tokenizer.vocab_size
        self._end_ids = np.array(sorted(_end_ids(tokenizer)), np.intp)
        self._compiled = _VOCABULARIES.get(tokenizer)
        self._tokens: list[TokenId] = []  # consumed by the automaton; an end id is not
        self._is_ended = False
        self._matcher = self._start()

    @classmethod
    def of(cls, spec: SamplingSpec, tokenizer: Tokenizer) -> GrammarConstraint | None:
        """The constraint *spec* asks for, or None."""
        if spec.json_schema is None and spec.regex is None:
            return None
        return cls(tokenizer, json_schema=spec.json_schema, regex=spec.regex)

    @property
    def is_complete(self) -> bool:
        """Whether an end id came, or the text can only end here."""
        return self._is_ended or bool(self._matcher.is_stopped())

    def mask(self, row: NDArray[np.float32]) -> None:
        """
        Set what the grammar does not allow next to -inf, in place.

        Args:
            row: float32[vocab].

        Raises:
            RequestError: Nothing in this vocabulary continues the text, or the automaton hit its limits.
        """
        if self.is_complete:
            kept = row[self._end_ids]
            row.fill(-np.inf)
            row[self._end_ids] = kept
            return
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check(self._matcher)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        np.copyto(row[: self._vocab_size], -np.inf, where=allowed == 0)
        row[self._vocab_size :] = -np.inf  # rows may be padded beyond the tokenizer's vocabulary

    def advance(self, token_id: TokenId) -> None:
        """
        Consume a token that the mask allowed.

        Raises:
            RequestError: The grammar does not allow it here.
        """
        if token_id in self._end_ids:
            if not (self.is_complete or self._matcher.is_accepting()):
                raise RequestError("the text may not end here", who="grammar", where=self._where, got=token_id)
            self._is_ended = True
            return
        if self.is_complete:
            raise RequestError("the text has ended", who="grammar", where=self._where, got=token_id)
        self._tokens.append(token_id)
        self._matcher.consume_token(token_id)
        self._check(self._matcher)

    def checkpoint(self) -> object:
        return _Checkpoint(len(self._tokens), self._is_ended)

    def commit(self, n: int) -> None:
        """The last *n* tokens stay. Nothing to do: a checkpoint holds no copy."""

    def restore(self, checkpoint: object) -> None:
        """Forget every token since *checkpoint*."""
        if not isinstance(checkpoint, _Checkpoint) or checkpoint.length > len(self._tokens):
            raise TransactionError("not a checkpoint of this state", who="grammar", got=checkpoint)
        surplus = len(self._tokens) - checkpoint.length
        del self._tokens[checkpoint.length :]
        self._is_ended = checkpoint.is_ended
        if not self._matcher.rollback(surplus):  # an automaton that reported an error stays in it: start again
            self._matcher = self._start()
            self._matcher.consume_tokens(self._tokens)
            self._check(self._matcher)

    def _start(self) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._compiled, self._grammar, log_level=0)
        self._check(matcher)
        return matcher

    def _check(self, matcher: Any) -> None:
        if matcher.is_error():
            cause = matcher.get_error().partition("\n<state>")[0].strip()
            what = _NOTHING_FITS if cause in ("", "NoExtensionBias") else cause  # llguidance's name for it
            raise RequestError(what, who="grammar", where=self._where, got=cause)


def _json_grammar(schema: str | Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    try:
        text = json.dumps(dict(schema)) if isinstance(schema, Mapping) else schema
        check_schema(json.loads(text))
        return str(LLMatcher.grammar_from_json_schema(text, defaults=JSON_STYLE))
    except (TypeError, ValueError, RecursionError) as exc:
        raise RequestError(
            f"not a JSON schema: {exc}", who="grammar", where="json_schema", got=schema, expected="a JSON object"
        ) from exc


def _regex_grammar(regex: str) -> str:
    from llguidance import LLMatcher

    if isinstance(regex, str):
        check_regex(regex, "regex")
    try:
        return str(LLMatcher.grammar_from_regex(regex))
    except (TypeError, UnicodeEncodeError) as exc:
        raise RequestError(f"not a text: {exc}", who="grammar", where="regex", got=regex, expected="text") from exc


def _end_ids(tokenizer: Tokenizer) -> frozenset[TokenId]:
    return tokenizer.end_ids if tokenizer.eos_id is None else tokenizer.end_ids | {tokenizer.eos_id}


class _Vocabularies:
    """Vocabularies compiled for the automaton, one for each tokenizer object while it lives."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tokenizer], Any]] = {}
        self._lock = threading.Lock()

    def get(self, tokenizer: Tokenizer) -> Any:
        """The compiled vocabulary of *tokenizer*; the first call costs about 0.2 s for 49,152 ids."""
        key = id(tokenizer)  # tokenizers need not be hashable
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                reference = weakref.ref(tokenizer, lambda _: self._entries.pop(key, None))
                entry = self._entries[key] = (reference, _compile(tokenizer, reference))
            return entry[1]


_VOCABULARIES = _Vocabularies()


def _compile(tokenizer: Tokenizer, reference: weakref.ref[Tokenizer]) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    end_ids = sorted(_end_ids(tokenizer))
    wrapper = TokenizerWrapper(_Vocabulary(tokenizer, reference))
    return LLTokenizer(wrapper, eos_token=end_ids) if end_ids else LLTokenizer(wrapper)


class _Vocabulary:
    """
    A tokenizer as llguidance wants to see it.

    It must not keep the tokenizer alive, or the cache above would never let go of one.
    """

    def __init__(self, tokenizer: Tokenizer, reference: weakref.ref[Tokenizer]) -> None:
        end_ids = _end_ids(tokenizer)
        special = tokenizer.special_ids | end_ids
        self.bos_token_id = tokenizer.bos_id
        # Without any end id, llguidance adds one of its own after the last.
        self.eos_token_id = tokenizer.eos_id if tokenizer.eos_id is not None else min(end_ids, default=None)
        self.special_token_ids = sorted(special)
        self.tokens = [
            tokenizer.token_name(i).encode() if i in special else tokenizer.token_bytes(i)
            for i in range(tokenizer.vocab_size)
        ]
        self._reference = reference
        self._ids: dict[bytes, TokenId] = {}

    def __call__(self, text: bytes) -> list[TokenId]:
        """
        Ids that spell *text*, which the grammar forces; canonical where the tokenizer can say so.

        Some tokenizers put a space before any text, normalise it or lack a byte of it. Their ids would
        spell something the grammar forbids, so the longest matching tokens are taken there.
        """
        tokenizer = self._reference()
        try:
            ids = tokenizer.encode(text.decode(), add_special=False) if tokenizer is not None else []
        except Exception:  # noqa: BLE001 - an exception here would be a panic in native code
            ids = []
        return ids if b"".join(self.tokens[i] for i in ids) == text else self._longest_matches(text)

    def _longest_matches(self, text: bytes) -> list[TokenId]:
        if not self._ids:
            special = set(self.special_token_ids)
            self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        ids: list[TokenId] = []
        while text:
            size = next((n for n in range(min(len(text), 64), 0, -1) if text[:n] in self._ids), 0)
            if not size:
                break  # no token begins so: the automaton finds the same and reports it
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids
