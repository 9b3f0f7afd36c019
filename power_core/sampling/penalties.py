"""Repetition, presence and frequency penalties over a sliding window of prompt and output."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from power_core.request import SamplingSpec
from power_core.types import TokenId

__all__ = ["PenaltyWindow"]


class PenaltyWindow:
    """
    Counts of the tokens in the window, kept while tokens come and go.

    Args:
        spec: The three penalties and `penalty_window`.
        history: The sampler's token list, which this reads and never changes. `push` follows each append
            and `pop` precedes each removal, so that a step costs the window and not the history.
    """

    def __init__(self, spec: SamplingSpec, history: list[TokenId]) -> None:
        self._repeat = spec.repeat_penalty
        self._presence = spec.presence_penalty
        self._frequency = spec.frequency_penalty
        self._size = spec.penalty_window
        self._history = history
        self._counts: dict[TokenId, int] = {}
        window = history if self._size < 0 else history[max(0, len(history) - self._size) :]
        for token in window:
            self._add(token)

    @staticmethod
    def is_needed(spec: SamplingSpec) -> bool:
        """Whether *spec* can change a logit here."""
        changes = spec.repeat_penalty != 1 or spec.presence_penalty != 0 or spec.frequency_penalty != 0
        return changes and spec.penalty_window != 0

    def push(self) -> None:
        """The last token of the history has just been appended."""
        self._add(self._history[-1])
        if 0 <= self._size < len(self._history):
            self._drop(self._history[-1 - self._size])

    def pop(self) -> None:
        """The last token of the history is about to be removed."""
        if 0 <= self._size < len(self._history):
            self._add(self._history[-1 - self._size])
        self._drop(self._history[-1])

    def apply(self, row: NDArray[np.float32]) -> None:
        """Penalise *row* (float32[vocab]) in place, in the form of llama.cpp's penalties sampler."""
        if not self._counts:
            return
        ids = np.fromiter(self._counts.keys(), np.intp, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
        logits = row[ids].astype(np.float64)
        logits = np.where(logits > 0, logits / self._repeat, logits * self._repeat)
        with np.errstate(over="ignore"):  # some backends exclude tokens by the largest negative float32
            row[ids] = logits - (counts * self._frequency + self._presence)

    def _add(self, token: TokenId) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1

    def _drop(self, token: TokenId) -> None:
        left = self._counts[token] - 1
        if left:
            self._counts[token] = left
        else:
            del self._counts[token]
