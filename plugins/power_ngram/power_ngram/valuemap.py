"""
`ngram-map-k4v`: up to four continuations per n-gram, with how often each followed it.

The idea is llama.cpp's ngram-map-k4v. Here keys are hashed rather than searched for, the hits vote on
each position of a continuation, and continuations chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from power_core.drafter import Proposal
from power_core.types import TokenId
from power_ngram.config import NgramMapConfig
from power_ngram.history import HistoryIndex, Strategy

__all__ = ["MAX_VALUES", "Value", "ValueMapIndex", "ValueMapStrategy"]

MAX_VALUES = 4


@define
class Value:
    """A continuation: where it was seen first, and how often it followed the key."""

    start: int
    hits: int = 1


class ValueMapIndex(HistoryIndex):
    """
    Keys of `key_size` tokens to at most four values of `value_size` tokens, least recently hit first.

    A key enters when all tokens of its value are known. A fifth value replaces the one with the fewest
    hits, the least recent of them on a tie.
    """

    def __init__(self, history: Sequence[TokenId], config: NgramMapConfig) -> None:
        super().__init__(history)
        self.values: dict[tuple[TokenId, ...], list[Value]] = {}
        self._config = config

    def _extend(self, start: int, stop: int) -> None:
        n, m = self._config.key_size, self._config.value_size
        # The values of the last `m - 1` positions covered so far were not complete until now.
        for position in range(max(start - m + 1, n), stop - m + 1):
            self._hit(tuple(self.history[position - n : position]), position)

    def _hit(self, key: tuple[TokenId, ...], position: int) -> None:
        values = self.values.setdefault(key, [])
        history, m = self.history, self._config.value_size
        if values:
            tokens = history[position : position + m]
            for place, value in enumerate(values):
                if history[value.start : value.start + m] == tokens:
                    value.hits += 1
                    values.append(values.pop(place))
                    return
            if len(values) == MAX_VALUES:
                values.remove(min(values, key=lambda value: value.hits))
        values.append(Value(position))

    def draft(self, max_tokens: int) -> Proposal:
        n = self._config.key_size
        window = list(self.history[-n:])
        confidences: list[float] = []
        while len(confidences) < max_tokens:
            values = self.values.get(tuple(window[-n:]), ())
            if not values or sum(value.hits for value in values) < self._config.min_hits:
                break
            room = min(self._config.value_size, max_tokens - len(confidences))
            if self._follow(values, room, window, confidences) < room:
                break
        return Proposal(window[len(window) - len(confidences) :], confidences)

    def _follow(self, values: Sequence[Value], room: int, window: list[TokenId], confidences: list[float]) -> int:
        """Append the value with the most hits to *window* while enough of the hits agree; how many tokens."""
        favourite = max(reversed(values), key=lambda value: value.hits)  # the latest on a tie
        for offset in range(room):
            token = self.history[favourite.start + offset]
            agreeing = [value for value in values if self.history[value.start + offset] == token]
            share = sum(value.hits for value in agreeing) / sum(value.hits for value in values)
            if share < self._config.min_share:
                return offset
            window.append(token)
            confidences.append(share)
            values = agreeing
        return room


class ValueMapStrategy(Strategy):
    """`ngram-map-k4v`."""

    def __init__(self, config: NgramMapConfig) -> None:
        self._config = config

    def index(self, history: Sequence[TokenId], num_prompt: int) -> HistoryIndex:  # noqa: ARG002 - one map for all
        return ValueMapIndex(history, self._config)
