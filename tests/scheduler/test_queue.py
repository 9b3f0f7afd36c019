"""The queue of an engine: who waits, who is taken, who ends without a sequence, and what it sums up."""

import pytest

from power_core.errors import BackendError, DeadlineError, QueueFullError
from power_core.request import GenerationRequest
from power_core.scheduler.admission import AdmissionController, Deadline
from power_core.scheduler.queue import RequestQueue, Totals, late
from power_core.types import FinishReason
from scheduler.sequences import make_sequence


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def make(active=1, waiting=9, deadline_s=None):
    clock = Clock()
    return RequestQueue(AdmissionController(max_active=active, max_waiting=waiting, clock=clock), deadline_s), clock


def put(queue, **kwargs):
    sequence = make_sequence(request_id=queue.number(), **kwargs)
    queue.put(sequence)
    return sequence


def ends(queue):
    return [(sequence.request_id, reason) for sequence, reason, _ in queue.ended()]


def test_an_empty_queue_is_a_queue():
    """It is passed where None stands for one of its own."""
    queue, _ = make()
    assert bool(queue)
    assert len(queue) == 0
    assert queue.take() is None
    assert not queue.has_granted


def test_requests_are_numbered_and_taken_as_places_come_free():
    queue, _ = make()
    first, second = put(queue), put(queue)
    assert (first.request_id, second.request_id, len(queue)) == (0, 1, 2)
    assert queue.has_granted
    assert queue.take() is first
    assert (queue.take(), queue.has_granted) == (None, False)
    assert queue.leave(first)
    first.ticket.cancel()
    assert queue.take() is second
    assert len(queue) == 1


def test_what_a_request_was_taken_for_may_break_off():
    """It waits before all others, and is taken again."""
    queue, _ = make(active=2)
    first, second = put(queue), put(queue)
    queue.put_back(queue.take())
    assert [queue.take(), queue.take()] == [first, second]


@pytest.mark.parametrize(
    ("own", "started", "default", "expected"),
    [
        (None, None, None, None),
        (None, None, 5.0, 5.0),
        (2.0, None, 5.0, 2.0),
        (2.0, 99.0, 5.0, 1.0),
        (None, 98.0, 5.0, 3.0),
        (None, 98.0, None, None),
    ],
)
def test_a_deadline_runs_from_where_the_caller_began(own, started, default, expected):
    """The request's seconds before the queue's, from its start where it names one."""
    queue, _ = make(deadline_s=default)
    deadline = queue.deadline(GenerationRequest((1,), deadline_s=own, started_s=started))
    assert deadline.remaining() == expected


def test_a_request_that_finds_no_place_leaves_no_trace():
    queue, _ = make(active=1, waiting=1)
    put(queue), put(queue)
    with pytest.raises(QueueFullError):
        put(queue)
    assert len(queue) == 2


def test_each_client_has_its_own_turn():
    """The first is taken at once; then whoever has not had a turn goes before who has."""
    queue, _ = make()
    for client in "aaab":
        put(queue, client=client)
    order = []
    while (sequence := queue.take()) is not None:
        order.append(sequence.request_id)
        queue.leave(sequence)
        sequence.ticket.cancel()
    assert order == [0, 1, 3, 2]


def test_those_that_need_no_sequence_end_without_one():
    """Cancelled, too late, empty; who is all of it was cancelled. The others wait on."""
    queue, clock = make(active=0)
    deadline = Deadline.after(5, clock)
    waits = put(queue)
    cancelled, is_late, empty = (
        put(queue, max_tokens=0),
        put(queue, deadline=deadline, max_tokens=0),
        put(queue, max_tokens=0),
    )
    queue.admission.add_places(1)
    queue.cancel(cancelled.request_id)
    queue.cancel(99)
    clock.now += 5
    assert ends(queue) == [(1, FinishReason.CANCELLED), (2, FinishReason.ERROR), (3, FinishReason.LENGTH)]
    assert [error for _, _, error in queue.ended()][1].what.endswith("while it was waiting for its turn")
    assert not waits.cancelled
    for sequence in (cancelled, is_late, empty):
        queue.leave(sequence)
    assert ends(queue) == []


def test_a_granted_request_can_be_too_late_as_well():
    """Its place was granted in time, but no step took it."""
    queue, clock = make()
    put(queue, deadline=Deadline.after(5, clock))
    assert ends(queue) == []
    clock.now += 5
    assert ends(queue) == [(0, FinishReason.ERROR)]


def test_nobody_waits_for_sequences_that_are_all_lost():
    queue, _ = make(active=2)
    put(queue)
    for _ in range(2):
        assert ends(queue) == []
        queue.admission.add_places(-1)
    [(_, reason, error)] = queue.ended()
    assert reason is FinishReason.ERROR
    assert isinstance(error, BackendError)


def test_progress_is_of_the_prompt():
    queue, _ = make()
    sequence = put(queue, prompt=(1, 2, 3, 4))
    assert queue.progress(sequence.request_id) == (0, 4)
    sequence.evaluated_prompt = 3
    assert queue.progress(sequence.request_id) == (3, 4)
    assert queue.progress(99) == (0, 0)


def test_a_request_leaves_once():
    """Out of the waiting line too; asking for its end later is ignored."""
    queue, _ = make(active=2)
    first, second = put(queue), put(queue)
    assert [queue.leave(first), queue.leave(first)] == [True, False]
    assert queue.take() is second
    assert queue.leave(second)
    queue.cancel(first.request_id)
    assert (first.cancelled, len(queue)) == (False, 0)


def test_clearing_gives_every_place_back():
    queue, _ = make(active=2)
    for _ in range(4):
        put(queue)
    queue.take()
    queue.clear()
    admission = queue.admission
    assert (len(queue), queue.take(), admission.active, admission.waiting) == (0, None, 0, 0)


def test_totals_are_sums_over_ended_requests():
    """Counts add up, reasons are counted by name, and only a deadline expires."""
    totals = Totals()
    names = ("reused", "emitted", "drafted", "accepted", "replays", "rebuilds")
    assert (totals.steps, totals.prefill_steps, totals.mixed_steps, totals.widths) == (0, 0, 0, {})
    assert (totals.finished, totals.expired, totals.guarded, totals.prompt_tokens) == ({}, 0, 0, 0)
    for number in (1, 2):
        sequence = make_sequence((1, 2, 3))
        for i, name in enumerate(names, 1):
            setattr(sequence.counts, name, i * number)
        sequence.counts.guard = 0
        totals.add(sequence, FinishReason.STOP, None)
    assert [getattr(totals, name) for name in names] == [3, 6, 9, 12, 15, 18]
    assert (totals.prompt_tokens, totals.guarded, totals.expired) == (6, 2, 0)
    for error in (late("decoding"), BackendError("x", who="y")):
        totals.add(make_sequence(), FinishReason.ERROR, error)
        assert (totals.expired, totals.guarded) == (1, 2)
    assert totals.finished == {"stop": 2, "error": 2}


def test_a_late_request_is_told_what_it_was_doing():
    """And told once."""
    error = late("decoding")
    assert isinstance(error, DeadlineError)
    assert str(error) == "request: the deadline passed while it was decoding; allow it longer"
