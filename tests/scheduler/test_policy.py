"""The fixed and the adaptive policy (R6)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_core.errors import ConfigError
from power_core.scheduler.policy import AdaptivePolicy, DraftShape, FixedPolicy, Round

WIDE = DraftShape(draft_max=7, rollback=6, strategy="s")


def test_fixed_asks_for_k_whatever_comes_back():
    width = FixedPolicy().begin(DraftShape(draft_max=5))
    for outcome in (Round(5, 0), Round(5, 5), Round(5, 1, replayed=True)):
        assert (width.limit(9), width.limit(3), width.trim([1, 2, 3], None)) == (5, 3, 3)
        width.feedback(outcome)


def test_fixed_takes_its_own_length_below_k():
    assert FixedPolicy(3).begin(DraftShape(draft_max=8)).limit(8) == 3
    assert FixedPolicy(9).begin(DraftShape(draft_max=8)).limit(8) == 8


def test_adaptive_starts_inside_the_rollback_window():
    """min(K, S); without a window K."""
    assert AdaptivePolicy().begin(WIDE).limit(7) == 6
    assert AdaptivePolicy().begin(DraftShape(draft_max=7)).limit(7) == 7


def test_adaptive_opens_the_wide_shape_after_a_fully_accepted_first_round():
    width = AdaptivePolicy().begin(WIDE)
    width.feedback(Round(6, 6))
    assert width.limit(7) == 7


def test_adaptive_closes_the_wide_shape_after_a_partly_accepted_first_round():
    """For the whole request: later full rounds do not open it again."""
    width = AdaptivePolicy().begin(WIDE)
    width.feedback(Round(6, 5))
    width.feedback(Round(6, 6))
    assert width.limit(7) == 6


def test_adaptive_keeps_its_shape_through_healthy_partial_rounds():
    width = AdaptivePolicy().begin(WIDE)
    width.feedback(Round(6, 6))
    for _ in range(50):
        width.feedback(Round(7, 2))
        assert width.limit(7) == 7


def test_adaptive_goes_back_to_the_target_for_good_after_sustained_low_yield():
    policy = AdaptivePolicy(min_yield=0.25, patience=4)
    width = policy.begin(WIDE)
    for _ in range(3):
        width.feedback(Round(6, 1))
    width.feedback(Round(6, 3))  # one healthy round begins the count anew
    for _ in range(3):
        width.feedback(Round(6, 0))
        assert width.limit(7) == 6
    width.feedback(Round(6, 1))
    assert width.limit(7) == 0
    width.feedback(Round(6, 6))
    assert width.limit(7) == 0


def test_adaptive_takes_no_replay_as_feedback():
    """Neither as the first round, which decides the shape, nor as a low one."""
    width = AdaptivePolicy(patience=2).begin(WIDE)
    width.feedback(Round(6, 0, replayed=True))
    width.feedback(Round(6, 6))
    assert width.limit(7) == 7
    for _ in range(9):
        width.feedback(Round(7, 0, replayed=True))
    assert width.limit(7) == 7


def test_adaptive_takes_no_empty_round_as_feedback():
    """A drafter without a proposal says nothing about the ones it makes."""
    width = AdaptivePolicy(patience=2).begin(WIDE)
    for _ in range(9):
        width.feedback(Round(0, 0))
        assert width.limit(7) == 6
    width.feedback(Round(6, 6))
    assert width.limit(7) == 7
    for outcome in (Round(1, 0), Round(0, 0), Round(1, 0)):  # nor does it interrupt a row of low ones
        width.feedback(outcome)
    assert width.limit(7) == 0


def test_adaptive_refuses_a_drafter_of_fixed_shape():
    with pytest.raises(ConfigError) as caught:
        AdaptivePolicy().begin(DraftShape(draft_max=7, strategy="blocky", fixed=True))
    assert caught.value.got == "adaptive"
    assert "blocky" in str(caught.value)


@given(
    k=st.integers(0, 12),
    s=st.one_of(st.none(), st.integers(0, 12)),
    rounds=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.booleans(), st.integers(0, 20)), max_size=40),
)
def test_adaptive_uses_two_shapes_and_target_only_and_never_more_than_room(k, s, rounds):
    width = AdaptivePolicy().begin(DraftShape(draft_max=k, rollback=s))
    shapes = {0, k, k if s is None else min(k, s)}
    for drafted, accepted, replayed, room in rounds:
        assert width.limit(room) <= room
        assert width.limit(99) in shapes
        width.feedback(Round(drafted, min(accepted, drafted), replayed=replayed))


def test_adaptive_says_what_it_is_doing():
    """In a word and in a receipt: narrow until the wide shape opens, and target-only at the end."""
    width = AdaptivePolicy(patience=1).begin(WIDE)
    assert (width.mode, width.summary()) == ("narrow", {"width": 6, "target_only": False})
    width.feedback(Round(6, 6))
    assert (width.mode, width.summary()) == ("wide", {"width": 7, "target_only": False})
    width.feedback(Round(7, 0))
    assert (width.mode, width.summary()) == ("target-only", {"width": 7, "target_only": True})


def test_fixed_says_its_length():
    width = FixedPolicy(3).begin(DraftShape(draft_max=8))
    assert (width.mode, width.summary(), [*width.chances]) == ("fixed", {"draft_max": 3}, [])


@pytest.mark.parametrize(("drafted", "accepted", "is_low"), [(8, 1, True), (8, 2, False), (7, 1, True), (4, 1, False)])
def test_adaptive_calls_a_round_low_below_its_yield(drafted, accepted, is_low):
    """A quarter of the proposal is enough; four low rounds in a row are the end unless told otherwise."""
    width = AdaptivePolicy().begin(DraftShape(draft_max=8))
    for _ in range(3):
        width.feedback(Round(drafted, accepted))
    assert width.mode != "target-only"
    width.feedback(Round(drafted, accepted))
    assert (width.mode == "target-only") is is_low


def test_adaptive_takes_a_large_first_round_for_whole():
    """However large: counts are compared by value."""
    width = AdaptivePolicy().begin(DraftShape(draft_max=900, rollback=int("800")))
    width.feedback(Round(int("800"), int("800")))
    assert width.limit(900) == 900
