"""Which rows a step computes, by hand."""

import pytest

from power_core.scheduler.plan import make_plan
from power_core.target import SessionOptions
from power_core.testing import one_class, two_classes
from scheduler.sequences import make_sequence


class Session:
    """A session as a plan sees it: a profile, and how much it holds of each sequence."""

    def __init__(self, profile, *, max_rows=16, context_size=100):
        self.profile = profile(SessionOptions(max_rows=max_rows))
        self.context_size = context_size
        self.held = {}

    def length(self, seq):
        return self.held[seq]


def in_flight(session, *, prompt=4, held=None, emitted=1, **kwargs):
    """A sequence with *emitted* tokens after its prompt, all but the last of them held unless told otherwise."""
    sequence = make_sequence(tuple(range(prompt)), **kwargs)
    sequence.sampler.history += [9] * emitted
    sequence.seq = len(session.held)
    session.held[sequence.seq] = prompt + emitted - 1 if held is None else held
    return sequence


def plan_of(session, *sequences, chunk=256, prefer_prefill=False):
    return make_plan(sequences, session, prefill_chunk=chunk, prefer_prefill=prefer_prefill)


def rows(plan):
    """(base, known, samples, limit) of each member."""
    return [(m.base, m.known, m.samples, m.limit) for m in plan.members]


def test_nothing_in_flight_is_no_plan():
    assert plan_of(Session(one_class())) is None


def test_a_decoding_request_has_its_anchor_and_room_for_its_proposal():
    session = Session(one_class())
    plan = plan_of(session, in_flight(session, draft_max=4))
    assert rows(plan) == [(4, 1, True, 4)]
    assert (plan.shape, plan.room) == (session.profile.decode, 15)


@pytest.mark.parametrize(
    ("kwargs", "limit"),
    [
        ({"draft_max": 3}, 3),
        ({"draft_max": 99}, 15),
        ({"max_tokens": 5, "emitted": 1}, 3),
        ({"max_tokens": 2, "emitted": 1}, 0),
        ({"max_tokens": 1, "emitted": 1}, 0),
        ({"prompt": 95, "emitted": 2}, 3),
        ({"prompt": 95, "emitted": 5}, 0),
    ],
)
def test_a_proposal_fits_the_step_the_answer_and_the_context(kwargs, limit):
    """The last token of an answer needs no proposal, and the last of a context no row."""
    session = Session(one_class(128))
    plan = plan_of(session, in_flight(session, **{"draft_max": 9, **kwargs}))
    assert plan.members[0].limit == limit


@pytest.mark.parametrize("guard", [0, 1, 2, 9])
def test_a_guard_bounds_a_proposal(guard):
    """After a replay a request proposes no more than the window holds."""
    session = Session(one_class())
    sequence = in_flight(session, draft_max=4)
    sequence.guard = guard
    assert plan_of(session, sequence).members[0].limit == min(guard, 4)


def test_rows_pending_after_a_replay_are_shared_with_the_others():
    """What the first cannot use is left to those after it, and nothing is chosen before all pending rows are in."""
    session = Session(one_class(), max_rows=8)
    many, few = in_flight(session, emitted=7, held=4), in_flight(session, emitted=3, held=4)
    plan = plan_of(session, many, few)
    assert rows(plan) == [(4, 4, False, 0), (4, 3, True, 1)]
    assert plan.room == 1
    assert rows(plan_of(session, few, many)) == [(4, 3, True, 0), (4, 5, False, 0)]


def test_more_requests_than_rows_take_turns():
    """Whoever has no row in this step has none of the plan; the rows that there are go to the later ones."""
    session = Session(one_class(), max_rows=2)
    sequences = [in_flight(session) for _ in range(3)]
    plan = plan_of(session, *sequences)
    assert [member.sequence for member in plan.members] == sequences[1:]
    assert plan.room == 0


def test_a_prompt_is_evaluated_in_chunks():
    """At most a chunk, at most the class; the last one chooses a token."""
    session = Session(one_class(8))
    for held, chunk, expected in (
        (0, 3, (0, 3, False)),
        (0, 99, (0, 8, False)),
        (9, 3, (9, 3, True)),
        (10, 3, (10, 2, True)),
    ):
        sequence = in_flight(session, prompt=12, emitted=0, held=held)
        plan = plan_of(session, sequence, chunk=chunk)
        assert rows(plan) == [(*expected, 0)]
        assert plan.shape == session.profile.prefill


