"""What an unfinished load reserves: the weights before they are read, a session's bytes before it is made."""

from __future__ import annotations

from power_core.errors import CapabilityError, TooLargeError
from power_core.scheduler.admission import AdmissionController, Deadline, Permit
from power_core.target import SessionOptions, SessionSizes, TargetModel

__all__ = ["LoadReservation"]


class LoadReservation:
    """
    Bytes set aside for one model.

    Args:
        memory: Where they are reserved; without a bound nothing is asked for.
        deadline: Until when memory is waited for; without one it is not waited for.

    Attributes:
        permits: What is reserved, until `release` or until the engine gives it back.
        session_permit: The one of them for the session; None before `session` and where memory has no bound.
        session_bytes: What one session can at most take; 0 where memory has no bound.
    """

    def __init__(self, memory: AdmissionController, deadline: Deadline) -> None:
        self._memory = memory
        self._deadline = deadline
        self.session_permit: Permit | None = None
        self.permits: list[Permit] = []
        self.session_bytes = 0

    @property
    def reserved(self) -> int:
        """Bytes reserved so far."""
        return sum(permit.reserved_bytes for permit in self.permits)

    def reserve(self, nbytes: int) -> None:
        """
        Set *nbytes* more aside.

        Raises:
            TooLargeError: They do not fit, or do not fit beside models that are open and are not waited for.
            DeadlineError: They were not free in time.
        """
        most = self._memory.max_bytes
        if most is None:
            return
        if self.reserved + nbytes > most:
            raise _too_large(self.reserved + nbytes, f"at most {most}", "shorten the context, or raise memory_limit")
        ticket = self._memory.submit(reserve_bytes=nbytes, deadline=self._deadline)
        if self._deadline.remaining() is None and ticket.poll() is None:
            ticket.cancel()
            free = most - self._memory.reserved_bytes
            raise _too_large(nbytes, f"at most {free} beside what is open", "close another model, or set a deadline")
        self.permits.append(ticket.wait())

    def session(self, model: TargetModel, options: SessionOptions) -> LoadReservation:
        """
        Set aside what a session of *options* can at most take; asked again, instead of what was set aside before.

        Raises:
            CapabilityError: Memory is bounded, and *model* cannot say what a session takes.
        """
        if self._memory.max_bytes is None:
            return self
        if not isinstance(model, SessionSizes):
            raise CapabilityError(
                "this target cannot say what a session takes", who="memory_limit", fix="leave memory_limit out"
            )
        if self.session_permit is not None:
            self.permits.remove(self.session_permit)
            self.session_permit.release()
            self.session_permit = None  # what follows may raise, and another strategy's session be asked for
        self.session_bytes = model.session_bytes(options)
        self.reserve(self.session_bytes)
        self.session_permit = self.permits[-1]
        return self

    def release(self) -> None:
        """Give everything back. Idempotent."""
        while self.permits:
            self.permits.pop().release()


def _too_large(nbytes: int, expected: str, fix: str) -> TooLargeError:
    return TooLargeError(f"the model can take {nbytes} bytes", who="open", got=nbytes, expected=expected, fix=fix)
