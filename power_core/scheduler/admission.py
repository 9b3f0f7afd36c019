"""
Admission: one bounded, fair, cancel-safe queue in front of a model, its device and its memory.

A caller asks for a `Ticket` and waits on it; a granted ticket is a `Permit`: one active slot plus the bytes its
request can at worst take, until it is released. The same path serves unfinished loads, device turns
and requests, each with a controller of its own; `Deadline` is what they share: one point in time that
every wait, the queue, the load and the decoding count down to.

Everything is decided under one lock and nothing waits while holding it. Time comes from an injected
monotonic clock, so that behaviour can be tested without waiting for it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum, auto
from types import TracebackType

from attrs import define, frozen

from power_core.errors import DeadlineError, QueueFullError, RequestCancelledError, RequestError, TooLargeError

__all__ = ["AdmissionController", "AdmissionCounters", "Deadline", "Permit", "Ticket"]

Clock = Callable[[], float]
_NEVER = float("inf")


@frozen
class Deadline:
    """
    A point on a monotonic clock by which everything a request waits for must have happened.

    >>> Deadline.after(None).remaining() is None
    True
    """

    at: float = _NEVER
    clock: Clock = time.monotonic

    @classmethod
    def after(cls, seconds: float | None, clock: Clock = time.monotonic) -> Deadline:
        """
        A deadline *seconds* from now; None for no deadline.

        Raises:
            RequestError: Not a number.
        """
        try:
            at = _NEVER if seconds is None else float(clock() + seconds)
        except (TypeError, OverflowError):
            at = math.nan
        if math.isnan(at):
            what = f"the deadline is {seconds!r:.80}"
            raise RequestError(what, who="admission", got=seconds, expected="seconds, or None")
        return cls(at, clock)

    def remaining(self) -> float | None:
        """Seconds left, 0 where it has passed; None where there is no deadline."""
        return None if self.at == _NEVER else max(self.at - self.clock(), 0.0)

    @property
    def is_past(self) -> bool:
        """Whether it has passed."""
        return self.at != _NEVER and self.clock() >= self.at

    def check(self, doing: str) -> None:
        """
        Call between steps of long work.

        Raises:
            DeadlineError: It has passed.
        """
        if self.is_past:
            what = f"the deadline passed while {doing}"
            raise DeadlineError(what, who="admission", fix="allow it longer")


@define
class AdmissionCounters:
    """
    What became of every request. `submitted` is the sum of the others and of what waits or is active.

    Attributes:
        refused_full: Refused because the queue was full.
        refused_large: Refused because it could never fit.
    """

    submitted: int = 0
    granted: int = 0
    released: int = 0
    cancelled: int = 0
    expired: int = 0
    refused_full: int = 0
    refused_large: int = 0


class _State(Enum):
    WAITING = auto()
    GRANTED = auto()
    CANCELLED = auto()
    EXPIRED = auto()
    RELEASED = auto()


class Permit:
    """
    A granted place. Use as a context manager, or call `release` (once or more, from any thread).

    Attributes:
        reserved_bytes: Bytes set aside for it.
        deadline: Of the request.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self.reserved_bytes = ticket.reserved_bytes
        self.deadline = ticket.deadline

    def release(self) -> None:
        """Give the place and the bytes back. Idempotent."""
        self._ticket.cancel()

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Ticket:
    """
    A place in the queue. Made by `AdmissionController.submit`.

    Attributes:
        client: Key that turns are shared out by.
        reserved_bytes: Bytes that will be set aside when it is granted.
        deadline: Of the request.
    """

    def __init__(self, controller: AdmissionController, client: str, reserved_bytes: int, deadline: Deadline) -> None:
        self._controller = controller
        self._state = _State.WAITING
        self.client = client
        self.reserved_bytes = reserved_bytes
        self.deadline = deadline

    def poll(self) -> Permit | None:
        """
        The permit where it has been granted, without waiting.

        Raises:
            DeadlineError: The deadline passed first.
            RequestCancelledError: `cancel` was called.
        """
        return self._controller._poll(self)  # noqa: SLF001 - a ticket is its controller's handle

    def wait(self) -> Permit:
        """
        Wait for the permit, at most until the deadline. An interrupted wait gives the place up.

        Raises:
            DeadlineError: The deadline passed first.
            RequestCancelledError: `cancel` was called, from another thread.
        """
        return self._controller._wait(self)  # noqa: SLF001 - the same

    @property
    def is_granted(self) -> bool:
        """Whether a permit is held under it."""
        return self._state is _State.GRANTED

    @property
    def is_expired(self) -> bool:
        """Whether its deadline passed in the queue, and the controller has noticed."""
        return self._state is _State.EXPIRED

    def cancel(self) -> None:
        """Leave the queue, or give the granted place back. Idempotent, from any thread."""
        self._controller._leave(self)  # noqa: SLF001 - the same


