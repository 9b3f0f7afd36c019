"""A request's own accounts: where it ends, what a step takes of it, what a commit cuts off."""

from types import SimpleNamespace

import pytest

from power_core.drafter import DrafterRequirements, HiddenRows
from power_core.errors import BackendError
from power_core.scheduler.sequence import Clock, Member
from power_core.target import RowBatch
from power_core.types import FinishReason
from scheduler.sequences import make_member, make_sequence

LENGTH = FinishReason.LENGTH


class Session:
    """A target session that remembers what was asked of it."""

    def __init__(self, *, capacity=None, truncates=True, restores=True, fails_to_close=False):
        self.rollback_capacity = capacity
        self.calls = []
        self.held = {}
        self._truncates, self._restores, self._fails = truncates, restores, fails_to_close

    def open(self, seq):
        self.calls.append("open")
        self.held[seq] = 0

    def close(self, seq):
        self.calls.append("close")
        del self.held[seq]
        if self._fails:
            raise BackendError("lost", who="target")

    def length(self, seq):
        return self.held[seq]

    def checkpoint(self, seq, rows):
        self.calls.append(("checkpoint", rows))
        return self.held[seq]

    def can_truncate(self, seq, length):
        self.asked = length
        return self._truncates

    def truncate(self, seq, length):
        self.calls.append(("truncate", length))
        self.held[seq] = length

    def can_restore(self, seq, checkpoint):
        return self._restores

    def restore(self, seq, checkpoint):
        self.calls.append(("restore", checkpoint))
        self.held[seq] = checkpoint


def in_step(session, *, accepted, proposal=(5, 6, 7), limit=4, finish=None):
    """A sequence with two rows in *session*, one step of four rows later."""
    sequence = make_sequence((1, 2, 3), choices=(5, 6, 7, 8))
    sequence.seq = 0
    sequence.bind(session, None)
    session.held[0] = 2
    member = make_member(sequence, proposal=proposal)
    member.limit, member.accepted, member.finish = limit, accepted, finish
    sequence.decoder.checkpoint = sequence.sampler.checkpoint = lambda: None
    sequence.begin_step(member)
    session.held[0] += 1 + len(proposal)
    session.calls.clear()
    return sequence, member


@pytest.mark.parametrize(
    ("max_tokens", "emitted", "context", "expected"),
    [
        (None, 1, 4, None),
        (None, 2, 4, LENGTH),
        (None, 3, 4, LENGTH),
        (3, 2, 99, None),
        (3, 3, 99, LENGTH),
        (3, 4, 99, LENGTH),
        (3, 2, 4, LENGTH),
    ],
)
def test_an_answer_ends_with_its_last_token_or_one_past_a_full_context(max_tokens, emitted, context, expected):
    sequence = make_sequence((1, 2, 3), max_tokens=max_tokens)
    sequence.sampler.history += [9] * emitted
    assert sequence.num_emitted == emitted
    assert sequence.limit_reached(context) is expected


@pytest.mark.parametrize(
    ("keep_at", "base", "room", "rows"),
    [
        ([], 0, 99, 10),
        ([], 4, 99, 6),
        ([], 0, 3, 3),
        ([4, 8], 0, 99, 4),
        ([4, 8], 4, 99, 4),
        ([4, 8], 8, 99, 2),
        ([4], 0, 3, 3),
    ],
)
def test_a_chunk_ends_where_state_is_to_be_kept(keep_at, base, room, rows):
    """At the next such place, which is not where it begins."""
    sequence = make_sequence(tuple(range(10)))
    sequence.keep_at = keep_at
    assert sequence.chunk(base, room) == rows


def test_rows_of_a_member_are_pending_tokens_and_its_proposal():
    """All rows that choose a token are read back, and none of a chunk that chooses none."""
    sequence = make_sequence((1, 2, 3, 4))
    sequence.seq = 5
    batch = RowBatch(16)
    batch.add_chain(0, 0, [0], 0)
    member = make_member(sequence, base=2, known=2, proposal=(8, 9))
    assert (member.add_rows(batch), member.start) == (3, 1)
    assert batch.tokens[1:5].tolist() == [3, 4, 8, 9]
    assert batch.positions[1:5].tolist() == [2, 3, 4, 5]
    assert batch.outputs[:5].tolist() == [False, False, True, True, True]
    assert make_member(sequence, base=3, proposal=(8, 9, 8)).add_rows(RowBatch(8)) == 4
    assert Member(sequence, 1, 2, samples=False).add_rows(batch) == 0
    assert batch.tokens[5 : batch.n].tolist() == [2, 3]


def test_a_forward_is_counted_for_each_that_took_part():
    """Time of prompt rows is prefill; a proposal is one however long."""
    sequence = make_sequence((1, 2, 3))
    Member(sequence, 0, 2, samples=False).count_pass(8, 0.5)
    Member(sequence, 2, 1, samples=True).count_pass(8, 0.25)
    make_member(sequence, base=4, proposal=(5, 6)).count_pass(4, 0.125)
    counts = sequence.counts
    assert (counts.target_passes, counts.prefill_passes, counts.rounds) == (3, 1, 2)
    assert (counts.proposals, counts.drafted, counts.widths) == (1, 2, {8: 2, 4: 1})
    assert sequence.clock.prefill_s == 0.75


