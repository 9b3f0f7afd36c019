"""Admission: bounded, fair, cancel-safe, under one deadline."""

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from power_core.errors import DeadlineError, QueueFullError, RequestCancelledError, RequestError, TooLargeError
from power_core.scheduler.admission import AdmissionController, AdmissionCounters, Deadline


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make(active=1, waiting=4, **kwargs):
    clock = Clock()
    return AdmissionController(max_active=active, max_waiting=waiting, clock=clock, **kwargs), clock


def granted(tickets):
    """Indices of the tickets that hold a place, in order."""
    return [i for i, ticket in enumerate(tickets) if ticket.poll() is not None]


def test_the_first_to_come_is_the_first_to_be_served():
    controller, _ = make()
    tickets = [controller.submit() for _ in range(3)]
    for turn in range(3):
        tickets[turn].poll().release()
        assert controller.counters.granted == min(turn + 2, 3)
    assert controller.counters.released == 3


def test_one_clients_many_requests_do_not_hold_up_anothers_one():
    """Turns go round the clients: a, a, a, b is served a, a, b, a (the first was taken at once)."""
    controller, _ = make()
    tickets = [controller.submit(client) for client in "aaab"]
    order = []
    for _ in range(4):
        (now,) = [i for i, ticket in enumerate(tickets) if i not in order and ticket.poll()]
        order.append(now)
        tickets[now].cancel()
    assert order == [0, 1, 3, 2]


@pytest.mark.parametrize("seconds", ["x", float("nan"), [], 10**400], ids=lambda seconds: f"{seconds!r:.8}")
def test_what_is_no_number_of_seconds_is_no_deadline(seconds):
    """Said at once: one of NaN would never pass."""
    with pytest.raises(RequestError, match=r"the deadline is .* \(expected seconds, or None\)"):
        Deadline.after(seconds)


def test_a_full_queue_refuses_and_counts():
    controller, _ = make(active=1, waiting=1)
    controller.submit()
    controller.submit()
    with pytest.raises(QueueFullError) as caught:
        controller.submit()
    assert caught.value.got == 1
    assert (controller.counters.refused_full, controller.waiting, controller.active) == (1, 1, 1)


def test_a_queue_of_no_length_still_serves_whom_there_is_room_for():
    controller, _ = make(active=1, waiting=0)
    permit = controller.submit().poll()
    with pytest.raises(QueueFullError):
        controller.submit()
    permit.release()
    assert controller.submit().poll() is not None


def test_a_request_that_never_fits_is_refused_at_once():
    controller, _ = make(max_bytes=100)
    with pytest.raises(TooLargeError) as caught:
        controller.submit(reserve_bytes=101)
    assert (caught.value.got, controller.waiting, controller.counters.refused_large) == (101, 0, 1)


def test_a_small_request_does_not_overtake_a_large_one_for_ever():
    controller, _ = make(active=9, max_bytes=100)
    first = controller.submit(reserve_bytes=60).poll()
    large, small = controller.submit(reserve_bytes=80), controller.submit(reserve_bytes=10)
    assert granted([large, small]) == []
    first.release()
    assert granted([large, small]) == [0, 1]
    assert controller.reserved_bytes == 90


def test_the_deadline_runs_on_from_one_wait_to_the_next():
    """Model queue, then device queue: together at most the request's ten seconds."""
    models, clock = make()
    devices = AdmissionController(max_active=1, max_waiting=9, clock=clock)
    busy = devices.submit().poll()
    permit = models.submit(timeout=10).poll()
    clock.now += 6
    ticket = devices.submit(deadline=permit.deadline)
    assert permit.deadline.remaining() == 4
    clock.now += 5
    with permit, pytest.raises(DeadlineError):
        ticket.poll()
    busy.release()
    assert (models.active, devices.active, devices.waiting) == (0, 0, 0)
    assert devices.counters.expired == 1