def test_prompts_share_a_chunk_first_come_first_served():
    """The second begins with what the first leaves, and the third waits."""
    session = Session(one_class(8))
    sequences = [in_flight(session, prompt=5, emitted=0, held=0) for _ in range(3)]
    assert rows(plan_of(session, *sequences)) == [(0, 5, True, 0), (0, 3, False, 0)]


def test_generated_rows_leave_prompts_half_of_a_narrow_forward():
    """Two decoding requests want nine rows in all, of eight they get four; the prompt gets what is not asked for."""
    session = Session(one_class(8))
    decoding = [in_flight(session, draft_max=most) for most in (1, 8)]
    prompt = in_flight(session, prompt=20, emitted=0, held=0)
    plan = plan_of(session, *decoding, prompt)
    assert rows(plan) == [(4, 1, True, 1), (4, 1, True, 2), (0, 4, False, 0)]
    assert (plan.shape, plan.room) == (session.profile.prefill, 2)
    decoding[1].draft_max = 0
    assert rows(plan_of(session, *decoding, prompt)) == [(4, 1, True, 1), (4, 1, True, 0), (0, 5, False, 0)]
    assert rows(plan_of(session, *decoding, prompt, chunk=2))[2] == (0, 2, False, 0)


def test_as_many_decoding_requests_as_rows_leave_no_prompt_a_row_of_theirs():
    """A forward no wider than there are anchors is not shared: then the kinds take turns."""
    session = Session(one_class(2))
    decoding = [in_flight(session) for _ in range(2)]
    prompt = in_flight(session, prompt=20, emitted=0, held=0)
    assert [m.sequence for m in plan_of(session, *decoding, prompt).members] == decoding
    assert [m.sequence for m in plan_of(session, *decoding, prompt, prefer_prefill=True).members] == [prompt]
    assert plan_of(session, *decoding, in_flight(session), prompt).shape == session.profile.decode
    wider = Session(one_class(3))
    wider.held = session.held
    assert rows(plan_of(wider, *decoding, prompt)) == [(4, 1, True, 0), (4, 1, True, 0), (0, 1, False, 0)]


def test_two_classes_take_turns():
    """Generated rows and prompt rows are never in one forward; a prompt alone need not be preferred."""
    session = Session(two_classes(8))
    decoding, prompt = in_flight(session), in_flight(session, prompt=40, emitted=0, held=0)
    profile = session.profile
    for prefer, shape, member in ((False, profile.decode, decoding), (True, profile.prefill, prompt)):
        plan = plan_of(session, decoding, prompt, prefer_prefill=prefer)
        assert (plan.shape, [m.sequence for m in plan.members]) == (shape, [member])
    assert (plan_of(session, prompt).shape, plan_of(session, prompt).room) == (profile.prefill, 0)
    assert plan_of(session, decoding, prefer_prefill=True).shape == profile.decode


@pytest.mark.parametrize("count", [1, 2, 3])
def test_policies_are_told_of_the_rows_beside(count):
    """All pending rows of the step but the request's own."""
    session = Session(one_class())
    sequences = [in_flight(session) for _ in range(count)]
    told = []
    for sequence in sequences:
        sequence.width.limit = lambda room, beside=0, *_: told.append((room, beside)) or 0
    plan_of(session, *sequences)
    assert told == [(4, count - 1)] * count


def test_a_long_context_is_counted_like_a_short_one():
    """Anchor, proposal and last chunk at positions far from the beginning."""
    session = Session(one_class(), context_size=1000)
    assert rows(plan_of(session, in_flight(session, prompt=401))) == [(401, 1, True, 4)]
    prompt = in_flight(session, prompt=401, emitted=0, held=399)
    assert rows(plan_of(session, prompt)) == [(399, 2, True, 0)]


def test_shares_are_whole_rows():
    """Of eight rows among three, and of half of seven, nothing is lost and nothing split."""
    session = Session(one_class(7), max_rows=8)
    behind = [in_flight(session, emitted=9, held=4) for _ in range(3)]
    assert rows(plan_of(session, *behind)) == [(4, 2, False, 0), (4, 3, False, 0), (4, 3, False, 0)]
    decoding, prompt = in_flight(session), in_flight(session, prompt=20, emitted=0, held=0)
    plan = plan_of(session, decoding, prompt)
    assert (rows(plan), plan.room) == ([(4, 1, True, 2), (0, 4, False, 0)], 2)
