"""A request in flight, as its caller sees it: an iterator over its events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from power_core.errors import RequestError
from power_core.request import Event, Result

if TYPE_CHECKING:
    from power_core.engine import Engine

__all__ = ["Generation"]


class Generation:
    """
    One request's events, as an iterator; the last one has origin `end` and the result.

    Whichever thread asks for an event steps the engine for everybody. A generation that is dropped
    before its end is cancelled.
    """

    def __init__(self, engine: Engine, request_id: int, queue: deque[Event]) -> None:
        self._engine = engine
        self._queue = queue
        self.request_id = request_id
        self._result: Result | None = None

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._result is not None:
            raise StopIteration
        event = self._engine._next_event(self._queue)  # noqa: SLF001 - one class in two parts
        self._result = event.result
        return event

    def cancel(self) -> None:
        """Ask for the end; the closing event still comes. Callable from any thread."""
        self._engine.cancel(self.request_id)

    def drain(self) -> Result:
        """Run to the end and return the result, whatever it is."""
        for _ in self:
            pass
        return self.result

    def finish(self) -> Result:
        """
        Run to the end and return the result.

        Raises:
            PowerError: The request failed.
        """
        result = self.drain()
        if result.error is not None:
            raise result.error
        return result

    @property
    def is_finished(self) -> bool:
        """Whether the closing event has been read."""
        return self._result is not None

    @property
    def result(self) -> Result:
        """The result, once the events are exhausted."""
        if self._result is None:
            raise RequestError("the request has not finished", who=f"request {self.request_id}", fix="iterate first")
        return self._result

    def __del__(self) -> None:
        if self._result is None:
            self._engine._abandon(self.request_id)  # noqa: SLF001 - one class in two parts