def test_long_work_checks_its_deadline_between_steps():
    clock = Clock()
    deadline = Deadline.after(1.0, clock)
    deadline.check("decoding")
    clock.now += 1
    with pytest.raises(DeadlineError, match="decoding"):
        deadline.check("decoding")


def test_an_expired_head_lets_the_next_one_forward():
    controller, clock = make(active=9, max_bytes=100)
    controller.submit(reserve_bytes=60)
    controller.submit(reserve_bytes=80, timeout=5)
    small = controller.submit(reserve_bytes=10)
    clock.now += 5
    assert small.poll() is not None


def test_a_wait_ends_when_another_thread_releases_or_cancels():
    controller = AdmissionController(max_active=1, max_waiting=4)
    first = controller.acquire()
    waiting, cancelled = controller.submit(), controller.submit()
    answers = []

    def wait_for(ticket):
        try:
            answers.append(ticket.wait())
        except RequestCancelledError as exc:
            answers.append(exc)

    threads = [threading.Thread(target=wait_for, args=(ticket,)) for ticket in (waiting, cancelled)]
    for thread in threads:
        thread.start()
    cancelled.cancel()
    first.release()
    for thread in threads:
        thread.join(10)
    assert sorted(type(answer).__name__ for answer in answers) == ["Permit", "RequestCancelledError"]
    assert controller.active == 1


def test_a_wait_past_its_deadline_gives_the_place_up():
    controller = AdmissionController(max_active=1, max_waiting=4)
    with controller.acquire(), pytest.raises(DeadlineError):
        controller.acquire(timeout=0.02)
    assert (controller.active, controller.waiting) == (0, 0)


class Admission(RuleBasedStateMachine):
    """Whatever is submitted, granted, cancelled, released and expired: nothing is lost and nothing is exceeded."""

    tickets = Bundle("tickets")

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.controller = AdmissionController(max_active=2, max_waiting=4, max_bytes=100, clock=self.clock)
        self.all = []

    @rule(
        target=tickets, client=st.sampled_from("abc"), size=st.integers(0, 110), timeout=st.none() | st.integers(0, 5)
    )
    def submit(self, client, size, timeout):
        try:
            ticket = self.controller.submit(client, reserve_bytes=size, timeout=timeout)
        except (QueueFullError, TooLargeError, DeadlineError):
            return None
        self.all.append(ticket)
        return ticket

    @rule(ticket=tickets)
    def poll(self, ticket):
        if ticket is not None:
            try:
                ticket.poll()
            except (DeadlineError, RequestCancelledError):
                assert ticket not in self.holding()

    @rule(ticket=tickets)
    def cancel_or_release(self, ticket):
        if ticket is not None:
            ticket.cancel()

    @rule(ticket=consumes(tickets))
    def release_twice(self, ticket):
        if ticket is not None:
            ticket.cancel()
            ticket.cancel()

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds):
        self.clock.now += seconds
        self.controller.expire()

    def in_state(self, name):
        return [ticket for ticket in self.all if ticket._state.name == name]

    def holding(self):
        return self.in_state("GRANTED")

    @invariant()
    def every_place_is_accounted_for(self):
        controller, counters = self.controller, self.controller.counters
        assert controller.active == len(self.holding()) <= 2
        assert controller.waiting == len(self.in_state("WAITING")) <= 4
        assert controller.reserved_bytes == sum(ticket.reserved_bytes for ticket in self.holding()) <= 100
        ended = counters.released + counters.cancelled + counters.expired
        refused = counters.refused_full + counters.refused_large
        assert counters.submitted == ended + refused + controller.active + controller.waiting

    @invariant()
    def nobody_waits_beside_free_room(self):
        queues = list(self.controller._queues.values())
        assert all(queues)
        assert not queues or not self.controller._has_room(queues[0][0])

    def teardown(self):
        for ticket in self.all:
            ticket.cancel()
        assert (self.controller.active, self.controller.waiting, self.controller.reserved_bytes) == (0, 0, 0)


