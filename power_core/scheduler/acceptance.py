"""
Running estimates of the chance that a proposed token is accepted, given those before it were.

One table a request: a cell for each combination of what the last proposal did and where in the
proposal the token stands, or how sure the drafter was of it. A cell is a Beta-Bernoulli estimate with
exponential forgetting.

Proposals that the target never checked teach as well: the tokens it goes on to choose say what it
would have accepted (`Shadow`). That makes watching a drafter free, apart from asking it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from power_core.types import TokenId

__all__ = ["COLD", "CONTEXTS", "HOT", "STREAK", "WARM", "AcceptanceTable"]

# What the last proposal did, the best single predictor of what the next one will do:
COLD = 0  # its first token was wrong
WARM = 1  # a later one was, or nothing is known yet
HOT = 2  # none was
STREAK = 3  # none was, for long: the text repeats what the drafter knows
CONTEXTS = 4

STREAK_TOKENS = 24  # right in a row
FORGET = 0.97  # a cell remembers about 1 / (1 - FORGET) observations
PRIOR_WEIGHT = 1.2  # observations that the prior counts for
PRIOR_UNSURE = (0.33, 0.75, 0.8, 0.95)  # by context, where the drafter says nothing about its own chances
CONFIDENCE_EDGES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.96)
_CONFIDENCE_PRIOR = (0.05, 0.17, 0.32, 0.47, 0.62, 0.75, 0.85, 0.93, 0.97)
# Late positions behave alike enough to share a cell: 9-12, and 13 on.
_POSITION_CELL = (0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 9)
_POSITIONS = 10
_CELLS = _POSITIONS + len(_CONFIDENCE_PRIOR)


class AcceptanceTable:
    """
    Estimates of one request.

    Attributes:
        context: `COLD`, `WARM`, `HOT` or `STREAK`.
    """

    __slots__ = ("_hits", "_misses", "_priors", "_right_in_row", "_shadow_cells", "_shadow_ids", "context")

    def __init__(self) -> None:
        self.context = WARM
        self._right_in_row = 0
        self._hits = [0.0] * (CONTEXTS * _CELLS)
        self._misses = [0.0] * (CONTEXTS * _CELLS)
        self._priors = [p for unsure in PRIOR_UNSURE for p in (*(unsure,) * _POSITIONS, *_CONFIDENCE_PRIOR)]
        self._shadow_ids: Sequence[TokenId] = ()
        self._shadow_cells: Sequence[int] = ()

    def cells(self, count: int, confidences: Sequence[float] | None) -> list[int]:
        """The cells that *count* proposed tokens fall into."""
        base = self.context * _CELLS
        if confidences is None or len(confidences) < count:
            last = len(_POSITION_CELL) - 1
            return [base + _POSITION_CELL[i if i < last else last] for i in range(count)]
        base += _POSITIONS
        return [base + bisect_right(CONFIDENCE_EDGES, confidences[i]) for i in range(count)]

    def chance(self, cell: int) -> float:
        """The estimate of a cell."""
        hits = self._hits[cell] + PRIOR_WEIGHT * self._priors[cell]
        return hits / (self._hits[cell] + self._misses[cell] + PRIOR_WEIGHT)

    def survival(self, cells: Sequence[int]) -> list[float]:
        """For each position the chance that it and all before it are accepted."""
        chances = []
        survives = 1.0
        hits, misses, priors = self._hits, self._misses, self._priors
        for cell in cells:
            hit = hits[cell]
            survives *= (hit + PRIOR_WEIGHT * priors[cell]) / (hit + misses[cell] + PRIOR_WEIGHT)
            chances.append(survives)
        return chances

    def learn(self, token_ids: Sequence[TokenId], cells: Sequence[int], chosen: Sequence[TokenId]) -> int:
        """
        Compare a proposal, checked or not, with what the target *chose* in its place.

        Returns:
            How many leading tokens of the proposal are known to be right.
        """
        self._follow_shadow(chosen)
        if not token_ids:
            return 0
        right = self._compare(token_ids, cells, chosen)
        if right == len(chosen) < len(token_ids) and not self._shadow_ids:
            self._shadow_ids, self._shadow_cells = token_ids[right:], cells[right:]
        if right == min(len(chosen), len(token_ids)):
            self._right_in_row += right
            self.context = STREAK if self._right_in_row >= STREAK_TOKENS else HOT
        else:
            self._right_in_row = 0
            self.context = WARM if right else COLD
        return right

    def _follow_shadow(self, chosen: Sequence[TokenId]) -> None:
        """The rest of an earlier proposal that was right as far as the target had got."""
        ids, cells = self._shadow_ids, self._shadow_cells
        if ids:
            right = self._compare(ids, cells, chosen)
            goes_on = right == len(chosen) < len(ids)
            self._shadow_ids, self._shadow_cells = (ids[right:], cells[right:]) if goes_on else ((), ())

    def _compare(self, token_ids: Sequence[TokenId], cells: Sequence[int], chosen: Sequence[TokenId]) -> int:
        right = 0
        for token, cell, actual in zip(token_ids, cells, chosen, strict=False):
            self._hits[cell] *= FORGET
            self._misses[cell] *= FORGET
            if token != actual:
                self._misses[cell] += 1
                break
            self._hits[cell] += 1
            right += 1
        return right
