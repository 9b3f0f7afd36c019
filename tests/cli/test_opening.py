"""What a terminal, a log and a library are told while a model is opened, and what is refused before it takes long."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import structlog

from power_core import user_cache
from power_core.cli import progress
from power_core.cli.state import State
from power_core.config import PowerConfig
from power_core.errors import ArtifactError, ConfigError
from power_core.runtime import MEASURED, MEASURING, Runtime
from power_core.target import SessionOptions
from power_core.testing import ScriptedTarget, ScriptedTokenizer


class Terminal(io.StringIO):
    """A standard error that is a terminal, or is not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


class FailingRuntime:
    """A runtime whose model is not there."""

    def open(self, *, spec: str | None, deadline: object, check: object) -> None:
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


@pytest.fixture
def measuring(toy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A toy whose backend looks for widths that nobody has measured."""
    monkeypatch.setenv("POWER_CACHE_DIR", str(tmp_path))
    open_session = ScriptedTarget.open_session

    def measure(target: ScriptedTarget, options: SessionOptions) -> Any:
        user_cache.load("headers", {"never": "stored"})
        user_cache.load(user_cache.PROBES, {"never": "stored"})
        return open_session(target, options)

    monkeypatch.setattr(ScriptedTarget, "open_session", measure)
    return toy


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_has_one_line_where_widths_are_measured(
    measuring: Any, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """What takes long is said where no terminal shows it, with the settings that made it necessary."""
    stderr = Terminal(is_terminal)
    monkeypatch.setattr("sys.stderr", stderr)
    with State().runtime({"ctx": 64}) as runtime:
        progress.open_engine(runtime)
    lines = [line for line in stderr.getvalue().splitlines() if "widths" in line.replace(progress._OPENING, "")]
    assert len(lines) == (0 if is_terminal else 1)
    assert is_terminal or [part for part in (MEASURING, "ctx", "64", "rows", "9", "toy") if part not in lines[0]] == []


def test_a_library_can_hear_of_a_measurement(measuring: Any) -> None:
    """Its begin and its end are events at level info, with the model and the row counts; opening again has none."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    with (
        structlog.testing.capture_logs() as logs,
        Runtime(PowerConfig(spec_draft_max=3), measuring.plugins()) as runtime,
    ):
        runtime.open("toy", parallel=2, context_size=32)
        begun, ended = logs
        user_cache.store(user_cache.PROBES, {"never": "stored"}, "known")
        runtime.open("toy")
        assert logs == [begun, ended]
    facts = {"model": "toy", "ctx": 32, "rows": 8, "threads": None, "log_level": "info"}
    assert begun == {"event": MEASURING, **facts}
    assert 0 <= ended.pop("seconds") < 60
    assert ended == {"event": MEASURED, **facts}


def test_a_library_hears_nothing_unless_it_asks(measuring: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Unconfigured, neither stream gets what is no warning."""
    with Runtime(PowerConfig(), measuring.plugins()) as runtime:
        runtime.open("toy")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "args",
    [
        ("generate", "abc", "--ctx", "3"),
        ("generate", "abc", "--logit-bias", "99999=1"),
        ("generate", "abc", "--stop-id", "99999"),
        ("generate", "abc", "--logprobs", "99999"),
        ("generate", "abc", "--raw", "--system", "s"),
        ("verify", "a", "abc", "--ctx", "3"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_served_is_said_before_widths_are_measured(
    power: Any, measuring: Any, args: tuple[str, ...]
) -> None:
    """Nobody waits a minute to hear that a prompt does not fit: one line, and no measurement."""
    result = power(*args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert MEASURING not in result.stderr


def test_a_context_holds_a_prompt_of_its_size_and_one_token_more(power: Any, toy: Any) -> None:
    """No number of positions is too small by itself: the smallest context has an answer for one token."""
    toy.target_options["tokenizer"] = ScriptedTokenizer([b"a", b"b", b"c", b"d"])
    found = json.loads(power("generate", "a", "--ctx", "1", "--spec", "off", "--json").stdout)
    assert (found["prompt_token_ids"], len(found["token_ids"]), found["finish_reason"]) == ([0], 1, "length")
    assert "the prompt has 2 tokens (expected at most 1)" in power("generate", "ab", "--ctx", "1").stderr


@pytest.mark.parametrize("config", [{"model": "toy"}, "power.toml", 5])
def test_a_runtime_wants_a_configuration(toy: Any, config: Any) -> None:
    """A table or a path is what a newcomer may well give it: the line says what makes one of them a configuration."""
    with pytest.raises(ConfigError, match=r"expected a PowerConfig.*load_config\(path="):
        Runtime(config, toy.plugins())


@pytest.mark.parametrize("deadline", [5.0, -1, "soon"])
def test_a_deadline_is_a_point_in_time(toy: Any, deadline: Any) -> None:
    """Seconds are not one until they begin to run, and the line says how they do."""
    with (
        Runtime(PowerConfig(), toy.plugins()) as runtime,
        pytest.raises(ConfigError, match=r"Deadline\.after\(SECONDS"),
    ):
        runtime.open("toy", deadline=deadline)