TestAdmission = Admission.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_one_client_fills_its_own_places_only():
    """A client's bound is below the queue's; turns given to others free nothing of it."""
    controller, _ = make(waiting=4, max_per_client=2)
    active = controller.acquire("a")
    for _ in range(2):
        controller.submit("a")
    with pytest.raises(QueueFullError, match="2 requests"):
        controller.submit("a")
    controller.submit("b")
    active.release()
    controller.submit("a")
    assert (controller.active, controller.waiting) == (1, 3)


def test_places_come_and_go():
    """A place that is lost is granted to nobody; one that comes back goes to whoever waits."""
    controller, _ = make(active=1)
    controller.add_places(-1)
    ticket = controller.submit()
    assert ticket.poll() is None
    controller.add_places(1)
    assert ticket.is_granted


def test_what_can_be_had_at_once():
    """Neither a place nor bytes are waited for, and nobody in the queue is overtaken."""
    controller, _ = make(active=2, max_bytes=100)
    first = controller.acquire_now(reserve_bytes=60)
    assert first is not None
    assert controller.acquire_now(reserve_bytes=60) is None
    waiting = controller.submit(reserve_bytes=60)
    assert controller.acquire_now(reserve_bytes=1) is None
    first.release()
    assert waiting.is_granted
    assert controller.acquire_now(reserve_bytes=1) is not None


def test_a_deadline_has_passed_when_its_time_has_come():
    """Not before; what is left is never negative, and without one nothing ever passes."""
    clock = Clock()
    deadline = Deadline.after(2, clock)
    assert (deadline.at, deadline.is_past, deadline.remaining()) == (102.0, False, 2.0)
    clock.now += 2
    assert (deadline.is_past, deadline.remaining()) == (True, 0.0)
    clock.now += 5
    assert deadline.remaining() == 0.0
    never = Deadline.after(None, clock)
    assert (never.remaining(), never.is_past) == (None, False)
    assert Deadline().remaining() is None


def test_bytes_may_be_used_up_exactly():
    """Alone and together; one more waits, and less than none is no request."""
    controller, _ = make(active=9, max_bytes=100)
    assert controller.submit(reserve_bytes=100).is_granted
    assert controller.submit(reserve_bytes=0).is_granted
    waiting = controller.submit(reserve_bytes=1)
    assert (waiting.is_granted, controller.reserved_bytes) == (False, 100)
    with pytest.raises(RequestError, match="-1 bytes"):
        controller.submit(reserve_bytes=-1)
    assert controller.counters.submitted == 3


def test_what_can_be_had_at_once_may_use_up_everything():
    controller, _ = make(active=3, max_bytes=100)
    assert controller.acquire_now(reserve_bytes=60).reserved_bytes == 60
    assert controller.acquire_now(reserve_bytes=41) is None
    assert controller.acquire_now(reserve_bytes=40) is not None
    assert controller.acquire_now().reserved_bytes == 0
    assert controller.acquire_now() is None
    assert controller.counters.submitted == controller.counters.granted == 3


def test_a_request_that_says_nothing_of_bytes_takes_none():
    controller, _ = make(active=2, max_bytes=0)
    assert controller.submit().reserved_bytes == controller.acquire().reserved_bytes == 0


def test_room_for_a_small_request_is_no_place_in_a_full_queue():
    """The large one before it waits for bytes, and whoever comes later waits behind that."""
    controller, _ = make(active=9, waiting=1, max_bytes=100)
    controller.submit(reserve_bytes=60)
    controller.submit(reserve_bytes=80)
    with pytest.raises(QueueFullError):
        controller.submit(reserve_bytes=10)
    assert controller.waiting == 1


def test_a_request_that_is_late_already_is_refused_and_counted():
    controller, _ = make()
    with pytest.raises(DeadlineError, match=r"^admission: the deadline passed while being queued; allow it longer$"):
        controller.submit(timeout=0)
    counters = controller.counters
    assert (counters.submitted, counters.expired, controller.waiting, controller.active) == (1, 1, 0, 0)


