"""Rows of one step shared out by expected gain."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_core.scheduler.sharing import share_rows

CHANCES = st.lists(st.floats(0.01, 1), min_size=4, max_size=4).map(lambda chances: sorted(chances, reverse=True))


def test_everyone_gets_what_is_wanted_where_it_fits():
    assert share_rows([2, 0, 3], [[], [], []], room=5) == [2, 0, 3]


def test_members_without_estimates_share_alike():
    assert share_rows([8, 8, 8], [(), (), ()], room=6) == [2, 2, 2]


def test_no_room_gives_nobody_a_row():
    assert share_rows([3, 3], [(), ()], room=0) == share_rows([3, 3], [(), ()], room=-1) == [0, 0]


@given(
    wanted=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    chances=st.lists(CHANCES, min_size=3),
    room=st.integers(0, 9),
)
def test_no_other_shares_are_expected_to_use_more_rows(wanted, chances, room):
    """Against every way to share."""

    def used(shares):
        return sum(sum(chances[i][:share]) for i, share in enumerate(shares))

    shares = share_rows(wanted, chances, room)
    ways = itertools.product(*(range(most + 1) for most in wanted))
    assert all(0 <= share <= most for share, most in zip(shares, wanted, strict=True))
    assert sum(shares) <= room or sum(shares) == sum(wanted)
    assert used(shares) >= max(used(way) for way in ways if sum(way) <= room) - 1e-9


@pytest.mark.parametrize(
    ("wanted", "chances", "room", "expected"),
    [
        ([3], [[0.9, 0.8, 0.7]], 2, [2]),
        ([2, 2], [[0.9, 0.1], [0.8, 0.7]], 3, [1, 2]),
        ([2, 2], [[0.1, 0.05], [0.9, 0.8]], 1, [0, 1]),
        ([0, 2], [[0.9, 0.9], [0.2, 0.1]], 1, [0, 1]),
        ([1, 3], [[0.9], [0.8, 0.7, 0.6]], 2, [1, 1]),
        ([2, 2], [[0.6, 0.6], [0.6, 0.6]], 2, [2, 0]),
        ([2, 2], [[], [0.6, 0.2]], 2, [1, 1]),
        ([2, 2], [[], [0.51, 0.24]], 3, [2, 1]),
        ([1, 1], [[], [0.6]], 1, [0, 1]),
        ([3, 1], [[], [0.15]], 3, [2, 1]),
        ([2, 2], [[0.9], [0.3, 0.26]], 2, [1, 1]),
        ([2, 2], [[0.9], [0.24, 0.2]], 2, [2, 0]),
    ],
)
def test_rows_go_where_they_are_likeliest_to_be_used(wanted, chances, room, expected):
    """Equal chances go to the earlier member; a position nobody knows is worth a half for each up to it."""
    assert share_rows(wanted, chances, room) == expected


def test_what_is_wanted_stays_the_members_own():
    wanted = [1, 2]
    assert share_rows(wanted, [[], []], room=3) is not wanted
