"""The stages of a draw by themselves, on rows small enough to work out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from power_core.errors import BackendError, RequestError
from power_core.request import SamplingSpec
from power_core.sampling import draw, filters
from power_core.sampling.logprobs import token_logprobs

THIRDS = np.log([0.5, 0.25, 0.125, 0.125])


@pytest.mark.parametrize(
    ("values", "k", "expected"),
    [
        ([1, 3, 2], 1, [1]),
        ([1, 3, 2], 2, [1, 2]),
        ([1, 3, 2], 3, [1, 2, 0]),
        ([1, 3, 2], 9, [1, 2, 0]),
        ([2, 2, 2, 2], 2, [0, 1]),
        ([0, 5, 5, 7, 5], 3, [3, 1, 2]),
        ([-1, -3, -2], 1, [0]),
    ],
)
def test_the_largest_come_first_and_ties_by_index(values: list[float], k: int, expected: list[int]) -> None:
    """Also where fewer are there than wanted."""
    assert filters.largest(np.array(values, np.float32), k).tolist() == expected


@pytest.mark.parametrize("size", [16, 31, 64, 257])
def test_the_largest_are_those_of_a_sort(size: int) -> None:
    """Shuffled numbers, half of them negative, with and without a first pass over columns."""
    for seed in range(5):
        values = np.random.default_rng(seed).permutation(size) - size / 2
        for k in (1, 2, 3, 4, size - 1):
            assert filters.largest(values, k).tolist() == np.argsort(-values).tolist()[:k]


def test_the_largest_need_no_more_than_a_partition_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy orders more than it has to, and not everywhere alike: what is on either side may stand in any order."""

    rng = np.random.default_rng(0)

    def partition(values: Any, kth: int) -> Any:
        ordered = np.sort(values)
        return np.concatenate((rng.permutation(ordered[:kth]), [ordered[kth]], rng.permutation(ordered[kth + 1 :])))

    monkeypatch.setattr(np, "partition", partition)
    for _ in range(8):
        values = rng.permutation(300)
        for k in (1, 2, 5, 12, 40):
            assert filters.largest(values, k).tolist() == np.argsort(-values).tolist()[:k]


@pytest.mark.parametrize("size", [15, 16, 17, 31, 32, 33, 35, 64, 67, 129])
def test_the_largest_are_found_wherever_they_stand(size: int) -> None:
    """A peak at each index, in the rest that no column of the first pass holds too; a tie there goes to the lower."""
    for k in (1, 2, 3):
        for place in range(size):
            values = np.zeros(size)
            values[place] = 1
            others = [i for i in range(size) if i != place]
            assert filters.largest(values, k).tolist() == [place, *others[: k - 1]]


def test_only_what_can_be_drawn_is_kept_by_top_k() -> None:
    """0 keeps all; what is -inf is kept by neither; ids ascend."""
    row = np.array([1, -np.inf, 3, 2], np.float32)
    assert [filters._top_k(row, k).tolist() for k in (0, 1, 2, 3, 4)] == [[0, 2, 3], [2], [2, 3], [0, 2, 3], [0, 2, 3]]


@pytest.mark.parametrize(("mass", "count"), [(0, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.88, 4), (0.99, 4)])
def test_a_nucleus_ends_where_its_mass_is_reached(mass: float, count: int) -> None:
    """Of two equal tokens the one of lower id goes in first."""
    kept = filters._top_p(THIRDS, mass)
    assert kept is not None
    assert kept.tolist() == [0, 1, 2, 3][:count]


def test_typical_prefers_what_is_as_surprising_as_the_average() -> None:
    """The entropy is 1.213 nats: 0.25 (1.386) is nearest, then 0.5 (0.693), then the two of 0.125 (2.079)."""
    sets = [filters._typical(THIRDS, mass) for mass in (0.1, 0.24, 0.26, 0.74, 0.76, 0.9)]
    assert [None if ids is None else ids.tolist() for ids in sets] == [
        [1], [1], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2, 3],
    ]  # fmt: skip


