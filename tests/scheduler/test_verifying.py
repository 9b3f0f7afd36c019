"""Verification by itself: which rows are read, what counts as accepted, where it ends."""

import pytest

from power_core.scheduler.verifying import choose
from power_core.types import FinishReason
from scheduler.sequences import make_member, make_sequence

FAR = 100


@pytest.mark.parametrize(
    ("proposal", "choices", "accepted"),
    [
        ((), (5,), 0),
        ((5,), (6,), 0),
        ((5,), (4,), 0),
        ((5,), (5, 6), 1),
        ((5, 6, 7), (5, 9), 1),
        ((5, 6, 7), (5, 6, 9), 2),
        ((5, 6, 7), (5, 6, 7, 8), 3),
        ((5, 6, 7), (9,), 0),
        ((int("70000"),), (int("70000"), 8), 1),  # equal, and not one object
    ],
)
def test_tokens_are_chosen_up_to_the_first_mismatch(proposal, choices, accepted):
    """One token more than was accepted, each from the row that follows the one before it."""
    for start in (10, 11):
        sequence = make_sequence(choices=choices)
        member = make_member(sequence, known=2, proposal=proposal)
        member.start = start
        choose(member, FAR)
        assert (member.chosen, member.accepted, member.finish) == ([*choices], accepted, None)
        assert member.texts == [str(token) for token in choices]
        assert sequence.sampler.read == [*range(start + 1, start + 1 + len(choices))]
        assert member.kept == 2 + accepted


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_stop_ends_a_block_wherever_it_falls(at):
    """Also where the proposal was right further on; the token that stops is accepted all the same."""
    for sequence in (
        make_sequence(choices=(5, 6, 7, 8), stop=4 + at),
        make_sequence(choices=(5, 6, 7, 8), complete_at=at),
    ):
        member = make_member(sequence, proposal=(5, 6, 7))
        choose(member, FAR)
        assert (member.finish, len(member.chosen), member.accepted) == (FinishReason.STOP, at, at)


@pytest.mark.parametrize("limit", [{"max_tokens": 2}, {}])
def test_a_length_ends_a_block_wherever_it_falls(limit):
    """The request's tokens or the context's; a stop that falls together with it is a stop."""
    size = FAR if limit else 4  # the last token of a full context is never evaluated
    member = make_member(make_sequence(choices=(5, 6, 7, 8), **limit), proposal=(5, 6, 7))
    choose(member, size)
    assert (member.finish, member.chosen, member.accepted) == (FinishReason.LENGTH, [5, 6], 2)
    member = make_member(make_sequence(choices=(5, 6, 7, 8), stop=6, **limit), proposal=(5, 6, 7))
    choose(member, size)
    assert member.finish is FinishReason.STOP
