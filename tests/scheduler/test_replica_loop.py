"""Steps that go round replicas, with loops that only count."""

from types import SimpleNamespace

import pytest

from power_core.errors import QueueFullError
from power_core.scheduler.admission import AdmissionController
from power_core.scheduler.queue import RequestQueue
from power_core.scheduler.replica_loop import ReplicaLoop
from power_core.types import Origin
from scheduler.sequences import make_sequence


class Loop:
    """Decodes one request, a token a step, and ends it after so many."""

    def __init__(self, queue, name):
        self.queue, self.name, self.steps = queue, name, 2
        self.costs, self.policy = "costs", "policy"
        self.running, self.lost, self.closed, self.fails = None, 0, 0, False
        self.session = SimpleNamespace(max_sequences=1, open=self._open, close=self._close, shutdown=self._shut)
        self.is_healthy, self.is_shut, self.calls, self.left = True, False, [], []

    def _open(self, seq):
        if not self.is_healthy:
            raise RuntimeError("no answer")
        self.calls.append(("open", seq))

    def _close(self, seq):
        self.calls.append(("close", seq))

    def _shut(self):
        self.is_shut = True

    @property
    def is_idle(self):
        return self.running is None

    @property
    def has_room(self):
        return self.running is None and not self.lost

    def submit(self, request):
        return f"{request} by {self.name}"

    def prepare(self, strategy, draft_max):
        return f"{strategy} {draft_max} by {self.name}"

    def end_waiting(self):
        left, self.left = self.left, []
        return left

    def step(self):
        if self.running is None:
            self.running, self.at = self.queue.take(), 0
        self.at += 1
        if self.fails:
            self.end()
            raise OSError("gone")
        if self.at == self.steps:
            self.end()
        return [SimpleNamespace(origin=Origin.PLAIN, by=self.name)]

    def end(self):
        sequence, self.running = self.running, None
        self.queue.leave(sequence)
        sequence.ticket.cancel()

    def close(self):
        self.closed += 1


def make(size=2, **kwargs):
    """A loop over up to *size* replicas `a`, `b`, ..., and those that were made."""
    queue = RequestQueue(AdmissionController(max_active=size, max_waiting=9))
    made = [Loop(queue, "a")]

    def build():
        made.append(Loop(queue, "abcdef"[len(made)]))
        return made[-1]

    return ReplicaLoop(made[0], build, size=size, **kwargs), queue, made


def put(queue, count=1):
    for _ in range(count):
        queue.put(make_sequence(request_id=queue.number()))


def stepped(loop):
    return [event.by for event in loop.step()]


def test_a_replica_is_taken_for_each_request_that_is_granted():
    """One more each step, in the order they were lent; what has ended is lent again."""
    loop, queue, made = make()
    put(queue, 3)
    assert loop.active == 3
    assert [stepped(loop) for _ in range(2)] == [["a"], ["a", "b"]]
    assert (loop.active, loop.pool.leased, len(made)) == (2, 1, 2)
    assert [stepped(loop) for _ in range(2)] == [["b", "a"], ["a"]]
    assert (stepped(loop), loop.active, loop.pool.leased, len(made)) == ([], 0, 0, 2)
    assert loop.progress(99) == (0, 0)


def test_a_replica_without_room_is_no_reason_to_wait_and_one_with_room_is():
    """No second replica is lent for what the first can take."""
    loop, queue, made = make()
    put(queue)
    loop.step()
    put(queue)
    loop.step()
    assert (len(made), loop.pool.leased) == (2, 1)


def test_requests_wait_where_there_is_no_memory_for_a_replica():
    memory = AdmissionController(max_active=9, max_waiting=0, max_bytes=100)
    loop, queue, made = make(memory=memory, replica_bytes=60, reservation=memory.acquire(reserve_bytes=60))
    put(queue, 2)
    assert [stepped(loop) for _ in range(4)] == [["a"]] * 4
    assert (len(made), loop.active) == (1, 0)


