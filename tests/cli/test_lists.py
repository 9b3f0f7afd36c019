"""`power plugins`, `power models` and `power doctor`: what is there, what is broken, what would help."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import Result

from power_core import models, user_cache
from power_core.cli.doctor import break_even
from power_core.errors import BackendError
from power_core.hookspecs import hookimpl
from power_core.names import NAME_RULE
from power_core.plugins import PluginFailure, load_plugins
from power_core.testing import ScriptedBackend, ScriptedTarget, inline_plugin, padded_class

Power = Callable[..., Result]


class Heavy:
    """A plugin whose strategy loads an artifact of a kind it has the contract of."""

    @hookimpl
    def power_register_strategies(self, register: Any) -> None:
        register("heavy", lambda config, artifact: 1 / 0, artifact_kind="dflash-v1")

    @hookimpl
    def power_register_contracts(self, register: Any) -> None:
        register("dflash-v1", lambda: 1 / 0)


def test_plugins_lists_what_each_provides(power: Power, toy: Any) -> None:
    """Names by kind; nothing is made to find them out."""
    toy.more = [inline_plugin("heavy", Heavy())]
    listed = json.loads(power("plugins", "--json").stdout)["plugins"]
    found = {item["name"]: item["provides"] for item in listed}
    assert (found["scripted"]["targets"], found["scripted"]["models"]) == (["scripted"], ["toy"])
    assert found["scripted"]["strategies"] == ["other", "random"]
    assert found["scripted"]["artifact_kinds"] == []
    assert found["heavy"]["artifact_kinds"] == ["dflash-v1"]


def test_plugins_shows_failed_and_blocked_ones(power: Power, toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure stands in the list with its cause, a blocked plugin with its name, and neither is an error."""
    plugins = toy.plugins()
    plugins.failures.append(PluginFailure("bad", "power-bad", "0.1", "ModuleNotFoundError: No module named 'x'"))
    plugins.blocked.append("slow")
    monkeypatch.setattr("power_core.cli.state.load_plugins", lambda: plugins)
    found = json.loads(power("plugins", "--json").stdout)
    assert (found["failed"][0]["name"], found["blocked"]) == ("bad", ["slow"])
    lines = power("plugins").stdout
    assert "FAILED: ModuleNotFoundError: No module named 'x'" in lines
    assert "blocked by POWER_BLOCK_PLUGINS" in lines
    assert "failed to load: ModuleNotFoundError" in power("doctor").stdout


