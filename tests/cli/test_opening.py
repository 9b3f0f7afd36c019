"""What a terminal shows while a model is opened."""

from __future__ import annotations

import io

import pytest

from power_core.cli import progress
from power_core.errors import ArtifactError


class Terminal(io.StringIO):
    """A standard error that is a terminal, or is not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


class FailingRuntime:
    """A runtime whose model is not there."""

    def open(self, *, spec: str | None, deadline: object) -> None:
        raise ArtifactError("no such file")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_is_told_and_left_clean(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """The line is erased even where opening fails, and a file never gets it."""
    stderr = Terminal(is_terminal)
    monkeypatch.setattr("sys.stderr", stderr)
    with pytest.raises(ArtifactError):
        progress.open_engine(FailingRuntime())  # type: ignore[arg-type] # only `open` is used
    shown = stderr.getvalue()
    assert bool(shown) is is_terminal
    assert not is_terminal or shown.endswith("\r\x1b[K")
