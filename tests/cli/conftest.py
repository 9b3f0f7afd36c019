"""The command line over a scripted model: everything but llama.cpp is the real thing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from power_core.cli import cli
from power_core.drafter import Drafter
from power_core.plugins import PluginSet
from power_core.testing import RandomDrafter, ScriptedBackend, ScriptedTarget, ScriptedTokenizer, scripted_plugins

Power = Callable[..., Result]


class Toy:
    """What the installed plugins are in a test; change it before running a command."""

    def __init__(self, file: Path) -> None:
        self.target_options: dict[str, Any] = {"tokenizer": ScriptedTokenizer.chat(), "seed": 5, "order": 3}
        self.strategies: Mapping[str, Drafter] = {"random": RandomDrafter(105), "other": RandomDrafter(105, seed=1)}
        self.models = {"toy": file}
        self.more: list[Any] = []

    def target(self) -> ScriptedTarget:
        return ScriptedTarget(**self.target_options)

    def plugins(self) -> PluginSet:
        backend = ScriptedBackend(lambda _path: self.target())
        return scripted_plugins(
            targets={"scripted": backend}, strategies=self.strategies, models=self.models, more=self.more
        )


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """Scripted plugins in place of the installed ones, and a home and folder without configuration."""
    for name in [name for name in os.environ if name.startswith("POWER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("platformdirs.user_config_path", lambda name: tmp_path / "home" / name)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "toy.scripted"
    file.write_bytes(b"toy")
    toy = Toy(file)
    monkeypatch.setattr("power_core.cli.state.load_plugins", toy.plugins)
    return toy


@pytest.fixture
def power(toy: Toy) -> Power:
    """Runs a command: `power("generate", "hi", input="...")`."""

    def run(*args: str, **options: Any) -> Result:
        return CliRunner().invoke(cli, [str(arg) for arg in args], **options)

    return run
