"""Running estimates of acceptance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_core.scheduler.acceptance import COLD, HOT, STREAK, STREAK_TOKENS, WARM, AcceptanceTable

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
