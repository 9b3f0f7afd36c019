"""Replicas: lazily built, exclusive, bounded, retired alone."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from power_core.errors import BackendError
from power_core.scheduler.admission import AdmissionController
from power_core.scheduler.replicas import ReplicaCounters, ReplicaPool


class Session:
    """A replica that knows whether it is open."""

    def __init__(self):
        self.is_open = True
        self.is_healthy = True


class Factory:
    """Makes sessions; `fails` makes the next build raise."""

    def __init__(self):
        self.made = []
        self.fails = False

    def build(self):
        if self.fails:
            self.fails = False
            raise BackendError("out of memory")
        self.made.append(Session())
        return self.made[-1]

    def close(self, session):
        assert session.is_open, "closed twice"
        session.is_open = False

    @property
    def open(self):
        return [session for session in self.made if session.is_open]


def make_pool(size=2, **kwargs):
    factory = Factory()
    pool = ReplicaPool(factory.build, factory.close, size=size, is_healthy=lambda session: session.is_healthy, **kwargs)
    return pool, factory


def make_memory():
    return AdmissionController(max_active=9, max_waiting=0, max_bytes=100)


def test_a_replica_is_built_when_first_needed_and_used_again():
    pool, factory = make_pool()
    assert factory.made == []
    first = pool.lease_now()
    first.end()
    assert pool.lease_now().replica is first.replica
    assert len(factory.made) == 1


def test_leases_are_exclusive_and_bounded():
    """Two leases never share a replica, and a third is not to be had until one of them ends."""
    pool, _ = make_pool(size=2)
    a, b = pool.lease_now(), pool.lease_now()
    assert a.replica is not b.replica
    assert (pool.lease_now(), pool.leased) == (None, 2)
    a.end()
    assert pool.lease_now().replica is a.replica


def test_a_damaged_replica_is_retired_without_touching_the_others():
    pool, factory = make_pool()
    healthy, damaged = pool.lease_now(), pool.lease_now()
    damaged.mark_damaged()
    damaged.end()
    assert (damaged.replica.is_open, healthy.replica.is_open) == (False, True)
    assert pool.lease_now().replica.is_open
    assert (pool.counters.retired, pool.counters.built) == (1, 3)
    assert len(factory.open) == 2


def test_an_unhealthy_idle_replica_is_replaced():
    pool, factory = make_pool()
    lease = pool.lease_now()
    lease.replica.is_healthy = False
    lease.end()
    assert pool.lease_now().replica is not lease.replica
    assert len(factory.open) == 1


def test_a_replica_that_neither_answers_nor_closes_is_replaced():
    """A health check that raises is a no, and a close that raises still gives the bytes back."""

    def broken(_replica):
        raise BackendError("no answer")

    memory, factory = make_memory(), Factory()
    pool = ReplicaPool(factory.build, broken, size=1, replica_bytes=60, memory=memory, is_healthy=broken)
    for _ in range(2):
        pool.lease_now().end()
    assert (len(factory.made), pool.built, memory.reserved_bytes) == (2, 1, 60)


def test_bytes_are_reserved_before_a_build_and_held_until_the_replica_is_closed():
    memory = make_memory()
    pool, factory = make_pool(size=3, replica_bytes=40, memory=memory)
    leases = [pool.lease_now(), pool.lease_now()]
    assert memory.reserved_bytes == 80
    assert (pool.lease_now(), pool.leased, len(factory.made)) == (None, 2, 2)
    for lease in leases:
        lease.end()
    assert memory.reserved_bytes == 80
    pool.close_all()
    assert (memory.reserved_bytes, factory.open) == (0, [])


def test_an_adopted_replica_gives_its_bytes_back_like_a_built_one():
    """What another reserved for it is released when it is retired, and the next one fits in its place."""
    memory = make_memory()
    pool, factory = make_pool(replica_bytes=60, memory=memory)
    pool.adopt(factory.build(), memory.acquire_now(reserve_bytes=60))
    assert pool.built == 1
    lease = pool.lease_now()
    assert pool.lease_now() is None
    lease.mark_damaged()
    lease.end()
    assert memory.reserved_bytes == 0
    assert pool.lease_now().replica is not lease.replica


def test_a_failed_build_keeps_nothing():
    memory = make_memory()
    pool, factory = make_pool(replica_bytes=40, memory=memory)
    factory.fails = True
    with pytest.raises(BackendError):
        pool.lease_now()
    assert (memory.reserved_bytes, pool.leased, pool.counters.failed_builds) == (0, 0, 1)
    assert pool.lease_now() is not None


def test_a_replica_that_is_lent_when_the_pool_closes_is_closed_when_it_comes_back():
    pool, factory = make_pool()
    lease = pool.lease_now()
    pool.close_all()
    assert len(factory.open) == 1
    lease.end()
    lease.end()
    assert factory.open == []
    with pytest.raises(BackendError):
        pool.lease_now()
    assert pool.leased == 0


class Replicas(RuleBasedStateMachine):
    """Whatever is leased, damaged, failed, taken by others: no session, place or byte is lost."""

    leases = Bundle("leases")

    @initialize(size=st.integers(1, 3), adopts=st.booleans())
    def start(self, size, adopts):
        self.size, self.lent, self.others = size, [], []
        self.memory = make_memory()
        self.pool, self.factory = make_pool(size=size, replica_bytes=30, memory=self.memory)
        if adopts:
            self.pool.adopt(self.factory.build(), self.memory.acquire_now(reserve_bytes=30))

    @rule(target=leases, fails=st.booleans())
    def lease(self, fails):
        self.factory.fails = fails
        healthy = [each for each in self.factory.open if each.is_healthy and each not in self.in_use()]
        try:
            lease = self.pool.lease_now()
        except BackendError:
            assert fails
            return None
        finally:
            self.factory.fails = False
        if lease is None:
            assert len(self.lent) == self.size or (not healthy and self.memory.reserved_bytes > 70)
            return None
        self.lent.append(lease)
        return lease

    @rule(lease=consumes(leases), damaged=st.booleans(), twice=st.booleans())
    def end(self, lease, damaged, twice):
        if lease is not None:
            if damaged:
                lease.mark_damaged()
            lease.end()
            if twice:
                lease.end()
            self.lent.remove(lease)
            assert lease.replica.is_open is not damaged

    @rule()
    def falls_ill(self):
        for session in self.factory.open:
            session.is_healthy = session in self.in_use()

    @rule(nbytes=st.integers(1, 60))
    def another_takes_memory(self, nbytes):
        permit = self.memory.acquire_now(reserve_bytes=nbytes)
        if permit is not None:
            self.others.append(permit)

    @precondition(lambda self: self.others)
    @rule()
    def another_gives_memory_back(self):
        self.others.pop().release()

    def in_use(self):
        return [lease.replica for lease in self.lent]

    @invariant()
    def everything_is_accounted_for(self):
        if not hasattr(self, "pool"):
            return
        assert len({id(replica) for replica in self.in_use()}) == len(self.lent) == self.pool.leased <= self.size
        assert all(replica.is_open for replica in self.in_use())
        assert self.pool.built == len(self.factory.open) <= self.size
        held = sum(permit.reserved_bytes for permit in self.others)
        assert self.memory.reserved_bytes == 30 * len(self.factory.open) + held <= 100

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        if self.lent:
            self.lent.pop().end()
        self.pool.close_all()
        for lease in self.lent:
            lease.end()
        assert self.factory.open == []
        assert (self.memory.active, self.pool.leased) == (len(self.others), 0)


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_pool_begins_empty():
    pool, _ = make_pool()
    assert pool.counters == ReplicaCounters(0, 0, 0, 0, 0)
    assert (pool.built, pool.leased, pool.replica_bytes) == (0, 0, 0)


def test_replicas_are_healthy_where_nobody_says_how_to_tell():
    factory = Factory()
    pool = ReplicaPool(factory.build, factory.close, size=1)
    first = pool.lease_now()
    first.end()
    assert pool.lease_now().replica is first.replica


def test_everything_that_becomes_of_a_replica_is_counted_once():
    """Built, adopted, lent, given back, damaged, unhealthy, and not built at all."""
    pool, factory = make_pool(size=2)
    pool.adopt(factory.build())
    adopted, built = pool.lease_now(), pool.lease_now()
    assert pool.counters == ReplicaCounters(built=2, leased=2)
    built.mark_damaged()
    for lease in (adopted, built, built):
        lease.end()
    assert pool.counters == ReplicaCounters(built=2, leased=2, returned=2, retired=1)
    adopted.replica.is_healthy = False
    factory.fails = True
    with pytest.raises(BackendError):
        pool.lease_now()
    assert pool.counters == ReplicaCounters(built=2, failed_builds=1, leased=2, returned=2, retired=2)
    assert (pool.built, pool.leased) == (0, 0)


@pytest.mark.parametrize("name", ["counters", "leased", "lock", "idle", "reservations", "is_closed"])
def test_what_a_pool_keeps_is_its_own(name):
    with pytest.raises(TypeError, match=name):
        ReplicaPool(Session, print, size=1, **{name: 0})
