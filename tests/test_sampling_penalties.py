"""The penalty window by itself: what it counts, what it changes, when it is needed."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from power_core.request import SamplingSpec
from power_core.sampling.penalties import PenaltyWindow


@pytest.mark.parametrize(
    ("changes", "is_needed"),
    [
        ({}, False),
        ({"repeat_penalty": 1.1}, True),
        ({"repeat_penalty": 0.9}, True),
        ({"presence_penalty": 0.5}, True),
        ({"presence_penalty": -1.0}, True),
        ({"presence_penalty": 1.0}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"frequency_penalty": -1.0}, True),
        ({"frequency_penalty": 1.0}, True),
        ({"repeat_penalty": 1.1, "penalty_window": 0}, False),
        ({"repeat_penalty": 1.1, "penalty_window": 1}, True),
        ({"repeat_penalty": 1.1, "penalty_window": -1}, True),
    ],
)
def test_a_window_is_needed_where_a_logit_can_change(changes: dict[str, float], is_needed: bool) -> None:
    """One penalty that is not neutral is enough, and none is where the window holds nothing."""
    assert PenaltyWindow.is_needed(SamplingSpec(**{"penalty_window": 64, **changes})) is is_needed  # type: ignore[arg-type] # by name


@pytest.mark.parametrize("window", [-1, 0, 1, 2, 3, 5, 9])
@pytest.mark.parametrize("num_prompt", [0, 1, 2, 3, 5])
def test_counts_follow_the_window_forth_and_back(window: int, num_prompt: int) -> None:
    """After every push and pop the counts are those of the last tokens of the history."""
    tokens = [0, 1, 0, 2, 1, 1, 0, 2]
    history = tokens[:num_prompt]
    spec = SamplingSpec(frequency_penalty=1.0, penalty_window=window)
    penalties = PenaltyWindow(spec, history)

    def expected() -> dict[int, int]:
        return dict(Counter(history if window < 0 else history[max(0, len(history) - window) :]))

    assert penalties._counts == expected()
    for token in tokens[num_prompt:]:
        history.append(token)
        penalties.push()
        assert penalties._counts == expected()
    while len(history) > num_prompt:
        penalties.pop()
        history.pop()
        assert penalties._counts == expected()


def test_the_three_penalties_by_hand() -> None:
    """A positive logit is divided, any other multiplied, then count and presence are taken off; others stay."""
    spec = SamplingSpec(repeat_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    row = np.array([4.0, 1.0, -4.0, 0.0, 3.0, -math.inf, -3.0], np.float32)
    PenaltyWindow(spec, [0, 1, 1, 1, 2, 3, 5]).apply(row)
    assert row.tolist() == [2 - 0.75, 0.5 - 1.25, -8 - 0.75, -0.75, 3.0, -math.inf, -3.0]


def test_an_empty_history_changes_nothing() -> None:
    """Before the first token there is nothing to penalise."""
    row = np.array([1.0, -1.0], np.float32)
    PenaltyWindow(SamplingSpec(repeat_penalty=2.0), []).apply(row)
    assert row.tolist() == [1.0, -1.0]


def test_a_logit_beyond_float32_becomes_minus_infinity() -> None:
    """The largest negative float32 excludes a token for some backends; a penalty on it is no warning."""
    row = np.array([float(np.finfo(np.float32).min), 1.0], np.float32)
    PenaltyWindow(SamplingSpec(repeat_penalty=2.0), [0]).apply(row)
    assert row.tolist() == [-math.inf, 1.0]
