"""
The requests of an engine: those that wait, all that have not ended by their numbers, and sums over those that have.

Several step loops may share one queue, each over a session of its own: whichever has a sequence free takes
the next request that is granted one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from attrs import Factory, define

from power_core.errors import BackendError, DeadlineError, PowerError
from power_core.request import GenerationRequest
from power_core.scheduler.admission import AdmissionController, Deadline
from power_core.scheduler.sequence import Sequence
from power_core.types import FinishReason

__all__ = ["MAX_WAITING", "RequestQueue", "Totals"]

MAX_WAITING = 1024  # requests that may wait where nobody says otherwise


@define
class Totals:
    """
    Sums over steps, and over requests that have ended.

    Attributes:
        steps: Forwards of the target.
        prefill_steps: Those of them that held prompt rows only.
        mixed_steps: Those that held prompt rows beside generated ones.
        widths: Rows computed -> how many steps.
        finished: Finish reason -> how many requests.
        expired: Requests whose deadline passed, in the queue or later.
        guarded: Requests whose proposals were bounded after a replay.
    """

    steps: int = 0
    prefill_steps: int = 0
    mixed_steps: int = 0
    widths: dict[int, int] = Factory(dict)
    finished: dict[str, int] = Factory(dict)
    expired: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    replays: int = 0
    rebuilds: int = 0
    guarded: int = 0

    def add(self, sequence: Sequence, reason: FinishReason, error: BaseException | None) -> None:
        """Count a request that has ended."""
        counts = sequence.counts
        self.finished[reason.value] = self.finished.get(reason.value, 0) + 1
        self.expired += isinstance(error, DeadlineError)
        self.prompt_tokens += sequence.num_prompt
        self.guarded += counts.guard is not None
        for name in ("reused", "emitted", "drafted", "accepted", "replays", "rebuilds"):
            setattr(self, name, getattr(self, name) + getattr(counts, name))


class RequestQueue:
    """
    Requests in the order they came, admitted by one controller.

    `put`, `cancel` and `progress` may be called from any thread, the rest belongs to the one that steps.

    Args:
        admission: Bounds what waits and what is active, and shares turns out; its places are sequences.
        deadline_s: Seconds for requests that have no deadline of their own; None for no bound.
    """

    def __init__(self, admission: AdmissionController, deadline_s: float | None = None) -> None:
        self.admission = admission
        self.deadline_s = deadline_s
        self.totals = Totals()
        self._numbers = itertools.count()
        self._waiting: deque[Sequence] = deque()
        self._by_id: dict[int, Sequence] = {}

    def __bool__(self) -> bool:
        return True  # also while nothing waits: a queue is no collection to be tested for content

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._by_id)

    def number(self) -> int:
        """A number for the next request."""
        return next(self._numbers)

    def deadline(self, request: GenerationRequest) -> Deadline:
        """When *request*, or a request that says nothing of it, must be done."""
        seconds = self.deadline_s if request.deadline_s is None else request.deadline_s
        if seconds is None or request.started_s is None:
            return Deadline.after(seconds, self.admission.clock)
        return Deadline(request.started_s + seconds, self.admission.clock)

    def put(self, sequence: Sequence) -> None:
        """
        Let *sequence* wait for its turn.

        Raises:
            QueueFullError: No place is left.
            DeadlineError: Its deadline has already passed.
        """
        request = sequence.request
        for waiting in list(self._waiting):
            if waiting.cancelled:  # it ends at the next step, which nobody may take: its place is free now
                waiting.ticket.cancel()
        sequence.ticket = self.admission.submit(request.client, deadline=sequence.deadline)
        self._by_id[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: int) -> None:
        """Ask for the end of a request, from any thread; unknown and finished ones are ignored."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            sequence.cancelled = True

    def progress(self, request_id: int) -> tuple[int, int]:
        """Prompt tokens evaluated and prompt tokens in all."""
        sequence = self._by_id.get(request_id)
        return (sequence.evaluated_prompt, sequence.num_prompt) if sequence else (0, 0)

    @property
    def has_granted(self) -> bool:
        """Whether a request that waits may be taken."""
        return any(sequence.ticket.is_granted for sequence in self._waiting)

    def take(self) -> Sequence | None:
        """The first request that has been granted a sequence; it waits no longer."""
        found = next((sequence for sequence in self._waiting if sequence.ticket.is_granted), None)
        if found is not None:
            self._waiting.remove(found)
        return found

    def put_back(self, sequence: Sequence) -> None:
        """What *sequence* was taken for broke off: it waits again, and its place is still granted."""
        self._waiting.appendleft(sequence)

    def ended(self) -> Iterator[tuple[Sequence, FinishReason, PowerError | None]]:
        """Requests that end without a sequence: cancelled, too late, empty, or with none left to be had."""
        self.admission.expire()
        is_lost = self.admission.max_active < 1
        for sequence in list(self._waiting):
            if sequence.cancelled:
                yield sequence, FinishReason.CANCELLED, None
            elif sequence.ticket.is_expired or sequence.deadline.is_past:
                yield sequence, FinishReason.ERROR, late("waiting for its turn")
            elif sequence.request.max_tokens == 0:
                yield sequence, FinishReason.LENGTH, None
            elif is_lost:
                yield sequence, FinishReason.ERROR, _no_sequence_left()

    def leave(self, sequence: Sequence) -> bool:
        """Forget *sequence*, which ends; returns whether it was still there. Its ticket is given back by the caller."""
        if self._by_id.pop(sequence.request_id, None) is None:
            return False
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        return True

    def clear(self) -> None:
        """Forget everything that has not ended, and give its places back."""
        for sequence in list(self._by_id.values()):
            self.leave(sequence)
            sequence.ticket.cancel()


def late(doing: str) -> DeadlineError:
    """The error of a request whose deadline passed while it was *doing* something."""
    return DeadlineError(f"the deadline passed while it was {doing}", who="request", fix="allow it longer")


def _no_sequence_left() -> BackendError:
    return BackendError(
        "every sequence of the session was lost to a close that failed", who="scheduler",
        fix="close the engine and open the model again",
    )  # fmt: skip
