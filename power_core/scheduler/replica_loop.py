"""
Requests over session replicas: one request a session, for targets that cannot batch or must not.

Looks like a `StepLoop` from outside. Inside, each replica is a step loop of its own over a session of its own;
all of them take from one queue, and steps go round them.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from power_core.errors import QueueFullError
from power_core.request import Event, GenerationRequest
from power_core.scheduler.admission import AdmissionController, Permit
from power_core.scheduler.costs import CostModel
from power_core.scheduler.loop import StepLoop
from power_core.scheduler.policy import RequestWidth, WidthPolicy
from power_core.scheduler.queue import RequestQueue
from power_core.scheduler.replicas import Lease, ReplicaPool
from power_core.types import Origin

__all__ = ["ReplicaLoop"]

log = structlog.get_logger("power.replicas")


class ReplicaLoop:
    """
    Step loops over replicas of one session.

    Args:
        first: The replica that exists; requests are checked by it.
        build: Makes another one, over the same queue.
        size: Most replicas, the first included.
        replica_bytes: What each can at most take.
        memory: Where that is reserved before one is built; None for no bound.
        reservation: What is reserved for *first*.

    Attributes:
        pool: The replicas.
        queue: Where requests wait; its places are replicas.
    """

    def __init__(
        self,
        first: StepLoop,
        build: Callable[[], StepLoop],
        *,
        size: int,
        replica_bytes: int = 0,
        memory: AdmissionController | None = None,
        reservation: Permit | None = None,
    ) -> None:
        self._front: StepLoop | None = first  # checks requests; None once it was retired
        self._first = first  # ends requests that have no replica, also when it was retired
        self._leases: list[Lease[StepLoop]] = []
        self._outbox: list[Event] = []
        self.queue: RequestQueue = first.queue
        self.costs: CostModel = first.costs
        self.policy: WidthPolicy = first.policy
        self.pool: ReplicaPool[StepLoop] = ReplicaPool(
            build, _close, size, replica_bytes=replica_bytes, memory=memory, is_healthy=_is_healthy
        )
        self.pool.adopt(first, reservation)

    def submit(self, request: GenerationRequest) -> int:
        """Queue *request*: see `StepLoop.submit`."""
        return self._checker().submit(request)

    def prepare(self, strategy: str, draft_max: int) -> RequestWidth:
        """Open *strategy* where no request has asked for it yet: see `StepLoop.prepare`."""
        return self._checker().prepare(strategy, draft_max)

    def cancel(self, request_id: int) -> None:
        """Ask for the end of a request; unknown and finished ones are ignored."""
        self.queue.cancel(request_id)

    def _checker(self) -> StepLoop:
        if self._front is None:
            lease = self._leases[0] if self._leases else self.pool.lease_now()
            if lease is None:
                raise QueueFullError(
                    "there is no memory for a replica now", who="replicas", expected="memory that others hold",
                    fix="try again later",
                )  # fmt: skip
            self._front = lease.replica
            if lease not in self._leases:
                lease.end()
        return self._front

    @property
    def active(self) -> int:
        """Requests whose end has not been returned by `step`."""
        return len(self.queue) + sum(event.origin is Origin.END for event in self._outbox)

    def progress(self, request_id: int) -> tuple[int, int]:
        """Prompt tokens evaluated and prompt tokens in all."""
        return self.queue.progress(request_id)

    def step(self) -> list[Event]:
        """
        One step of every replica that has a request.

        Returns:
            Events, replicas in the order they were lent; none where every replica waits for memory.

        Raises:
            Exception: Whatever a target raised; its replica is retired once its request has ended.
        """
        self._outbox += self._first.end_waiting()
        self._lend()
        for lease in list(self._leases):
            self._step(lease)
        events, self._outbox = self._outbox, []
        return events

    def _lend(self) -> None:
        """As many replicas as requests have been granted."""
        while self.queue.has_granted and not any(lease.replica.has_room for lease in self._leases):
            lease = self.pool.lease_now()
            if lease is None:  # no memory now: whoever has a replica goes on, the others wait
                return
            self._leases.append(lease)

    def _step(self, lease: Lease[StepLoop]) -> None:
        loop = lease.replica
        try:
            self._outbox += loop.step()
        except BaseException:
            self._damage(lease)
            if loop.is_idle:
                self._end(lease)
                self._outbox += loop.end_waiting()
            raise
        if loop.is_idle:
            self._end(lease)

    def _end(self, lease: Lease[StepLoop]) -> None:
        loop = lease.replica
        self._leases.remove(lease)
        if loop.lost:  # its place comes back with the replica that is built for it
            self._damage(lease)
            self.queue.admission.add_places(loop.lost)
        lease.end()

    def _damage(self, lease: Lease[StepLoop]) -> None:
        """Have a replica retired when its request has ended."""
        log.warning("a replica is damaged", lost=lease.replica.lost)
        lease.mark_damaged()
        if self._front is lease.replica:
            self._front = None

    def close(self) -> None:
        """End every request without events, and close every replica."""
        self.queue.clear()
        while self._leases:
            self._leases.pop().end()
        self.pool.close_all()


def _close(loop: StepLoop) -> None:
    try:
        loop.close()
    finally:
        loop.session.shutdown()


def _is_healthy(loop: StepLoop) -> bool:
    """Whether the session still takes a sequence."""
    loop.session.open(0)
    loop.session.close(0)
    return loop.session.max_sequences > loop.lost