def test_a_name_that_blocks_nothing_is_shown(power: Power, toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution's name is no plugin's: who blocked it would think that it is out."""
    toys = inline_plugin("toys", object())
    monkeypatch.setattr(
        "power_core.cli.state.load_plugins", lambda: load_plugins([toys], {"POWER_BLOCK_PLUGINS": "toys,power-toys"})
    )
    found = json.loads(power("plugins", "--json").stdout)
    assert (found["blocked"], found["blocked_in_vain"]) == (["toys"], ["power-toys"])
    assert "in POWER_BLOCK_PLUGINS, but no plugin's name" in power("plugins").stdout
    assert "names 'power-toys', and no installed plugin has that name" in power("doctor").stdout


def test_models_can_be_added_used_and_removed(power: Power, toy: Any, tmp_path: Path) -> None:
    """An added model is listed beside the registered ones and opens by its name."""
    mine = tmp_path / "mine.scripted"
    mine.write_bytes(b"mine")
    assert power("models", "add", "mine", mine).exit_code == 0
    listed = json.loads(power("models", "--json").stdout)
    assert [(item["name"], item["path"]) for item in listed["models"]] == [
        ("toy", str(tmp_path / "toy.scripted")), ("mine", str(mine))
    ]  # fmt: skip
    assert listed["default"] == "toy"
    assert power("generate", "abc", "--model", "mine", "--max-tokens", "2").exit_code == 0
    again = power("models", "add", "mine", mine)
    assert "already registered by the user" in again.stderr
    assert power("models", "remove", "mine").exit_code == 0
    assert [item["name"] for item in json.loads(power("models", "--json").stdout)["models"]] == ["toy"]
    assert mine.exists()


def test_a_record_that_cannot_be_kept_is_one_line(
    power: Power, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is none, one that cannot be written and a damaged record: each says which file, and why."""
    home = tmp_path / "home"
    home.write_bytes(b"")
    assert "models.json: cannot be read: Not a directory" in power("models").stderr
    home.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("power_core.models.tempfile.mkstemp", Mock(side_effect=PermissionError(13, "Permission denied")))
        refused = power("models", "add", "mine", "toy.scripted")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "models.json: cannot be written: Permission denied" in refused.stderr
    (home / "power" / "models.json").write_text("[" * 100_000)
    assert "models.json: not JSON" in power("models").stderr


@pytest.mark.parametrize(("path", "said"), [
    ("notes.txt", "notes.txt: no target backend knows this format; asked: scripted"),
    ("folder", "folder: no target backend knows this format; asked: scripted"),
    ("pipe.scripted", "pipe.scripted: not a regular file"),
    ("~no-such-user/m.scripted", "~no-such-user/m.scripted: "),
    ("x" * 300 + ".scripted", "File name too long"),
])  # fmt: skip
def test_what_no_backend_claims_is_not_added(power: Power, tmp_path: Path, path: str, said: str) -> None:
    """The backends that were asked are named, nothing is waited for, and nothing is recorded."""
    (tmp_path / "notes.txt").write_text("hi")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.scripted")
    result = power("models", "add", "mine", path)
    assert (result.exit_code, result.stderr.count("\n"), result.stdout) == (2, 1, "")
    assert said in result.stderr
    assert [item["name"] for item in json.loads(power("models", "--json").stdout)["models"]] == ["toy"]


@pytest.mark.parametrize("name", ["größe", "модель", ".hidden", "a b", "-x", "a" * 101, ""])
@pytest.mark.parametrize("command", [("models", "add"), ("artifacts", "admit")], ids=" ".join)
def test_a_name_that_is_none_is_told_the_rule(power: Power, command: tuple[str, str], name: str) -> None:
    """Letters of other alphabets are letters, too: the line says which are meant, and that a mark does not begin."""
    said = ("--target", "toy", "--source", "s", "--revision", "r", "--license", "l")
    end = ("--", name, "toy.scripted") if command[0] == "models" else ("toy.scripted", *said, f"--name={name}")
    result = power(*command, *end)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"no {command[0][:-1]} name" in result.stderr
    assert NAME_RULE in result.stderr


def test_json_of_the_group_is_that_of_its_commands(power: Power) -> None:
    """`models --json add` means what `models add --json` means."""
    assert json.loads(power("models", "--json", "add", "mine", "toy.scripted").stdout)["added"] == "mine"
    assert json.loads(power("models", "--json", "remove", "mine").stdout) == {"removed": "mine"}
    assert power("models", "add", "mine", "toy.scripted").stdout.startswith("added mine")


def test_no_backend_is_made_that_is_not_asked(power: Power, toy: Any) -> None:
    """Some take seconds to import: a file that is not there, or is the first one's, needs none of them."""

    class Slow:
        @hookimpl
        def power_register_targets(self, register: Any) -> None:
            register("slow", Mock(side_effect=AssertionError("made")))

    toy.more = [inline_plugin("slow", Slow())]
    assert "no such file" in power("models", "add", "mine", "none.scripted").stderr
    assert power("models", "add", "mine", "toy.scripted").stdout.startswith("added mine")


def test_a_folder_that_a_backend_claims_is_a_model(power: Power, tmp_path: Path) -> None:
    """Some models are folders: they are added and found as files are."""
    (tmp_path / "folder.scripted").mkdir()
    assert power("models", "add", "mine", "folder.scripted").exit_code == 0
    assert str(models.added_models()["mine"].locate()) == str(tmp_path / "folder.scripted")


def test_models_added_at_once_are_all_kept(toy: Any, tmp_path: Path) -> None:
    """Two that read the same record would each write it back without the other's."""
    backends = [("scripted", ScriptedBackend())]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: models.add_model(f"m{i}", tmp_path / "toy.scripted", {}, backends), range(16)))
    assert sorted(models.added_models()) == sorted(f"m{i}" for i in range(16))