class AdmissionController:
    """
    Grants places first come first served, each client key in turn.

    Turns go round the client keys that wait, so that one client's hundred requests do not hold up
    another's one. The head of the queue waits until its bytes are free: a small request never
    overtakes a large one for ever.

    Args:
        max_active: Places granted at the same time.
        max_waiting: Places in the queue.
        max_per_client: Places in the queue that one client key may hold; None for no bound but `max_waiting`.
        max_bytes: Bytes that may be reserved at the same time; None for no bound.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_active: int,
        max_waiting: int,
        max_per_client: int | None = None,
        max_bytes: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.max_active = max_active
        self.max_waiting = max_waiting
        self.max_per_client = max_per_client
        self.max_bytes = max_bytes
        self.clock = clock
        self.counters = AdmissionCounters()
        self._changed = threading.Condition()
        self._queues: OrderedDict[str, deque[Ticket]] = OrderedDict()  # client -> its queue; first key has the turn
        self._waiting = 0
        self._active = 0
        self._reserved = 0
        self._soonest = _NEVER  # no place in the queue expires before; spares looking at each of them

    # -- what there is ----------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Places in the queue."""
        return self._waiting

    @property
    def active(self) -> int:
        """Places granted and not released."""
        return self._active

    @property
    def reserved_bytes(self) -> int:
        """Bytes set aside for granted places."""
        return self._reserved

    # -- asking -----------------------------------------------------------------------------------

    def submit(self, client: str = "", *, reserve_bytes: int = 0, timeout: float | None = None,
               deadline: Deadline | None = None) -> Ticket:  # fmt: skip
        """
        Queue a request; it may be granted at once.

        Args:
            client: Key that turns are shared out by.
            reserve_bytes: The most bytes it can take: KV cache, snapshots, a load.
            timeout: Seconds for everything, this wait included.
            deadline: The same as a deadline that already runs, from an earlier wait.

        Raises:
            QueueFullError: No place is left in the queue.
            TooLargeError: It could not even run alone.
            DeadlineError: The deadline has already passed.
        """
        deadline = Deadline.after(timeout, self.clock) if deadline is None else deadline
        if reserve_bytes < 0:
            raise RequestError(f"{reserve_bytes} bytes to reserve", who="admission", got=reserve_bytes, expected=">= 0")
        with self._changed:
            self.counters.submitted += 1
            self._expire()
            self._check_fits(reserve_bytes)
            if deadline.is_past:
                self.counters.expired += 1
                deadline.check("being queued")
            ticket = Ticket(self, client, reserve_bytes, deadline)
            self._check_room(ticket)
            self._queues.setdefault(client, deque()).append(ticket)
            self._waiting += 1
            self._soonest = min(self._soonest, deadline.at)
            self._grant()
            return ticket

    def acquire(self, client: str = "", *, reserve_bytes: int = 0, timeout: float | None = None,
                deadline: Deadline | None = None) -> Permit:  # fmt: skip
        """`submit` and `wait` in one."""
        return self.submit(client, reserve_bytes=reserve_bytes, timeout=timeout, deadline=deadline).wait()

    def acquire_now(self, client: str = "", *, reserve_bytes: int = 0) -> Permit | None:
        """A permit where nobody has to be waited for, else None."""
        with self._changed:
            if self._waiting or self._active >= self.max_active:
                return None
            if self.max_bytes is not None and self._reserved + reserve_bytes > self.max_bytes:
                return None
            return self.submit(client, reserve_bytes=reserve_bytes).poll()

    def expire(self) -> int:
        """Drop what has waited past its deadline; returns how many. `poll` and `submit` do it too."""
        with self._changed:
            return self._expire()

    def _check_fits(self, reserve_bytes: int) -> None:
        if self.max_bytes is not None and reserve_bytes > self.max_bytes:
            self.counters.refused_large += 1
            raise TooLargeError(
                f"it can take {reserve_bytes} bytes", who="admission", got=reserve_bytes,
                expected=f"at most {self.max_bytes}", fix="shorten the context, or allow more memory",
            )  # fmt: skip

    def add_places(self, count: int) -> None:
        """So many places more from now on, or fewer: what a place stands for has come or gone."""
        with self._changed:
            self.max_active += count
            self._grant()

    # -- under the lock ---------------------------------------------------------------------------

    def _check_room(self, ticket: Ticket) -> None:
        """Refuse *ticket* where it would have to wait and there is no place to."""
        if self._is_free(ticket):
            return
        held, most = self._waiting, self.max_waiting
        if held < most and self.max_per_client is not None:
            held, most = len(self._queues.get(ticket.client, ())), self.max_per_client
        if held >= most:
            self.counters.refused_full += 1
            raise QueueFullError(
                f"{held} requests are waiting", who="admission", got=held, expected=f"at most {most}",
                fix="try again later",
            )  # fmt: skip

    def _is_free(self, ticket: Ticket) -> bool:
        """Whether *ticket* could be granted at once: nobody waits before it, and there is room."""
        return self._waiting == 0 and self._has_room(ticket)

    def _has_room(self, ticket: Ticket) -> bool:
        has_bytes = self.max_bytes is None or self._reserved + ticket.reserved_bytes <= self.max_bytes
        return self._active < self.max_active and has_bytes

    def _grant(self) -> None:
        """Grant from the head of the queue as long as there is room."""
        granted = False
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            ticket = queue[0]
            if not self._has_room(ticket):
                break
            queue.popleft()
            self._waiting -= 1
            self._queues.move_to_end(client)  # the next turn is another client's
            if not queue:
                del self._queues[client]
            ticket._state = _State.GRANTED  # noqa: SLF001 - the controller owns its tickets
            self._active += 1
            self._reserved += ticket.reserved_bytes
            self.counters.granted += 1
            granted = True
        if granted:
            self._changed.notify_all()

    def _expire(self) -> int:
        if self._soonest == _NEVER or self.clock() < self._soonest:
            return 0
        late = [ticket for queue in self._queues.values() for ticket in queue if ticket.deadline.is_past]
        for ticket in late:
            self._withdraw(ticket, _State.EXPIRED)
        waiting = (ticket.deadline.at for queue in self._queues.values() for ticket in queue)
        self._soonest = min(waiting, default=_NEVER)
        if late:
            self.counters.expired += len(late)
            self._grant()
            self._changed.notify_all()
        return len(late)

    def _next_expiry(self) -> float | None:
        """Seconds until a place in the queue expires, which may let others forward; None where none can."""
        times = [ticket.deadline.remaining() for queue in self._queues.values() for ticket in queue]
        return min((seconds for seconds in times if seconds is not None), default=None)

    def _withdraw(self, ticket: Ticket, state: _State) -> None:
        queue = self._queues[ticket.client]
        queue.remove(ticket)
        if not queue:
            del self._queues[ticket.client]
        self._waiting -= 1
        ticket._state = state  # noqa: SLF001 - the controller owns its tickets

    # -- what tickets call ------------------------------------------------------------------------

    def _poll(self, ticket: Ticket) -> Permit | None:
        with self._changed:
            self._expire()
            state = ticket._state  # noqa: SLF001 - the controller owns its tickets
            if state is _State.GRANTED:
                return Permit(ticket)
            if state is _State.EXPIRED:
                raise DeadlineError("the deadline passed in the queue", who="admission", fix="allow it longer")
            if state is not _State.WAITING:
                raise RequestCancelledError("cancelled in the queue", who="admission")
            return None

    def _wait(self, ticket: Ticket) -> Permit:
        try:
            with self._changed:
                while (permit := self._poll(ticket)) is None:
                    self._changed.wait(self._next_expiry())
                return permit
        except BaseException:
            ticket.cancel()  # an interrupt must not leave a place that nobody holds
            raise

    def _leave(self, ticket: Ticket) -> None:
        with self._changed:
            state = ticket._state  # noqa: SLF001 - the controller owns its tickets
            if state is _State.WAITING:
                self._withdraw(ticket, _State.CANCELLED)
                self.counters.cancelled += 1
            elif state is _State.GRANTED:
                ticket._state = _State.RELEASED  # noqa: SLF001 - the same
                self._active -= 1
                self._reserved -= ticket.reserved_bytes
                self.counters.released += 1
            else:
                return
            self._grant()
            self._changed.notify_all()
