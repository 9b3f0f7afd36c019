"""
Prompt lookup: the latest place where the last n tokens occurred before, and what followed there.

After Saxena, "Prompt Lookup Decoding" (2023). `ngram-context` differs in where it looks first.
"""

from __future__ import annotations

from collections.abc import Sequence

from power_core.drafter import Proposal
from power_core.types import TokenId
from power_ngram.config import NgramContextConfig, PromptLookupConfig
from power_ngram.history import HistoryIndex, Strategy, copy_forward

__all__ = ["ContextStrategy", "LookupStrategy", "NgramEnds"]


MOST_SIZES = 8


def sizes(n_min: int, n_max: int) -> list[int]:
    """
    N-gram lengths to look up, longest first: all of them, or where they are many, `MOST_SIZES` in even ratios.

    >>> sizes(3, 5), sizes(10, 500)
    ([5, 4, 3], [500, 286, 164, 94, 53, 31, 17, 10])
    """
    if n_max - n_min < MOST_SIZES:
        return list(range(n_max, n_min - 1, -1))
    ratio = (n_max / n_min) ** (1 / (MOST_SIZES - 1))
    return sorted({round(n_min * ratio**i) for i in range(MOST_SIZES)}, reverse=True)


class NgramEnds:
    """
    Where each n-gram of some sizes last ended: one dict a size, n-gram to position after it.

    N-grams are kept as 64-bit hashes: a token then costs as much memory at any size, and a collision
    costs one bad proposal.
    """

    def __init__(self, n_min: int, n_max: int) -> None:
        self._ends: dict[int, dict[int, int]] = {n: {} for n in sizes(n_min, n_max)}

    def add(self, history: Sequence[TokenId], start: int, stop: int) -> None:
        """Add the n-grams that end at positions *start* <= end < *stop* (the token at `end` follows them)."""
        for n, ends in self._ends.items():
            first = max(start, n)
            if first < stop:
                columns = (history[first - n + j : stop - n + j] for j in range(n))
                ends.update(zip(map(hash, zip(*columns, strict=True)), range(first, stop), strict=True))

    def find(self, history: Sequence[TokenId]) -> int | None:
        """The position after the latest added occurrence of the longest suffix of *history*, longest first."""
        for n, ends in self._ends.items():
            end = ends.get(hash(tuple(history[-n:])))  # of a history shorter than n: never found
            if end is not None:
                return end
        return None


class _LookupIndex(HistoryIndex):
    """Copies from what the first of several `NgramEnds` finds."""

    def __init__(self, history: Sequence[TokenId], tables: Sequence[NgramEnds]) -> None:
        super().__init__(history)
        self._tables = tables

    def draft(self, max_tokens: int) -> Proposal:
        for table in self._tables:
            start = table.find(self.history)
            if start is not None:
                return Proposal(copy_forward(self.history, start, max_tokens))
        return Proposal()


class LookupIndex(_LookupIndex):
    """Index of `prompt-lookup`: one table over prompt and output."""

    def __init__(self, history: Sequence[TokenId], config: PromptLookupConfig) -> None:
        self._ends = NgramEnds(config.n_min, config.n_max)
        super().__init__(history, (self._ends,))

    def _extend(self, start: int, stop: int) -> None:
        # An n-gram is added when a token follows it: the last one of the history is the one looked up.
        self._ends.add(self.history, start, stop)


class ContextIndex(_LookupIndex):
    """Index of `ngram-context`: a table for n-grams that an output token follows, one for those in the prompt."""

    def __init__(self, history: Sequence[TokenId], num_prompt: int, config: NgramContextConfig) -> None:
        self._num_prompt = num_prompt
        self._output = NgramEnds(config.n_min, config.n_max)
        self._prompt = NgramEnds(config.n_min, config.n_max)
        super().__init__(history, (self._output, self._prompt))

    def _extend(self, start: int, stop: int) -> None:
        self._prompt.add(self.history, start, min(stop, self._num_prompt))
        self._output.add(self.history, max(start, self._num_prompt), stop)


class LookupStrategy(Strategy):
    """`prompt-lookup`."""

    def __init__(self, config: PromptLookupConfig) -> None:
        self._config = config

    def index(self, history: Sequence[TokenId], num_prompt: int) -> HistoryIndex:  # noqa: ARG002 - one table for all
        return LookupIndex(history, self._config)


class ContextStrategy(Strategy):
    """`ngram-context`."""

    def __init__(self, config: NgramContextConfig) -> None:
        self._config = config

    def index(self, history: Sequence[TokenId], num_prompt: int) -> HistoryIndex:
        return ContextIndex(history, num_prompt, self._config)
