"""Replicas: lazily built, exclusive, bounded, retired alone."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from power_core.errors import BackendError, DeadlineError, QueueFullError, RequestError
from power_core.scheduler.admission import AdmissionController, Deadline
from power_core.scheduler.replicas import ReplicaPool


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


NOW = Deadline.after(0.0)


def make_pool(size=2, **kwargs):
    factory = Factory()
    pool = ReplicaPool(factory.build, factory.close, size=size, is_healthy=lambda session: session.is_healthy, **kwargs)
    return pool, factory


def test_a_replica_is_built_when_first_needed_and_used_again():
    pool, factory = make_pool()
    assert factory.made == []
    with pool.lease() as first:
        pass
    with pool.lease() as second:
        assert second.replica is first.replica
    assert len(factory.made) == 1


def test_two_leases_never_share_a_replica():
    pool, _ = make_pool()
    with pool.lease() as a, pool.lease() as b:
        assert a.replica is not b.replica


def test_a_damaged_replica_is_retired_without_touching_the_others():
    pool, factory = make_pool()
    with pool.lease() as healthy:
        with pytest.raises(ZeroDivisionError), pool.lease() as damaged:
            raise ZeroDivisionError
        assert not damaged.replica.is_open
        assert healthy.replica.is_open
    with pool.lease(), pool.lease() as rebuilt:
        assert rebuilt.replica.is_open
    assert (pool.counters.retired, pool.counters.built) == (1, 3)
    assert len(factory.open) == 2


def test_an_error_of_the_request_leaves_the_replica_in_use():
    pool, factory = make_pool()
    with pytest.raises(RequestError), pool.lease():
        raise RequestError("the prompt is empty")
    assert len(factory.open) == 1


def test_an_unhealthy_idle_replica_is_replaced():
    pool, factory = make_pool()
    with pool.lease() as lease:
        lease.replica.is_healthy = False
    with pool.lease() as again:
        assert again.replica is not lease.replica
    assert len(factory.open) == 1


def test_bytes_are_reserved_before_a_build_and_held_until_the_replica_is_closed():
    memory = AdmissionController(max_active=9, max_waiting=0, max_bytes=100)
    pool, factory = make_pool(size=3, replica_bytes=40, memory=memory)
    with pool.lease(), pool.lease():
        assert memory.reserved_bytes == 80
        with pytest.raises(QueueFullError):
            pool.lease()
        assert len(factory.made) == 2
    assert memory.reserved_bytes == 80
    pool.close_all()
    assert (memory.reserved_bytes, factory.open) == (0, [])


def test_a_failed_build_keeps_nothing():
    memory = AdmissionController(max_active=9, max_waiting=0, max_bytes=100)
    pool, factory = make_pool(replica_bytes=40, memory=memory)
    factory.fails = True
    with pytest.raises(BackendError):
        pool.lease()
    assert (memory.reserved_bytes, pool.leased, pool.counters.failed_builds) == (0, 0, 1)
    with pool.lease():
        pass


def test_pools_share_the_device_and_a_refused_one_gives_everything_back():
    device = AdmissionController(max_active=1, max_waiting=0)
    pools = [make_pool(device=device)[0] for _ in range(2)]
    with pools[0].lease():
        with pytest.raises(QueueFullError):
            pools[1].lease()
        assert (pools[1].leased, pools[1].built) == (0, 1)
    with pools[1].lease():
        assert device.active == 1
    assert device.active == 0


def test_a_replica_that_is_lent_when_the_pool_closes_is_closed_when_it_comes_back():
    pool, factory = make_pool()
    lease = pool.lease()
    pool.close_all()
    assert len(factory.open) == 1
    lease.end()
    lease.end()
    assert factory.open == []
    with pytest.raises(BackendError):
        pool.lease()
    assert pool.leased == 0


class Replicas(RuleBasedStateMachine):
    """Whatever is leased, damaged, failed, shrunk: no session, permit or byte is lost."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.memory = AdmissionController(max_active=9, max_waiting=0, max_bytes=100)
        self.device = AdmissionController(max_active=2, max_waiting=0)
        self.pool, self.factory = make_pool(
            size=3, replica_bytes=40, memory=self.memory, device=self.device, max_waiting=0
        )
        self.lent = []

    @rule(target=leases, fails=st.booleans())
    def lease(self, fails):
        self.factory.fails = fails
        try:
            lease = self.pool.lease()
        except (BackendError, QueueFullError):
            return None
        finally:
            self.factory.fails = False
        self.lent.append(lease)
        return lease

    @rule()
    def too_late(self):
        with pytest.raises((DeadlineError, QueueFullError)):
            self.pool.lease(deadline=NOW)

    @rule(lease=consumes(leases), damaged=st.booleans(), twice=st.booleans())
    def end(self, lease, damaged, twice):
        if lease is not None:
            if damaged:
                lease.mark_damaged()
            lease.end()
            if twice:
                lease.end()
            self.lent.remove(lease)

    @rule()
    def falls_ill(self):
        for session in self.factory.open:
            session.is_healthy = session in [lease.replica for lease in self.lent]

    @rule()
    def shrink(self):
        self.pool.shrink()
        assert self.pool.built == len(self.lent)

    @invariant()
    def everything_is_accounted_for(self):
        replicas = [id(lease.replica) for lease in self.lent]
        assert len(set(replicas)) == len(replicas)
        assert all(lease.replica.is_open for lease in self.lent)
        assert self.pool.leased == self.device.active == len(self.lent) <= 2
        assert self.pool.built == len(self.factory.open) <= 2
        assert self.memory.reserved_bytes == 40 * len(self.factory.open) <= 100

    def teardown(self):
        for lease in self.lent:
            lease.end()
        self.pool.close_all()
        assert self.factory.open == []
        assert (self.memory.reserved_bytes, self.device.active, self.pool.leased) == (0, 0, 0)


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
