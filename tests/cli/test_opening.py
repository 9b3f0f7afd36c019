"""What a terminal shows while a model is opened."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from power_core import user_cache
from power_core.cli import progress
from power_core.config import PowerConfig
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


class MeasuringRuntime:
    """A runtime whose backend measures what nobody has measured."""

    config = PowerConfig(model="m", ctx=64)

    def open(self, *, spec: str | None, deadline: object) -> str:
        user_cache.load("headers", {"never": "stored"})
        user_cache.load(user_cache.PROBES, {"never": "stored"})
        return "engine"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_has_one_line_where_widths_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_terminal: bool
) -> None:
    """What takes long is said where no terminal shows it, with the settings that made it necessary."""
    monkeypatch.setenv("POWER_CACHE_DIR", str(tmp_path))
    stderr = Terminal(is_terminal)
    monkeypatch.setattr("sys.stderr", stderr)
    assert progress.open_engine(MeasuringRuntime()) == "engine"  # type: ignore[arg-type, comparison-overlap] # a stub
    lines = [line for line in stderr.getvalue().splitlines() if "measuring exact widths, once" in line]
    assert len(lines) == (0 if is_terminal else 1)
    assert is_terminal or ("ctx=64" in lines[0] and "draft_max=8" in lines[0])
