"""Running estimates of acceptance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_core.scheduler.acceptance import (
    COLD,
    CONFIDENCE_EDGES,
    CONTEXTS,
    FORGET,
    HOT,
    PRIOR_UNSURE,
    PRIOR_WEIGHT,
    STREAK,
    STREAK_TOKENS,
    WARM,
    AcceptanceTable,
)

IDS = st.integers(0, 2)


def learn(table, ids, chosen, confidences=None):
    return table.learn(ids, table.cells(len(ids), confidences), chosen)


def test_a_proposal_nobody_checked_still_teaches():
    """Plain decoding goes on to choose 1 2 3: the proposal was right, token by token."""
    watched, checked = AcceptanceTable(), AcceptanceTable()
    cells = watched.cells(3, None)
    watched.learn([1, 2, 3], cells, [1])
    watched.learn([], [], [2])
    watched.learn([], [], [3])
    checked.learn([1, 2, 3], cells, [1, 2, 3, 4])
    assert [watched.chance(cell) for cell in cells] == [checked.chance(cell) for cell in cells]
    assert watched.chance(cells[2]) > AcceptanceTable().chance(cells[2])


def test_tokens_after_the_first_wrong_one_say_nothing():
    table = AcceptanceTable()
    cells = table.cells(3, None)
    table.learn([1, 2, 3], cells, [9])
    assert table.chance(cells[0]) < AcceptanceTable().chance(cells[0])
    assert table.chance(cells[1]) == AcceptanceTable().chance(cells[1])


def test_contexts_tell_what_the_last_proposal_did():
    table = AcceptanceTable()
    assert table.context == WARM
    learn(table, [1, 2], [9])
    assert table.context == COLD
    learn(table, [1, 2], [1, 2, 3])
    assert table.context == HOT
    learn(table, [*range(STREAK_TOKENS)], [*range(STREAK_TOKENS + 1)])
    assert table.context == STREAK
    learn(table, [1, 2], [1, 9])
    assert table.context == WARM


def test_failures_while_cold_leave_the_hot_estimates_alone():
    """So a drafter that finds its text again is used at once."""
    table = AcceptanceTable()
    learn(table, [1], [9])
    for _ in range(200):
        learn(table, [1], [9])
    assert table.chance(table.cells(1, None)[0]) < 0.02
    learn(table, [1], [1])
    assert table.chance(table.cells(1, None)[0]) == AcceptanceTable().chance(_hot_cell())


def _hot_cell():
    table = AcceptanceTable()
    learn(table, [1], [1])
    return table.cells(1, None)[0]


def test_confidence_is_corrected_where_the_drafter_is_wrong_about_itself():
    table = AcceptanceTable()
    for _ in range(60):
        learn(table, [1, 2], [1, 2, 3], [0.2, 0.2])
    low = table.survival(table.cells(1, [0.2]))[0]
    assert low > 0.9
    for _ in range(60):
        learn(table, [1], [9], [0.99])
    assert table.survival(table.cells(1, [0.99]))[0] < 0.1


@pytest.mark.parametrize("confidences", [None, [0.5] * 6])
@given(
    rounds=st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=1)), max_size=30
    )
)
def test_survival_never_rises_along_a_proposal_and_is_a_chance(confidences, rounds):
    table = AcceptanceTable()
    for ids, chosen in rounds:
        survival = table.survival(table.cells(len(ids), confidences))
        assert all(0 < b <= a <= 1 for a, b in zip([1.0, *survival], survival, strict=False))
        assert learn(table, ids, chosen, confidences) <= min(len(ids), len(chosen))


def test_a_cell_is_a_forgetting_average_that_begins_with_the_prior():
    """(hits + w * prior) / (hits + misses + w), where each observation fades by a factor with each later one."""
    table = AcceptanceTable()
    [cell] = table.cells(1, None)
    prior = PRIOR_UNSURE[WARM]
    assert table.chance(cell) == table.survival([cell])[0] == pytest.approx(prior)
    hits = misses = 0.0
    for right in (True, False, False, True):
        table.context = WARM
        table.learn([1], [cell], [1 if right else 2])
        hits, misses = hits * FORGET + right, misses * FORGET + (not right)
        expected = (hits + PRIOR_WEIGHT * prior) / (hits + misses + PRIOR_WEIGHT)
        assert table.chance(cell) == table.survival([cell])[0] == pytest.approx(expected)


def test_survival_is_the_product_of_chances():
    table = AcceptanceTable()
    cells = table.cells(3, [0.2, 0.6, 0.97])
    learn(table, [1, 2, 3], [1, 2, 9], [0.2, 0.6, 0.97])
    a, b, c = (table.chance(cell) for cell in cells)
    assert table.survival(cells) == pytest.approx([a, a * b, a * b * c])


def test_positions_have_cells_of_their_own_and_late_ones_share():
    """1 to 8 alone, 9 to 12 together, all from 13 on together; none of another context or of a confidence."""
    table = AcceptanceTable()
    seen = []
    for context in range(CONTEXTS):
        table.context = context
        cells = table.cells(20, None)
        assert [cells.index(cell) for cell in cells] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, *[12] * 8]
        assert [table.chance(cell) for cell in cells] == pytest.approx([PRIOR_UNSURE[context]] * 20)
        seen += {*cells} | {*table.cells(9, [0.05, *CONFIDENCE_EDGES])}
    assert sorted(seen) == [*range(CONTEXTS * (10 + 9))]


def test_confidences_fall_into_cells_by_their_edges():
    """An edge belongs to the cell above it; priors rise with the confidence, alike in every context."""
    table = AcceptanceTable()
    below = table.cells(8, [edge - 1e-9 for edge in CONFIDENCE_EDGES])
    at = table.cells(8, CONFIDENCE_EDGES)
    assert [upper - lower for lower, upper in zip(below, at, strict=True)] == [1] * 8
    assert below[1:] == at[:-1]
    priors = [table.chance(cell) for cell in (below[0], *at)]
    assert priors == pytest.approx([0.05, 0.17, 0.32, 0.47, 0.62, 0.75, 0.85, 0.93, 0.97])
    table.context = STREAK
    assert [table.chance(cell) for cell in table.cells(9, [0.05, *CONFIDENCE_EDGES])] == priors


def test_fewer_confidences_than_tokens_are_none():
    table = AcceptanceTable()
    assert table.cells(2, [0.9]) == table.cells(2, None)
    assert table.cells(1, [0.9, 0.1]) == table.cells(1, [0.9]) != table.cells(1, None)


@pytest.mark.parametrize(
    ("ids", "chosen", "right", "context"),
    [
        ([], [1], 0, WARM),
        ([1], [1, 2], 1, HOT),
        ([1, 2], [1, 2], 2, HOT),
        ([1, 2], [1], 1, HOT),
        ([1, 2], [2, 2], 0, COLD),
        ([1, 2], [1, 1], 1, WARM),
        ([1, 2, 3], [1, 2, 9], 2, WARM),
    ],
)
def test_what_a_proposal_did_decides_the_context(ids, chosen, right, context):
    """How much of it is known to be right, and where the target was ahead of nothing of it."""
    table = AcceptanceTable()
    assert learn(table, ids, chosen) == right
    assert table.context == context


def test_a_streak_is_a_number_of_tokens_in_a_row():
    """Over several proposals; one that is wrong anywhere begins the count anew."""
    table = AcceptanceTable()
    for tokens in (STREAK_TOKENS - 1, 1):
        assert table.context != STREAK
        learn(table, [5] * tokens, [5] * (tokens + 1))
    assert table.context == STREAK
    learn(table, [5, 5], [5, 6])
    learn(table, [5] * (STREAK_TOKENS - 1), [5] * STREAK_TOKENS)
    assert table.context == HOT
    learn(table, [5], [5, 5])
    assert table.context == STREAK


def test_a_shadow_is_followed_as_long_as_it_is_right():
    """Tokens chosen later teach its cells one by one, up to the first wrong one and no further."""
    table = AcceptanceTable()
    cells = table.cells(5, None)
    fresh = [table.chance(cell) for cell in cells]

    def told():
        return [
            (table.chance(cell) > before) - (table.chance(cell) < before)
            for cell, before in zip(cells, fresh, strict=True)
        ]

    table.learn([1, 2, 3, 4, 5], cells, [1])
    assert told() == [1, 0, 0, 0, 0]
    table.learn([], [], [2, 3])
    assert told() == [1, 1, 1, 0, 0]
    table.learn([], [], [9])
    assert told() == [1, 1, 1, -1, 0]
    before = [table.chance(cell) for cell in cells]
    table.learn([], [], [4, 5])
    assert [table.chance(cell) for cell in cells] == before


def test_one_shadow_is_followed_at_a_time():
    """A proposal made while an earlier one is still followed leaves that alone."""
    table = AcceptanceTable()
    first = table.cells(3, None)
    table.learn([1, 2, 3], first, [1])
    second = table.cells(3, None)  # another context
    table.learn([2, 7, 7], second, [2])
    before = table.chance(first[2]), table.chance(second[1])
    table.learn([], [], [3])
    assert table.chance(first[2]) > before[0]
    assert table.chance(second[1]) == before[1]


def test_priors_are_chances_that_rise_with_the_context():
    assert 0 < PRIOR_UNSURE[COLD] < PRIOR_UNSURE[WARM] < PRIOR_UNSURE[HOT] < PRIOR_UNSURE[STREAK] < 1


def test_equal_ids_are_equal_however_large():
    """Large integers are objects of their own each time they are made."""
    table = AcceptanceTable()
    assert learn(table, [int("70000"), 2], [int("70000"), 2]) == 2
