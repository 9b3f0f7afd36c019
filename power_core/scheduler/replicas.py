"""
Session replicas: a bounded pool of mutable sessions, each lent to one user at a time.

What a replica is (a KV cache, a recurrent state, a whole loaded model) is its factory's affair. A
replica is built when first needed, after its worst-case bytes were reserved; one that fails its health
check, or that its user reports as damaged, is retired alone and another is built in its place.

Leases are handed out by an `AdmissionController`, so they are bounded, fair, cancel-safe and under
the request's deadline like every other wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

import structlog
from attrs import define, field

from power_core.errors import BackendError, PowerError
from power_core.scheduler.admission import AdmissionController, Deadline, Permit

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
    The exclusive use of a replica. Use as a context manager.

    An exception that leaves the block marks the replica as damaged, unless it is a `PowerError` of the
    request itself; call `mark_damaged` where only the user can tell.

    Attributes:
        replica: The session.
    """

    def __init__(self, pool: ReplicaPool[T], replica: T, permits: list[Permit]) -> None:
        self._pool = pool
        self._permits = permits
        self._is_open = True
        self._is_damaged = False
        self.replica = replica

    def mark_damaged(self) -> None:
        """The replica's state can no longer be trusted: it is retired when the lease ends."""
        self._is_damaged = True

    def end(self) -> None:
        """Give the replica back, or retire it. Idempotent."""
        self._pool._take_back(self)  # noqa: SLF001 - a lease is its pool's handle

    def __enter__(self) -> Lease[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None and not self._pool.is_harmless(exc):
            self.mark_damaged()
        self.end()


def _is_request_error(exc: BaseException) -> bool:
    """Errors Power raises about a request leave the session as it was; a backend's may not."""
    return isinstance(exc, PowerError) and not isinstance(exc, BackendError)


@define
class ReplicaPool(Generic[T]):
    """
    Up to *size* replicas, built lazily and lent exclusively.

    Args:
        build: Makes a replica. May take long; other leases go on meanwhile.
        close: Frees a replica. What it raises is logged: a damaged one may not close cleanly.
        size: Most replicas.
        replica_bytes: The most bytes one can take, reserved before it is built.
        memory: Where bytes are reserved, shared between pools. A replica holds its reservation until it is closed.
        is_healthy: Asked before a used replica is lent again.
        device: Shared with other pools: one permit of it is held during each lease.
        max_waiting: Leases that may wait.
        is_harmless: Whether an exception that ended a lease leaves the replica usable.
    """

    build: Callable[[], T]
    close: Callable[[T], None]
    size: int
    replica_bytes: int = 0
    memory: AdmissionController | None = None
    is_healthy: Callable[[T], bool] = field(default=lambda _replica: True)
    device: AdmissionController | None = None
    max_waiting: int = 64
    is_harmless: Callable[[BaseException], bool] = field(default=_is_request_error)
    counters: ReplicaCounters = field(factory=ReplicaCounters, init=False)
    _turns: AdmissionController = field(init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _idle: list[T] = field(factory=list, init=False)
    _reservations: dict[int, Permit | None] = field(factory=dict, init=False)  # id of a replica -> its bytes
    _is_closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        clock = time.monotonic if self.device is None else self.device.clock
        self._turns = AdmissionController(max_active=self.size, max_waiting=self.max_waiting, clock=clock)

    @property
    def built(self) -> int:
        """Replicas that exist."""
        return len(self._reservations)

    @property
    def leased(self) -> int:
        """Replicas that are lent, or being built for a lease."""
        return self._turns.active

    def lease(self, client: str = "", *, deadline: Deadline | None = None) -> Lease[T]:
        """
        Wait for a replica, building one where none is idle.

        Raises:
            QueueFullError, DeadlineError, TooLargeError: As `AdmissionController` says.
            BackendError: The pool is closed.
            Exception: Whatever `build` raised; nothing is kept of the attempt.
        """
        deadline = Deadline.after(None) if deadline is None else deadline
        permits = [self._turns.acquire(client, deadline=deadline)]
        replica: T | None = None
        try:
            replica = self._idle_replica()
            if replica is None:
                replica = self._build(client, deadline)
            if self.device is not None:  # last, so that nobody holds the device while waiting for memory
                permits.append(self.device.acquire(client, deadline=deadline))
        except BaseException:
            if replica is not None:
                self._put_back(replica)
            _release(permits)
            raise
        self.counters.leased += 1
        return Lease(self, replica, permits)

    def lease_now(self, client: str = "") -> Lease[T] | None:
        """
        A replica where neither one nor memory for one has to be waited for, else None; without a device permit.

        Raises:
            BackendError: The pool is closed.
            Exception: Whatever `build` raised; nothing is kept of the attempt.
        """
        turn = self._turns.acquire_now(client)
        if turn is None:
            return None
        try:
            replica = self._idle_replica()
            if replica is None:
                reservation = None
                if self.memory is not None:
                    reservation = self.memory.acquire_now(client, reserve_bytes=self.replica_bytes)
                    if reservation is None:
                        turn.release()
                        return None
                replica = self._built(reservation)
        except BaseException:
            turn.release()
            raise
        self.counters.leased += 1
        return Lease(self, replica, [turn])

    def adopt(self, replica: T, reservation: Permit | None = None) -> None:
        """Take in a replica that exists already, with what is reserved for it."""
        with self._lock:
            self.counters.built += 1
            self._reservations[id(replica)] = reservation
            self._idle.append(replica)

    def shrink(self) -> int:
        """Close every idle replica, so that their bytes can serve another pool; returns how many."""
        with self._lock:
            idle, self._idle = self._idle, []
        for replica in idle:
            self._retire(replica)
        return len(idle)

    def close_all(self) -> None:
        """Close what is idle, and what is lent when it comes back. Idempotent."""
        with self._lock:
            self._is_closed = True
        self.shrink()

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

    def _build(self, client: str, deadline: Deadline) -> T:
        return self._built(self._reserve(client, deadline), deadline)

    def _built(self, reservation: Permit | None, deadline: Deadline | None = None) -> T:
        try:
            if deadline is not None:
                deadline.check("waiting for a replica")
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

    def _reserve(self, client: str, deadline: Deadline) -> Permit | None:
        if self.memory is None:
            return None
        return self.memory.acquire(client, reserve_bytes=self.replica_bytes, deadline=deadline)

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
            _release(lease._permits)  # noqa: SLF001 - the same

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


def _release(permits: list[Permit]) -> None:
    for permit in reversed(permits):
        permit.release()