@pytest.mark.parametrize(
    ("kwargs", "calls"),
    [
        ({"accepted": 3}, []),
        ({"accepted": 1, "finish": FinishReason.STOP}, []),
        ({"accepted": 2}, [("truncate", 5)]),
        ({"accepted": 1}, [("truncate", 4)]),
        ({"accepted": 0}, [("truncate", 3)]),
        ({"accepted": 0, "proposal": ()}, []),
    ],
)
def test_a_commit_cuts_off_what_was_rejected(kwargs, calls):
    """Nothing where nothing was, or where the sequence ends."""
    session = Session()
    sequence, member = in_step(session, **kwargs)
    sequence.target.commit(member.kept)
    assert (session.calls, member.replayed, sequence.guard) == (calls, False, None)
    assert [("truncate", session.asked)] == calls if calls else not hasattr(session, "asked")


@pytest.mark.parametrize(("capacity", "guard"), [(2, 2), (0, 0), (None, 0)])
def test_a_cut_beyond_the_window_goes_back_and_bounds_what_follows(capacity, guard):
    """To the checkpoint; the kept rows are pending again, and the next proposals stay in the window."""
    session = Session(capacity=capacity, truncates=False)
    sequence, member = in_step(session, accepted=1)
    sequence.target.commit(member.kept)
    assert session.calls == [("restore", 2)]
    assert (member.replayed, sequence.guard, sequence.counts.replays, sequence.counts.rebuilds) == (True, guard, 1, 0)


def test_without_a_way_back_a_sequence_starts_over():
    """Closed, opened and empty: all its tokens are pending again."""
    session = Session(truncates=False, restores=False)
    sequence, member = in_step(session, accepted=1)
    sequence.target.commit(member.kept)
    assert (session.calls, session.held) == (["close", "open"], {0: 0})
    assert (sequence.counts.replays, sequence.counts.rebuilds) == (1, 1)


def test_a_restore_goes_back_only_from_where_it_has_got_to():
    """Also where a commit broke off between closing the sequence and opening it again."""
    session = Session()
    sequence, member = in_step(session, accepted=1)
    mark = member.transaction.checkpoint_of(sequence.target)
    sequence.target.restore(mark)
    sequence.target.restore(mark)
    assert session.calls == [("restore", 2)]
    sequence.close(session)
    sequence.target.restore(mark)
    assert session.held == {0: 0}


def test_a_long_sequence_that_is_where_it_was_is_left_alone():
    """Positions are compared by value."""
    session = Session()
    sequence, _ = in_step(session, accepted=1)
    member = make_member(sequence, base=int("700"))
    sequence.begin_step(member)
    session.held[0] = int("700")
    session.calls.clear()
    sequence.target.restore(member.transaction.checkpoint_of(sequence.target))
    assert session.calls == []


def test_a_request_begins_with_nothing():
    """No sequence, no draft, nothing held, kept, counted or chosen; so does its part of a step."""
    sequence = make_sequence()
    assert (sequence.seq, sequence.draft, sequence.backlog, sequence.guard, sequence.keep_at) == (-1, None, 0, None, [])
    assert (sequence.held, sequence.evaluated_prompt, sequence.cache_key) == (0, 0, None)
    assert (sequence.is_open, sequence.is_lost, sequence.cancelled) == (False, False, False)
    member = Member(sequence, 0, 1, samples=True)
    assert (member.limit, member.start, member.accepted, member.proposal, member.chosen) == (0, 0, 0, [], [])
    assert (member.replayed, member.recorded, member.finish) == (False, False, None)


def test_a_checkpoint_covers_all_rows_the_step_may_have():
    session = Session()
    sequence, member = in_step(session, accepted=0, limit=3)
    sequence.begin_step(member)
    assert session.calls == [("checkpoint", 4)]


def test_a_sequence_is_closed_once_and_lost_where_that_fails():
    """Nobody knows what is held under its id then, so it is not opened again."""
    session = Session(fails_to_close=True)
    sequence = make_sequence()
    sequence.bind(session, None)
    with pytest.raises(BackendError):
        sequence.release(session)
    assert (sequence.is_lost, sequence.is_open) == (True, False)
    sequence.close(session)
    assert session.calls == ["open", "close"]
    with pytest.raises(BackendError, match="may still be in use"):
        sequence.open(session)


def test_a_draft_that_fails_to_end_loses_the_sequence_too():
    """Both are given back whatever the first raises, and the draft only once."""
    session = Session()
    ended = []

    def end(seq):
        ended.append(seq)
        raise BackendError("stuck", who="draft")

    draft = SimpleNamespace(
        session=SimpleNamespace(begin=lambda *_: None, end=end), call=lambda call, *args: call(*args)
    )
    sequence = make_sequence()
    sequence.bind(session, draft)
    with pytest.raises(BackendError):
        sequence.release(session)
    sequence.release(session)
    assert (ended, session.calls, sequence.is_lost, sequence.draft) == ([-1], ["open", "close"], True, None)


