"""The progress lines of a run."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from power_train.train import CurvePoint

__all__ = ["Watch"]


class Watch:
    """Bars on standard error, one for the text and one for training; a line a tenth where there is no terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[seen]}"), console=self._console, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}

    def __enter__(self) -> Watch:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()

    def generating(self, tokens: int, total: int) -> None:
        self._show("text", tokens, total, "tokens")

    def training(self, step: int, steps: int, point: CurvePoint) -> None:
        self._show("training", step, steps, f"loss {point.cross_entropy:.3f}, first {point.hits:.0%}")

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def _show(self, name: str, done: int, total: int, seen: str) -> None:
        tenth = 10 * done // total if total else 10
        if not self._console.is_terminal and tenth > self._tenths.get(name, -1):
            self._tenths[name] = tenth
            self.note(f"{name}: {min(done, total)} of {total}, {seen}")
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, seen=seen)
        self._bars.update(self._tasks[name], completed=min(done, total), seen=seen)