def test_replicas_that_say_nothing_of_memory_take_none():
    memory = AdmissionController(max_active=9, max_waiting=0, max_bytes=0)
    loop, queue, _ = make(memory=memory)
    put(queue, 2)
    loop.step()
    assert stepped(loop) == ["a", "b"]


def test_a_replica_whose_step_raises_is_retired_with_its_request():
    """What it left behind is not lost; the others go on, and another takes its place."""
    loop, queue, made = make()
    put(queue, 3)
    for replica in range(2):
        loop.step()
        made[replica].steps = 9
    made[0].fails = True
    origins = (*[Origin.CORRECTION] * 3, Origin.END, Origin.PLAIN, Origin.END)
    made[0].left = [SimpleNamespace(origin=origin, by=origin.name) for origin in origins]
    with pytest.raises(OSError, match="gone"):
        loop.step()
    assert (made[0].closed, made[0].is_shut, loop.pool.counters.retired) == (1, True, 1)
    assert loop.active == 2 + 2  # the ends that were left, and the other requests
    assert stepped(loop) == [*[origin.name for origin in origins], "b", "c"]
    assert loop.active == 2


def test_a_place_that_was_lost_comes_back_with_another_replica():
    """The queue's bound of active requests is as before, and the damaged one is closed."""
    loop, queue, made = make(size=1)
    put(queue)
    loop.step()
    made[0].lost = 1
    queue.admission.add_places(-1)
    loop.step()
    assert (made[0].is_shut, queue.admission.max_active) == (True, 1)
    put(queue)
    assert stepped(loop) == ["b"]


def test_an_idle_replica_that_does_not_answer_is_replaced():
    """It is asked to open a sequence and to close it; one that has lost all its sequences is none."""
    for damage in ({"is_healthy": False}, {"lost": 1}):
        loop, queue, made = make()
        for name, value in damage.items():
            setattr(made[0], name, value)
        put(queue)
        assert stepped(loop) == ["b"]
        assert made[0].is_shut
    loop, queue, made = make()
    put(queue)
    loop.step()
    assert made[0].calls == [("open", 0), ("close", 0)]


def test_requests_are_checked_by_a_replica_that_is_there():
    """The first; once that was retired one that is lent, or one that is built for it and stays to be lent."""
    loop, queue, made = make(size=1)
    assert loop.submit("x") == "x by a"
    put(queue)
    loop.step()
    made[0].fails = True
    with pytest.raises(OSError, match="gone"):
        loop.step()
    assert (loop.prepare("s", 4), loop.pool.leased) == ("s 4 by b", 0)
    assert loop.submit("x") == "x by b"
    assert len(made) == 2


def test_a_replica_that_is_lent_checks_without_another():
    loop, queue, made = make()
    put(queue, 2)
    loop.step()
    made[0].fails = True
    with pytest.raises(OSError, match="gone"):
        loop.step()
    assert loop.submit("x") == "x by b"
    assert (loop.pool.leased, len(made)) == (1, 2)


def test_nothing_is_checked_without_memory_for_a_replica():
    memory = AdmissionController(max_active=9, max_waiting=0, max_bytes=100)
    loop, queue, made = make(size=1, memory=memory, replica_bytes=60, reservation=memory.acquire(reserve_bytes=60))
    put(queue)
    made[0].fails = True
    with pytest.raises(OSError, match="gone"):
        loop.step()
    other = memory.acquire(reserve_bytes=60)
    with pytest.raises(QueueFullError):
        loop.submit("x")
    other.release()
    assert loop.submit("x") == "x by b"


def test_closing_ends_requests_and_replicas():
    loop, queue, made = make()
    put(queue, 3)
    made[0].steps = 9
    loop.step()
    loop.step()
    loop.close()
    assert (len(queue), loop.pool.built, loop.pool.leased) == (0, 0, 0)
    assert [(replica.closed, replica.is_shut) for replica in made] == [(1, True)] * 2


def test_a_loop_that_fails_to_close_is_shut_down_all_the_same():
    loop, _, made = make()

    def close():
        raise OSError

    made[0].close = close
    loop.close()
    assert made[0].is_shut