def test_expired_places_are_dropped_once_and_all_together():
    """Those whose time has come, the others stay; each is told when it asks."""
    controller, clock = make()
    active = controller.submit()
    tickets = [controller.submit(timeout=seconds) for seconds in (3, 5, 4)] + [controller.submit()]
    assert controller.expire() == 0
    clock.now += 4
    assert (controller.expire(), controller.expire(), controller.waiting) == (2, 0, 2)
    assert [ticket.is_expired for ticket in tickets] == [True, False, True, False]
    with pytest.raises(DeadlineError, match=r"^admission: the deadline passed in the queue; allow it longer$"):
        tickets[0].poll()
    clock.now += 1
    assert controller.expire() == 1
    active.cancel()
    assert tickets[3].is_granted
    assert controller.counters.expired == 3


def test_a_waiter_sleeps_until_the_next_place_expires():
    """That may be another's, in front of it; without a deadline anywhere it sleeps until it is woken."""
    controller, _ = make()
    controller.submit(timeout=9)
    assert controller._next_expiry() is None
    controller.submit()
    controller.submit(timeout=5)
    controller.submit("b", timeout=3)
    assert controller._next_expiry() == 3


def test_what_was_cancelled_says_so_and_is_counted_once():
    controller, _ = make()
    first, second = controller.submit(), controller.submit()
    for _ in range(2):
        second.cancel()
        first.cancel()
    with pytest.raises(RequestCancelledError):
        second.poll()
    with pytest.raises(RequestCancelledError):
        first.poll()
    counters = controller.counters
    assert (counters.cancelled, counters.released, controller.active, controller.waiting) == (1, 1, 0, 0)


def test_the_clients_bound_holds_where_the_queue_has_room():
    """And the queue's where the client has: each is named by what it allows."""
    controller, _ = make(waiting=2, max_per_client=1)
    controller.submit("a")
    controller.submit("a")
    with pytest.raises(QueueFullError) as caught:
        controller.submit("a")
    assert (caught.value.got, caught.value.expected) == (1, "at most 1")
    controller.submit("b")
    with pytest.raises(QueueFullError) as caught:
        controller.submit("c")
    assert (caught.value.got, caught.value.expected) == (2, "at most 2")
    assert controller.counters.refused_full == 2


def test_one_release_may_let_several_forward():
    """As long as there is room, round the clients; who had a turn goes last."""
    controller, _ = make(active=9, waiting=9, max_bytes=100)
    big = controller.submit(reserve_bytes=100)
    tickets = [controller.submit(client, reserve_bytes=40) for client in "aab"]
    big.cancel()
    assert [ticket.is_granted for ticket in tickets] == [True, False, True]
    assert (controller.active, controller.waiting, controller.reserved_bytes) == (2, 1, 80)


def test_nothing_has_become_of_nothing():
    controller, _ = make()
    assert controller.counters == AdmissionCounters(0, 0, 0, 0, 0, 0, 0)
    assert (controller.waiting, controller.active, controller.reserved_bytes) == (0, 0, 0)


def test_a_long_queue_is_bounded_like_a_short_one():
    """Counts are compared by value."""
    controller, _ = make(waiting=300)
    for _ in range(301):
        controller.submit()
    with pytest.raises(QueueFullError):
        controller.submit()
    assert controller.waiting == 300


def test_nothing_is_granted_while_more_is_active_than_may_be():
    """Places may go while they are held; those that hold them go on."""
    controller, _ = make(active=2)
    tickets = [controller.submit() for _ in range(2)]
    controller.add_places(-1)
    waiting = controller.submit()
    assert not waiting.is_granted
    tickets[0].cancel()
    assert not waiting.is_granted
    tickets[1].cancel()
    assert waiting.is_granted
