"""
From emitted tokens to text: UTF-8 across tokens, stop strings, end ids. A transaction participant.

Stop strings are matched on the decoded text, character by character, by an Aho-Corasick automaton
("Efficient string matching", CACM 1975). Its state is the longest end of the text that begins a stop
string, which is exactly what must be held back, so nothing is ever searched twice and the outcome
cannot depend on how the text was split into tokens or blocks.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Sequence

from attrs import field, frozen

from power_core.errors import RequestError, TransactionError
from power_core.target import Tokenizer
from power_core.types import TokenId

__all__ = ["Decoder"]


@frozen
class _State:
    """All that changes while a request decodes; a checkpoint is this object itself."""

    num_parts: int = 0  # released pieces of text
    pending: bytes = field(default=b"", repr=False)  # an incomplete UTF-8 sequence, at most 3 bytes
    node: int = 0  # of the stop automaton; its depth is the number of characters held back
    is_finished: bool = False
    is_stopped: bool = False  # by a stop string, so that nothing more may be released


class Decoder:
    """
    Decodes one request's tokens and finds its end.

    Args:
        tokenizer: The target's.
        stop: Stop strings. The text ends before the first one to complete; of several that complete with
            the same character, before the longest.
        stop_ids: Ids that end the output like an end-of-generation id. Their own text is not released,
            even where they are ordinary tokens.

    Raises:
        RequestError: A stop string is empty, or a stop id is not in the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), stop_ids: Collection[int] = ()) -> None:
        _check_stops(stop, stop_ids, tokenizer.vocab_size)
        self._token_bytes = tokenizer.token_bytes
        self._end_ids = tokenizer.end_ids.union(stop_ids)
        self._stops = _StopAutomaton(stop) if stop else None
        self._parts: list[str] = []
        self._state = _State()

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._parts)

    def push(self, token_id: TokenId) -> tuple[str, bool]:
        """
        Decode one emitted token.

        Returns:
            The text released by it, and whether the output ends here: by an end id, a stop id or a stop string.
        """
        state = self._state
        if state.is_finished:
            return "", True
        if token_id in self._end_ids:
            self._state = _State(state.num_parts, state.pending, state.node, is_finished=True)
            return "", True
        data = state.pending + self._token_bytes(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        return self._release(text, data[used:])

    def flush(self) -> str:
        """
        Release what is held back, at the end of the output.

        Returns:
            The held text, an incomplete character as U+FFFD; empty after a stop string.
        """
        state = self._state
        if state.is_stopped:
            return ""
        # The replacement character may be in a stop string, so it goes the same way as all text.
        text, _ = codecs.utf_8_decode(state.pending, "replace", True)
        released, _ = self._release(text, b"")
        node = self._state.node
        if self._stops is not None and not self._state.is_stopped:
            released += self._append(self._stops.held(node))
        self._state = _State(len(self._parts), is_finished=True, is_stopped=self._state.is_stopped)
        return released

    def checkpoint(self) -> object:
        return self._state

    def commit(self, n: int) -> None:
        """The last *n* tokens stay. Nothing to do: a checkpoint holds no copy."""

    def restore(self, checkpoint: object) -> None:
        """Forget every token since *checkpoint*."""
        if not isinstance(checkpoint, _State) or checkpoint.num_parts > len(self._parts):
            raise TransactionError("not a checkpoint of this state", who="decoder", got=checkpoint)
        del self._parts[checkpoint.num_parts :]
        self._state = checkpoint

    def _release(self, text: str, pending: bytes) -> tuple[str, bool]:
        """Pass *text* through the stop automaton and release what no stop string can claim any more."""
        node, is_stopped, released = self._state.node, False, text
        if self._stops is not None:
            released, node, is_stopped = self._stops.scan(node, text)
        self._append(released)
        self._state = _State(len(self._parts), pending, node, is_stopped, is_stopped)
        return released, is_stopped

    def _append(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


class _StopAutomaton:
    """The trie of all stop strings with failure links; node 0 is the empty string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._held = [""]  # the string a node stands for
        self._match = [0]  # length of the longest stop string that ends at a node
        for stop in stops:
            self._insert(stop)
        self._fail = self._failure_links()

    def held(self, node: int) -> str:
        return self._held[node]

    def scan(self, node: int, text: str) -> tuple[str, int, bool]:
        """
        Read *text* in state *node*.

        Returns:
            The text to release, the new node, and whether a stop string completed.
        """
        everything = self._held[node] + text
        for end, char in enumerate(text, len(self._held[node]) + 1):
            while node and char not in self._next[node]:
                node = self._fail[node]
            node = self._next[node].get(char, 0)
            if self._match[node]:
                return everything[: end - self._match[node]], 0, True
        return everything[: len(everything) - len(self._held[node])], node, False

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._held.append(self._held[node] + char)
                self._match.append(0)
            node = self._next[node][char]
        self._match[node] = len(stop)

    def _failure_links(self) -> list[int]:
        """For each node, the node of its longest proper suffix that begins a stop string; breadth first."""
        fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            parent = queue.popleft()
            for char, child in self._next[parent].items():
                link = fail[parent]
                while link and char not in self._next[link]:
                    link = fail[link]
                fail[child] = self._next[link].get(char, 0)
                # Of the stop strings ending here the node's own is the longest.
                self._match[child] = self._match[child] or self._match[fail[child]]
                queue.append(child)
        return fail


def _check_stops(stop: Sequence[str], stop_ids: Collection[int], vocab_size: int) -> None:
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise RequestError(
            f"stop is {stop!r}", who="decoding", where="stop", got=stop, expected="a sequence of non-empty strings"
        )
    for text in stop:
        if any("\ud800" <= char <= "\udfff" for char in text):  # it could never match, and has no place in a receipt
            raise RequestError(
                f"stop string {text!r} has no UTF-8 form",
                who="decoding",
                where="stop",
                got=text,
                fix="remove the lone surrogate",
            )
    for token_id in stop_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"stop id {token_id} is not in the vocabulary",
                who="decoding",
                where="stop_ids",
                got=token_id,
                expected=f"0 to {vocab_size - 1}",
            )
