"""What every strategy shares: an index over one request's tokens, and copying that continues its own copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from power_core.drafter import Proposal
from power_core.types import TokenId

__all__ = ["HistoryIndex", "Strategy", "copy_forward"]


class HistoryIndex(ABC):
    """
    An index over a token list that it reads and never changes.

    Args:
        history: Prompt and committed tokens of one request; grows at its end while the index lives.

    Attributes:
        indexed: Tokens of the history that the index covers.
    """

    def __init__(self, history: Sequence[TokenId]) -> None:
        self.history = history
        self.indexed = 0

    def advance(self) -> None:
        """Cover the whole history: amortised O(1) for each token that is new."""
        if self.indexed < len(self.history):
            self._extend(self.indexed, len(self.history))
            self.indexed = len(self.history)

    @abstractmethod
    def _extend(self, start: int, stop: int) -> None:
        """Cover ``history[start:stop]``; ``history[:start]`` is covered and *stop* is the history's end."""

    @abstractmethod
    def draft(self, max_tokens: int) -> Proposal:
        """Continue the history, all of which is covered, by at most *max_tokens* tokens (at least 1)."""


class Strategy(ABC):
    """Makes the index of each request, and keeps what requests share, if anything."""

    @abstractmethod
    def index(self, history: Sequence[TokenId], num_prompt: int) -> HistoryIndex:
        """An index over *history*, which begins with *num_prompt* prompt tokens. Covers nothing yet."""

    def retire(self, index: HistoryIndex, num_prompt: int) -> None:  # noqa: B027 - most strategies share nothing
        """The request of *index* ended: put what may be shared into the store."""


def copy_forward(history: Sequence[TokenId], start: int, count: int) -> list[TokenId]:
    """
    *count* tokens from ``history[start]`` on; past the end of the history the copy itself is continued.

    That is what makes a match with its own tail propose more than one period.

    >>> copy_forward([7, 1, 2, 3], 2, 5)
    [2, 3, 2, 3, 2]
    """
    copied = list(history[start : start + count])
    if not copied:
        return copied
    while len(copied) < count:
        copied += copied[: count - len(copied)]
    return copied
