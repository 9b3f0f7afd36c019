"""The progress line of a prefill: on standard error, on a terminal, gone when the first token comes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from power_core.engine import Engine
    from power_core.runtime import Runtime
    from power_core.scheduler.admission import Deadline
    from power_core.target import TargetModel

__all__ = ["PrefillProgress", "open_engine"]


_OPENING = "loading the model; the first time on a machine its exact widths are measured ..."
_ERASE_LINE = "\r\x1b[K"


def open_engine(
    runtime: Runtime,
    spec: str | None = None,
    deadline: Deadline | None = None,
    check: Callable[[TargetModel], None] | None = None,
) -> Engine:
    """
    Open the configured model; arguments as of `Runtime.open`.

    On a terminal a line says so for as long as it takes. Elsewhere the log says when widths are measured, which takes
    longest: once for a model, a build and settings, so that another ``--ctx`` may bring it back.
    """
    if not sys.stderr.isatty():
        return runtime.open(spec=spec, deadline=deadline, check=check)
    sys.stderr.write(_OPENING)
    sys.stderr.flush()
    try:
        return runtime.open(spec=spec, deadline=deadline, check=check)
    finally:
        sys.stderr.write(_ERASE_LINE)


class PrefillProgress:
    """
    Shows how much of the prompt is evaluated.

    Args:
        enabled: Whether it may show anything; it never does where standard error is no terminal.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled and sys.stderr.isatty()
        self._shown: Progress | None = None
        self._task: TaskID | None = None

    def update(self, evaluated: int, total: int) -> None:
        """Redraw; the line appears with the first part of a prompt that takes more than one."""
        if not self._enabled or not 0 < evaluated < total:
            return
        if self._shown is None or self._task is None:
            self._shown, self._task = _started(total)
        self._shown.update(self._task, completed=evaluated, refresh=True)

    def done(self) -> None:
        """Remove the line, for good."""
        self._enabled = False
        if self._shown is not None:
            self._shown.stop()
            self._shown = None

    def __enter__(self) -> PrefillProgress:
        return self

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.done()


def _started(total: int) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("prompt"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Redrawn after each part: no thread competes with the decoder, and the output streams stay what they are.
    progress = Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    progress.start()
    return progress, progress.add_task("prompt", total=total)