def test_a_whole_mass_and_no_ratio_are_no_filters() -> None:
    """1 keeps tokens however unlikely, which a sum that rounds to 1 before the last would not."""
    row = np.array([0.0, -60.0])
    assert filters._top_p(row, 1) is filters._typical(row, 1) is filters._min_p(row, 0) is None
    spec = SamplingSpec(temperature=1e9, top_p=1.0, typical_p=1.0, min_p=0.0)
    assert {draw(row.astype(np.float32), spec, u) for u in (0.25, 0.75)} == {0, 1}


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.2, [0, 1, 2, 3]), (0.26, [0, 1]), (0.49, [0, 1]), (0.51, [0]), (1, [0])]
)
def test_min_p_is_a_part_of_the_most_likely(ratio: float, expected: list[int]) -> None:
    """A ratio of 1 keeps the best."""
    kept = filters._min_p(THIRDS, ratio)
    assert kept is not None
    assert kept.tolist() == expected


@pytest.mark.parametrize("spread", [0.01, 1, 20, 63, 64, 65, 200])
def test_the_smallest_set_is_that_of_a_sort(spread: float) -> None:
    """Scores inside one bucket, in many, and beyond the last: always the prefix of a full sort."""
    scores = np.random.default_rng(int(spread * 100)).permutation(40) / 39 * -spread
    p = np.full(40, 1 / 64)  # exact sums: 40/64 in all
    order = np.argsort(-scores, kind="stable")
    for count in range(1, 41):
        kept = filters._smallest_set(scores, p, (count - 0.5) / 64)
        assert kept.tolist() == sorted(order[:count])


def test_a_mass_that_rounding_keeps_from_being_reached_keeps_all() -> None:
    """The sum of all ends just below it."""
    assert filters._smallest_set(np.array([0.0, -9.0]), np.array([0.5, 0.25]), 0.76).tolist() == [0, 1]


def test_softmax_and_its_normalizer() -> None:
    """log p = values - log_total, for any offset."""
    for offset in (0.0, 1000.0, -1000.0):
        p, log_total = filters._softmax(THIRDS + offset)
        assert p == pytest.approx([0.5, 0.25, 0.125, 0.125])
        assert log_total == pytest.approx(offset)


@pytest.mark.parametrize(
    ("weights", "u", "expected"),
    [
        ([1, 1, 2], 0.0, 0),
        ([1, 1, 2], 0.24, 0),
        ([1, 1, 2], 0.25, 1),
        ([1, 1, 2], 0.49, 1),
        ([1, 1, 2], 0.5, 2),
        ([1, 1, 2], 1 - 2**-53, 2),
        ([0, 0, 1, 0], 0.0, 2),
        ([0, 1, 0, 0], 0.99, 1),
        ([1, 5e-324, 0], 1 - 2**-53, 0),
        ([3, 2**-53, 0], 1 - 2**-53, 0),
    ],
)
def test_the_inverse_of_the_cumulative_weights(weights: list[float], u: float, expected: int) -> None:
    """The first whose cumulative weight exceeds u of the total; never one of weight 0."""
    assert filters._inverse_cdf(np.array(weights, float), u) == expected


@pytest.mark.parametrize(
    ("row", "error", "what"),
    [
        ([-math.inf, -math.inf], RequestError, "every token is excluded"),
        ([0, math.nan], BackendError, "hold nan"),
        ([math.inf, 0], BackendError, "hold inf"),
    ],
)
@pytest.mark.parametrize(
    "of", [lambda row: draw(row, SamplingSpec(temperature=1), 0.5), lambda row: token_logprobs(row, 0, 1)]
)
def test_a_row_that_no_token_can_be_chosen_from(row: list[float], error: type[Exception], what: str, of: Any) -> None:
    """Whose fault it is decides the error, for a draw and for log-probabilities."""
    with pytest.raises(error, match=what):
        of(np.array(row, np.float32))


@pytest.mark.parametrize(("top", "expected"), [(0, []), (1, [2]), (2, [2, 0]), (3, [2, 0, 1]), (9, [2, 0, 1])])
def test_logprobs_by_hand(top: int, expected: list[int]) -> None:
    """The most likely first, those of probability 0 left out, the chosen one whether listed or not."""
    p = {0: 0.25, 1: 0.125, 2: 0.625}
    row = np.array([math.log(0.25) + 7, math.log(0.125) + 7, math.log(0.625) + 7, -math.inf], np.float32)
    entry = token_logprobs(row, 1, top)
    assert entry.token_id == 1
    assert entry.logprob == pytest.approx(math.log(0.125), abs=1e-6)
    assert [token for token, _ in entry.top] == expected
    assert [value for _, value in entry.top] == pytest.approx([math.log(p[token]) for token in expected], abs=1e-6)
