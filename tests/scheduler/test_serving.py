"""How an engine is put together from its bounds."""

from types import SimpleNamespace

import pytest

from power_core.scheduler.admission import AdmissionController
from power_core.scheduler.queue import MAX_WAITING
from power_core.scheduler.replica_loop import ReplicaLoop
from power_core.scheduler.reuse import HIDDEN, TARGET
from power_core.scheduler.serving import (
    DEFAULT_CACHE_BYTES,
    Serving,
    make_cache,
    make_loop,
    make_queue,
    make_reuse,
    num_replicas,
)
from power_core.shapes import ExactnessLevel
from power_core.target import SessionOptions
from power_core.testing import ScriptedTarget, one_class


def open_session():
    return ScriptedTarget(8).open_session(SessionOptions())


@pytest.mark.parametrize(
    ("asked", "places", "parallel", "expected"),
    [(0, 4, 4, 0), (0, 4, 3, 0), (0, 1, 1, 0), (0, 1, 4, 4), (0, 3, 4, 4), (2, 4, 4, 2), (1, 1, 1, 1)],
)
def test_replicas_are_taken_where_asked_for_or_where_the_target_cannot_batch(asked, places, parallel, expected):
    session = SimpleNamespace(max_sequences=places)
    assert num_replicas(Serving(replicas=asked), session, parallel) == expected


def test_a_queue_has_the_bounds_of_the_engine():
    queue = make_queue(Serving(queue_max=5, queue_per_client=2, deadline_s=3.0), 4)
    admission = queue.admission
    assert (admission.max_active, admission.max_waiting, admission.max_per_client) == (4, 5, 2)
    assert queue.deadline_s == 3.0
    assert make_queue(Serving(), 1).admission.max_waiting == MAX_WAITING == 1024


def test_a_cache_has_the_bounds_of_the_engine(tmp_path):
    """The folder may hold four times what memory does."""
    serving = Serving(cache_bytes=1000, cache_ttl_s=60.0, cache_dir=tmp_path / "kept")
    cache = make_cache(serving, open_session(), allow_unverified=False)
    assert (cache.max_bytes, cache.ttl, [*cache.stores]) == (1000, 60.0, [TARGET, HIDDEN])
    assert (cache.disk.folder, cache.disk.max_bytes, cache.disk.ttl) == (tmp_path / "kept", 4000, 60.0)
    plain = make_cache(Serving(), open_session(), allow_unverified=False)
    assert (plain.max_bytes, plain.ttl, plain.disk) == (DEFAULT_CACHE_BYTES, None, None)
    assert DEFAULT_CACHE_BYTES == 512 * 1024 * 1024


def test_no_cache_is_made_where_state_cannot_be_kept_exactly():
    """None asked for; a target that cannot copy, or does not say so; a level that promises nothing unless allowed."""
    session = open_session()
    assert make_cache(Serving(cache_bytes=0), session, allow_unverified=True) is None
    assert make_cache(Serving(), SimpleNamespace(profile=session.profile), allow_unverified=True) is None
    session.capabilities = frozenset()
    assert make_cache(Serving(), session, allow_unverified=True) is None

    def unverified(options):
        profile = one_class()(options)
        return type(profile)(ExactnessLevel.UNVERIFIED, profile.decode, profile.prefill)

    session = ScriptedTarget(8, profile=unverified).open_session(SessionOptions())
    assert make_cache(Serving(), session, allow_unverified=False) is None
    assert make_cache(Serving(), session, allow_unverified=True) is not None


def test_a_cache_is_used_by_sessions_that_can_copy():
    session = open_session()
    cache = make_cache(Serving(), session, allow_unverified=False)
    assert make_reuse(cache, session, "digest").cache is cache
    assert make_reuse(None, session, "digest") is None
    assert make_reuse(cache, SimpleNamespace(), "digest") is None


def test_what_is_reserved_is_given_back():
    memory = AdmissionController(max_active=9, max_waiting=0, max_bytes=100)
    serving = Serving(reservations=tuple(memory.acquire(reserve_bytes=40) for _ in range(2)))
    for _ in range(2):
        serving.release()
        assert memory.reserved_bytes == 0


class Loop:
    """A loop as replicas see it."""

    def __init__(self, session):
        self.session, self.queue, self.costs, self.policy = session, "queue", "costs", "policy"
        self.lost, self.closed = 0, 0

    def close(self):
        self.closed += 1


def test_one_session_needs_no_replicas():
    first = Loop(open_session())
    assert make_loop(first, 0, Serving(), open_session, None) is first


def test_replicas_learn_from_the_first_and_give_back_what_they_hold():
    """One that cannot be made shuts the session down that was opened for it."""
    shut = []

    def opened():
        session = open_session()
        session.shutdown = lambda: shut.append(session)
        return session

    def make(session, costs, policy):
        assert (costs, policy) == ("costs", "policy")
        if made:
            raise MemoryError
        made.append(Loop(session))
        return made[0]

    memory = AdmissionController(max_active=9, max_waiting=0, max_bytes=100)
    serving = Serving(memory=memory, session_bytes=30, session_reservation=memory.acquire(reserve_bytes=30))
    made = []
    first = Loop(opened())
    loop = make_loop(first, 3, serving, opened, make)
    assert isinstance(loop, ReplicaLoop)
    assert (loop.pool.size, loop.pool.built, loop.queue) == (3, 1, "queue")
    leases = [loop.pool.lease_now(), loop.pool.lease_now()]
    assert [lease.replica for lease in leases] == [first, made[0]]
    assert memory.reserved_bytes == 60
    with pytest.raises(MemoryError):
        loop.pool.lease_now()
    assert (len(shut), memory.reserved_bytes) == (1, 60)
    for lease in leases:
        lease.end()
    loop.pool.close_all()
    assert (len(shut), memory.reserved_bytes, first.closed, made[0].closed) == (3, 0, 1, 1)


def test_an_engine_without_bounds_of_its_own():
    """Kept prompts in memory, a queue, and nothing else."""
    serving = Serving()
    assert (serving.queue_max, serving.queue_per_client, serving.deadline_s, serving.replicas) == (1024, None, None, 0)
    assert (serving.cache_bytes, serving.cache_ttl_s, serving.cache_dir) == (512 << 20, None, None)
    assert (serving.memory, serving.device, serving.session_bytes, serving.reservations) == (None, None, 0, ())
    assert serving.session_reservation is None