def test_models_whose_file_is_gone_say_so(power: Power, tmp_path: Path) -> None:
    """One model that cannot be found does not hide the others."""
    mine = tmp_path / "mine.scripted"
    mine.write_bytes(b"mine")
    power("models", "add", "mine", mine)
    mine.unlink()
    result = power("models")
    assert result.exit_code == 0
    assert "toy (default)" in result.stdout
    assert "the file of model 'mine' is gone" in result.stdout
    assert "power models remove mine" in power("generate", "x", "--model", "mine").stderr


def test_damaged_record_of_models_is_one_line(power: Power, tmp_path: Path) -> None:
    """A record that is no JSON, or not a table, names its file."""
    record = tmp_path / "home" / "power" / "models.json"
    record.parent.mkdir(parents=True)
    for content in ("{", "[1]", '{"a": 1}'):
        record.write_text(content)
        result = power("models")
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert str(record) in result.stderr


def test_doctor_reports_classes_costs_and_break_even(power: Power) -> None:
    """The level, each width's cost, and the acceptance above which a proposal of that width pays."""
    report = json.loads(power("doctor", "--json").stdout)
    assert report["exactness"]["level"] == "bitwise"
    decode = report["exactness"]["decode"]
    assert len(decode["widths"]) == len(decode["break_even"])
    assert decode["break_even"][0] is None
    assert "exactness: bitwise" in power("doctor").stdout


def test_doctor_names_the_width_policy(power: Power, tmp_path: Path) -> None:
    """That of the configuration; a contradiction is a problem."""
    assert "width policy: cost-aware" in power("doctor").stdout
    (tmp_path / "power.toml").write_text("spec_mtp_adaptive = true\n")
    assert json.loads(power("doctor", "--json").stdout)["exactness"]["width_policy"] == "adaptive"
    (tmp_path / "power.toml").write_text('spec_mtp_adaptive = true\nspec_width_policy = "fixed"\n')
    assert "problem: config: spec_mtp_adaptive is set and spec_width_policy is 'fixed'" in power("doctor").stdout


@pytest.mark.parametrize("flags", [(), ("--reprobe",)])
def test_doctor_leaves_kept_measurements_aside_on_request(
    power: Power, toy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """With `--reprobe` a backend finds none of its width classes, and so measures them."""
    monkeypatch.setenv("POWER_CACHE_DIR", str(tmp_path))
    user_cache.store(user_cache.PROBES, {}, "kept")
    found, target = [], toy.target
    monkeypatch.setattr(toy, "target", lambda: found.append(user_cache.load(user_cache.PROBES, {})) or target())
    assert power("doctor", *flags).exit_code == 0
    assert found == ([None] if flags else ["kept"])


def test_doctor_advises_on_a_padded_target(power: Power, toy: Any) -> None:
    """A level that costs speed is explained."""
    toy.target_options["profile"] = padded_class()
    result = power("doctor")
    assert result.exit_code == 0
    assert "exactness: padded" in result.stdout
    assert "advice: single rows are padded" in result.stdout


def test_doctor_passes_on_what_the_backend_advises(power: Power, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to do about a build only its backend can know; its sentences are shown among the advice."""
    monkeypatch.setattr(ScriptedTarget, "facts", lambda self: {"build": "stock", "advice": ["build it with clang"]})
    report = json.loads(power("doctor", "--json").stdout)
    assert "build it with clang" in report["advice"]
    assert "advice" not in report["model"]
    assert report["model"]["build"] == "stock"


@pytest.mark.parametrize("error", [BackendError("no such device", who="scripted"), ZeroDivisionError("by zero")])
def test_doctor_reports_what_fails(power: Power, toy: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A model that cannot be opened is a finding: the rest is still reported, and the exit code is 1."""

    def failing() -> None:
        raise error

    monkeypatch.setattr(toy, "target", failing)
    result = power("doctor", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["model"]) == (1, None)
    assert any(str(error) in problem for problem in report["problems"])
    assert report["environment"]["python"]


def test_break_even_is_the_share_that_pays_for_the_rows() -> None:
    """(c(n) - 1) / (n - 1): nothing for one row, unknown where the cost is."""
    assert break_even(5, 3.0) == 0.5
    assert break_even(1, 1.0) is None
    assert break_even(4, None) is None
