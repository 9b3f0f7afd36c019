"""
Session replicas: a bounded pool of mutable sessions, each lent to one user at a time.

What a replica is (a KV cache, a recurrent state, a whole loaded model) is its factory's affair. A
replica is built when first needed, after its worst-case bytes were reserved; one that fails its health
check, or that its user reports as damaged, is retired alone and another is built in its place.

A pool never waits: whoever asks has a queue of its own, in which requests are bounded, fair, cancel-safe and under
their deadlines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog
from attrs import define, field

from power_core.errors import BackendError
from power_core.scheduler.admission import AdmissionController, Permit

__all__ = ["Lease", "ReplicaCounters", "ReplicaPool"]

log = structlog.get_logger("power.replicas")
T = TypeVar("T")


@define
class ReplicaCounters:
    """
    What became of replicas.

    Attributes:
        failed_builds: Factories that raised.
        retired: Replicas closed because they were damaged or unhealthy.
    """

    built: int = 0
    failed_builds: int = 0
    leased: int = 0
    returned: int = 0
    retired: int = 0


class Lease(Generic[T]):
    """
    The exclusive use of a replica, until `end`.

    Attributes:
        replica: The session.
    """

    def __init__(self, pool: ReplicaPool[T], replica: T) -> None:
        self._pool = pool
        self._is_open = True
        self._is_damaged = False
        self.replica = replica

    def mark_damaged(self) -> None:
        """The replica's state can no longer be trusted: it is retired when the lease ends."""
        self._is_damaged = True

    def end(self) -> None:
        """Give the replica back, or retire it. Idempotent."""
        self._pool._take_back(self)  # noqa: SLF001 - a lease is its pool's handle


@define
class ReplicaPool(Generic[T]):
    """
    Up to *size* replicas, built lazily and lent exclusively.

    Args:
        build: Makes a replica.
        close: Frees a replica. What it raises is logged: a damaged one may not close cleanly.
        size: Most replicas.
        replica_bytes: The most bytes one can take, reserved before it is built.
        memory: Where bytes are reserved, shared between pools. A replica holds its reservation until it is closed.
        is_healthy: Asked before a used replica is lent again.

    Attributes:
        leased: Replicas that are lent, or being built for a lease.
    """

    build: Callable[[], T]
    close: Callable[[T], None]
    size: int
    replica_bytes: int = 0
    memory: AdmissionController | None = None
    is_healthy: Callable[[T], bool] = field(default=lambda _replica: True)
    counters: ReplicaCounters = field(factory=ReplicaCounters, init=False)
    leased: int = field(default=0, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _idle: list[T] = field(factory=list, init=False)
    _reservations: dict[int, Permit | None] = field(factory=dict, init=False)  # id of a replica -> its bytes
    _is_closed: bool = field(default=False, init=False)

    @property
    def built(self) -> int:
        """Replicas that exist."""
        return len(self._reservations)

    def lease_now(self) -> Lease[T] | None:
        """
        A replica where neither one nor memory for one has to be waited for, else None.

        Raises:
            BackendError: The pool is closed.
            Exception: Whatever `build` raised; nothing is kept of the attempt.
        """
        with self._lock:
            if self.leased >= self.size:
                return None
            self.leased += 1
        replica: T | None = None
        try:
            replica = self._idle_replica()
            if replica is None:
                replica = self._build()
        finally:
            with self._lock:
                if replica is None:
                    self.leased -= 1
                else:
                    self.counters.leased += 1
        return None if replica is None else Lease(self, replica)

    def adopt(self, replica: T, reservation: Permit | None = None) -> None:
        """Take in a replica that exists already, with what is reserved for it."""
        with self._lock:
            self.counters.built += 1
            self._reservations[id(replica)] = reservation
            self._idle.append(replica)

    def close_all(self) -> None:
        """Close what is idle, and what is lent when it comes back. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for replica in idle:
            self._retire(replica)

    def _idle_replica(self) -> T | None:
        """An idle replica that is healthy; unhealthy ones are retired on the way."""
        while True:
            with self._lock:
                if self._is_closed:
                    raise BackendError("the pool is closed", who="replicas", fix="open the model again")
                if not self._idle:
                    return None
                replica = self._idle.pop()
            if self._check(replica):
                return replica
            self.counters.retired += 1
            self._retire(replica)

    def _check(self, replica: T) -> bool:
        try:
            return self.is_healthy(replica)
        except Exception as exc:  # noqa: BLE001 - a check that fails is an answer
            log.warning("health check failed", error=str(exc))
            return False

    def _build(self) -> T | None:
        """A new replica, or None where there is no memory for one now."""
        reservation = None
        if self.memory is not None:
            reservation = self.memory.acquire_now(reserve_bytes=self.replica_bytes)
            if reservation is None:
                return None
        try:
            replica = self.build()
        except BaseException:
            self.counters.failed_builds += 1
            if reservation is not None:
                reservation.release()
            raise
        with self._lock:
            self.counters.built += 1
            self._reservations[id(replica)] = reservation
        return replica

    def _take_back(self, lease: Lease[T]) -> None:
        with self._lock:
            if not lease._is_open:  # noqa: SLF001 - the pool owns its leases
                return
            lease._is_open = False  # noqa: SLF001 - the same
            self.counters.returned += 1
            self.counters.retired += lease._is_damaged  # noqa: SLF001 - the same
        try:
            if lease._is_damaged:  # noqa: SLF001 - the same
                self._retire(lease.replica)
            else:
                self._put_back(lease.replica)
        finally:
            with self._lock:
                self.leased -= 1

    def _put_back(self, replica: T) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(replica)
                return
        self._retire(replica)

    def _retire(self, replica: T) -> None:
        try:
            self.close(replica)
        except Exception as exc:  # noqa: BLE001 - whatever it raises, the others must not suffer
            log.warning("a retired replica did not close cleanly", error=str(exc))
        finally:
            with self._lock:
                reservation = self._reservations.pop(id(replica))
            if reservation is not None:
                reservation.release()
