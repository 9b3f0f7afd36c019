"""`power conformance` and `power new-plugin`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from broken import plugins
from click.testing import CliRunner, Result
from power_conformance import runner
from power_conformance.cli import conformance

from power_core.cli import cli
from power_core.cli.state import State
from power_core.errors import ReceiptError
from power_core.evidence import verify_file


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EntryPoint]:
    """The good plugin of `broken.plugins`, as the only one installed."""
    with plugins.on_disk(tmp_path / "site") as point:
        monkeypatch.setattr(runner, "entry_points", lambda group: [point])
        yield point


def run(*args: str) -> Result:
    return CliRunner().invoke(conformance, args, obj=State())


def test_prints_a_table(good: EntryPoint) -> None:
    """Each subject of each plugin has a line with its counts; all well is exit code 0."""
    result = run("good", "--rule", "P-NAME-01", "--rule", "P-COMMAND-01")
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.output.splitlines()] == [
        ["PLUGIN", "SUBJECT", "PASSED", "FAILED", "N/A"],
        ["good", "1.0", "plugin", "2", "0", "0"],
    ]


def test_a_broken_rule_is_exit_code_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is broken is told in full, and the shell hears of it."""
    with plugins.on_disk(tmp_path, plugins.BROKEN["P-TYPED-01"]) as point:
        monkeypatch.setattr(runner, "entry_points", lambda group: [point])
        result = run("good", "--rule", "P-TYPED-01")
    assert result.exit_code == 1
    assert "good, plugin: P-TYPED-01: " in result.output
    assert "look at:  PEP 561" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nobody"], "no installed distribution has the entry point 'nobody'"),
        (["--rule", "P-NAME-1"], "no rule 'P-NAME-1'; did you mean P-NAME-01?"),
    ],
)
def test_bad_input_is_one_line(args: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A plugin or a rule that does not exist is exit code 2 and says what does."""
    assert cli.main(["conformance", *args], standalone_mode=False) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_durations_name_the_slowest_rules(good: EntryPoint) -> None:
    """The slowest rule first, and the sum of all: P-LAZY-01 starts a process, P-NAME-01 compares three names."""
    rules = ["--rule", "P-NAME-01", "--rule", "P-LAZY-01", "--rule", "P-TYPED-01"]
    lines = [line.split() for line in run("good", *rules, "--durations", "1").output.splitlines()]
    assert lines[3] == ["PLUGIN", "SUBJECT", "RULE", "SECONDS"]
    assert lines[4][:4] == ["good", "1.0", "plugin", "P-LAZY-01"]
    assert lines[5][:2] == ["all", "3"]
    assert float(lines[5][2]) >= float(lines[4][4]) > 0


def report(good: EntryPoint, path: Path) -> dict[str, Any]:
    result = run("good", "--json", "--rule", "P-NAME-01", "--rule", "P-MODEL-01", "--seed", "5")
    path.write_text(result.output)
    document: dict[str, Any] = json.loads(result.output)
    return document


def test_the_document_says_what_was_run(good: EntryPoint, tmp_path: Path) -> None:
    """Plugin, rules, outcomes and the seed are in it."""
    body = report(good, tmp_path / "report.json")["body"]
    assert (body["seed"], body["selected"]) == ("5", ["P-NAME-01", "P-MODEL-01"])
    [plugin] = body["plugins"]
    assert (plugin["name"], plugin["distribution"], plugin["version"]) == ("good", "power-good", "1.0")
    assert [(rule["id"], rule["outcome"]) for rule in plugin["subjects"][0]["rules"]] == [
        ("P-NAME-01", "passed"),
        ("P-MODEL-01", "passed"),
    ]


def test_receipt_verify_finds_every_changed_byte(good: EntryPoint, tmp_path: Path) -> None:
    """The report verifies, and no byte of it can change unseen."""
    path = tmp_path / "report.json"
    report(good, path)
    assert "1.0: 2 passed, 0 failed, 0 not applicable" in verify_file(path).body.summary
    data = path.read_bytes().rstrip(b"\n")
    for i in range(0, len(data), 7):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        with pytest.raises(ReceiptError):
            verify_file(path)


def test_an_artifact_fixture_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract, its good file and its target are a subject of their own."""
    toy = (
        "from broken.contracts import Contract, good_file\n"
        '    register("toy", lambda folder: (Contract(), *good_file(folder)), kind="artifact")'
    )
    edit = plugins.replace("plugin.py", 'register("good", make_target, kind="artifact")', toy)
    with plugins.on_disk(tmp_path, edit) as point:
        monkeypatch.setattr(runner, "entry_points", lambda group: [point])
        result = run("good", "--rule", "A-GOOD-01", "--rule", "A-FACTS-01")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[1].split() == ["good", "1.0", "artifact", "toy", "2", "0", "0"]


def test_a_factory_that_raises_fails_its_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture that cannot be made is a finding, not a traceback."""
    broken = """register("tiny", lambda _folder: open("/no/such/disk"), kind="target")"""
    edit = plugins.replace("plugin.py", 'register("good", make_target, kind="artifact")', broken)
    with plugins.on_disk(tmp_path, edit) as point:
        monkeypatch.setattr(runner, "entry_points", lambda group: [point])
        result = run("good", "--rule", "T-LENGTH-01")
    assert result.exit_code == 1
    assert "its factory raised FileNotFoundError: " in result.output
