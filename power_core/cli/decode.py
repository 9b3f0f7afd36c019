"""Running one request to its end in a command: events as they come, Ctrl-C as a cancel."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from power_core.cli.progress import PrefillProgress

if TYPE_CHECKING:
    from power_core.engine import Engine
    from power_core.request import Event, GenerationRequest, Result

__all__ = ["run_request"]


def run_request(
    engine: Engine, request: GenerationRequest, on_event: Callable[[Event], None], *, progress: bool = False
) -> Result:
    """
    Decode *request* alone on *engine*.

    The first Ctrl-C cancels the request, which then ends with what was made; the second one interrupts.

    Args:
        on_event: Called for each event, the closing one included.
        progress: Show a progress line while the prompt is evaluated.

    Raises:
        PowerError: The request failed.
    """
    request_id = engine.submit(request)
    result: Result | None = None
    with PrefillProgress(progress) as line, _interrupts() as interrupted:
        while result is None:
            if interrupted.is_set():
                engine.cancel(request_id)
            for event in engine.step():
                line.done()
                on_event(event)
                result = event.result or result
            line.update(*engine.progress(request_id) if result is None else (0, 0))
    if result.error is not None:
        raise result.error
    return result


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """
    An event that the first Ctrl-C sets instead of raising.

    The step in flight ends on its own terms: an exception raised by a signal could fall anywhere.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield interrupted
        return

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