def test_timings_are_differences_of_marks():
    """Before the first token nothing was decoded."""
    clock = Clock()
    clock.submitted, clock.prefill_s, clock.finished = 10.0, 1.5, 17.0
    assert (clock.timings().ttft_s, clock.timings().decode_s, clock.timings().request_s) == (None, 0.0, 7.0)
    clock.first_token = 12.0
    timings = clock.timings()
    assert (timings.ttft_s, timings.prefill_s, timings.decode_s, timings.request_s) == (2.0, 1.5, 5.0, 7.0)
    clock.finished = None
    assert clock.timings().request_s == pytest.approx(clock.timings().decode_s + 2.0, abs=0.5)


class DraftSession:
    """A draft that writes down what it is told."""

    def __init__(self):
        self.told = []

    def begin(self, seq, tokens):
        self.told.append(("begin", seq, [*tokens]))

    def checkpoint(self, seq):
        return f"draft of {seq}"

    def observe(self, seq, committed, rows):
        place = None if rows is None else (rows.start, rows.count, rows.position)
        self.told.append((seq, [*committed], place))

    def restore(self, seq, retained):
        self.told.append(("restore", seq, retained))


def drafted(*, layers=(1,)):
    """A sequence with a draft, and the draft."""
    session = DraftSession()
    draft = SimpleNamespace(
        session=session, needs=DrafterRequirements(hidden_layers=layers), call=lambda call, *args: call(*args)
    )
    sequence = make_sequence((1, 2, 3))
    sequence.seq = 6
    sequence.bind(Session(), draft)
    assert session.told.pop() == ("begin", 6, [1, 2, 3])
    return sequence, session


def committed(sequence, *, base, n, start=0, chosen=(), has_rows=True):
    """Commit *n* rows from *base* on, which began at row *start* of the batch."""
    member = make_member(sequence, base=base)
    member.start, member.chosen = start, [*chosen]
    member.rows = member.rows if has_rows else None
    sequence.target.planned = member
    sequence.drafting.commit(n)


def test_a_draft_commits_after_the_target_and_before_what_is_chosen_with():
    """What it may raise must find the target's rows where they can be restored."""
    sequence, _ = drafted()
    target, drafting = sequence.target, sequence.drafting
    assert sequence._participants == [target, drafting, sequence.sampler, sequence.decoder]


def test_a_draft_is_told_of_tokens_and_of_rows_where_it_reads_them():
    """Rows of a prompt as well, which choose no token; nothing where there is neither."""
    sequence, session = drafted()
    committed(sequence, base=0, n=2, start=5)
    committed(sequence, base=2, n=3, start=4, chosen=(7, 8))
    assert session.told == [(6, [], (5, 2, 0)), (6, [7, 8], (4, 3, 2))]
    sequence, session = drafted(layers=())
    committed(sequence, base=0, n=2)
    committed(sequence, base=2, n=3, chosen=(7, 8))
    assert session.told == [(6, [7, 8], None)]


def test_rows_that_are_evaluated_again_are_not_told_twice():
    """After a replay only those beyond what the draft has seen; tokens are told in any case."""
    sequence, session = drafted()
    committed(sequence, base=0, n=5, start=1)
    session.told.clear()
    committed(sequence, base=2, n=3, start=9, chosen=(4,))
    committed(sequence, base=2, n=2, start=9)
    committed(sequence, base=2, n=6, start=9, chosen=(5,))
    committed(sequence, base=8, n=1, start=0, chosen=(6,), has_rows=False)
    assert session.told == [(6, [4], None), (6, [5], (12, 3, 5)), (6, [6], None)]
    committed(sequence, base=9, n=1, start=0, chosen=(3,))
    assert session.told[-1] == (6, [3], (0, 1, 9))


def test_rows_that_a_hit_brought_are_not_told_twice():
    """The last three of those before position 8: a step that goes back to 6 has two rows that the draft knows."""
    sequence, session = drafted()
    sequence.drafting.tell_reused(HiddenRows(None, 2, 3, 5))
    committed(sequence, base=6, n=4, start=1)
    assert session.told == [(6, [], (2, 3, 5)), (6, [], (3, 2, 8))]


def test_a_restored_draft_has_seen_what_it_had_when_the_step_opened():
    sequence, session = drafted()
    committed(sequence, base=0, n=3)
    mark = sequence.drafting.checkpoint()
    committed(sequence, base=3, n=2, chosen=(4,))
    sequence.drafting.restore(mark)
    assert session.told[-1] == ("restore", 6, "draft of 6")
    committed(sequence, base=3, n=1, chosen=(5,))
    assert session.told[-1] == (6, [5], (0, 1, 3))
