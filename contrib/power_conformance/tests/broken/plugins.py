"""Plugins that break one rule each: a package on disk with its metadata, and what to change in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import invalidate_caches
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

PLUGIN = '''
"""The plugin."""
from __future__ import annotations
from power_core.hookspecs import hookimpl
from power_good.config import GoodConfig

COUNTER = iter(range(1000))


def make_target(config: GoodConfig) -> object:
    from power_good.parts import Backend
    return Backend()


def make_drafter(config: GoodConfig) -> object:
    from power_good.parts import Drafter
    return Drafter()


@hookimpl
def power_register_targets(register: object) -> None:
    register("good", make_target, config=GoodConfig)


@hookimpl
def power_register_strategies(register: object) -> None:
    register("good", make_drafter, config=GoodConfig, zero_weight=True, description="Says nothing.")


@hookimpl
def power_register_models(register: object) -> None:
    from power_core.hookspecs import ModelSource
    from power_good.models import locate
    register("good", ModelSource(locate, description="No model."))


@hookimpl
def power_register_contracts(register: object) -> None:
    from power_good.parts import Contract
    register("good", Contract)


@hookimpl
def power_register_fixtures(register: object) -> None:
    register("good", make_target, kind="artifact")


@hookimpl
def power_register_commands(register: object) -> None:
    register("good", "power_good.cli:good", help="Does nothing.")
'''
CONFIG = '''
from attrs import field, frozen


@frozen
class GoodConfig:
    """
    Options.

    Args:
        depth: How deep.
    """

    depth: int = 4
'''
PARTS = """
from power_core.drafter import DrafterRequirements
from power_core.errors import ArtifactError


class Contract:
    kind = "good"


class Backend:
    def claims(self, path):
        return path.is_file() and path.suffix == ".good"

    def load(self, path):
        raise ArtifactError("no good file", who="good", where=str(path))


class Drafter:
    def requirements(self):
        return DrafterRequirements()

    def open(self, model, session):
        raise NotImplementedError
"""
MODELS = """
from power_core.errors import ArtifactError


def locate():
    raise ArtifactError("not there", who="good", fix="pip install power-good-model")
"""
CLI = '''
import click


@click.command()
def good():
    """Does nothing."""
'''
METADATA = """\
Metadata-Version: 2.4
Name: power-good
Version: 1.0
Summary: A plugin that keeps every rule
License-Expression: Apache-2.0
Requires-Python: >=3.11
Requires-Dist: power-core
"""
FILES: Mapping[str, str] = {
    "power_good/__init__.py": "",
    "power_good/py.typed": "",
    "power_good/plugin.py": PLUGIN,
    "power_good/config.py": CONFIG,
    "power_good/parts.py": PARTS,
    "power_good/models.py": MODELS,
    "power_good/cli.py": CLI,
    "power_good-1.0.dist-info/METADATA": METADATA,
    "power_good-1.0.dist-info/entry_points.txt": "[power]\ngood = power_good.plugin\n",
}
Edit = Callable[[dict[str, str]], None]


def replace(file: str, old: str, new: str) -> Edit:
    """The good plugin with *old* in *file* replaced by *new*."""

    def edit(files: dict[str, str]) -> None:
        path = next(name for name in files if name.endswith(file))
        assert old in files[path], f"{old!r} is not in {file}"
        files[path] = files[path].replace(old, new)

    return edit


def without_marker(files: dict[str, str]) -> None:
    del files["power_good/py.typed"]


def silent(files: dict[str, str]) -> None:
    files["power_good/plugin.py"] = PLUGIN.partition("@hookimpl")[0]


BROKEN: Mapping[str, Edit] = {
    "P-LOAD-01": replace("plugin.py", 'register("good", make_drafter, config', 'register("off", make_drafter, config'),
    "P-NAME-01": replace("METADATA", "Name: power-good", "Name: goodness"),
    "P-META-01": replace("METADATA", "Requires-Dist: power-core", "Requires-Dist: attrs"),
    "P-TYPED-01": without_marker,
    "P-TYPED-02": replace("plugin.py", "make_target(config: GoodConfig) -> object", "make_target(config: GoodConfig)"),
    "P-LAZY-01": replace("plugin.py", "COUNTER =", "import numpy\nCOUNTER ="),
    "P-HOOK-01": replace("plugin.py", "@hookimpl\ndef power_register_models", "def power_register_models"),
    "P-HOOK-02": silent,
    "P-HOOK-03": replace("plugin.py", 'register("good", "power_good', 'register(f"good-{next(COUNTER)}", "power_good'),
    "P-CONFIG-01": replace("config.py", "import field, frozen", "import define as frozen"),
    "P-CONFIG-02": replace("config.py", "depth: How deep.", "width: How wide."),
    "P-FACTORY-01": replace("parts.py", "def open", "def start"),
    "P-FACTORY-02": replace("parts.py", "DrafterRequirements()", 'DrafterRequirements(artifact_kind="head")'),
    "P-DOCS-01": replace("plugin.py", ', description="Says nothing."', ""),
    "P-BACKEND-01": replace("parts.py", "path.is_file() and path.suffix", "path.read_bytes() and path.suffix"),
    "P-BACKEND-02": replace("parts.py", 'raise ArtifactError("no good file"', 'raise MemoryError("no good file"'),
    "P-CONTRACT-01": replace("parts.py", 'kind = "good"', 'kind = "better"'),
    "P-MODEL-01": replace("models.py", ', fix="pip install power-good-model"', ""),
    "P-COMMAND-01": replace("cli.py", "@click.command()\n", ""),
}


@contextmanager
def on_disk(folder: Path, edit: Edit | None = None) -> Iterator[EntryPoint]:
    """The plugin, changed by *edit*, importable while the block runs; its entry point."""
    files = dict(FILES)
    if edit is not None:
        edit(files)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path.insert(0, str(folder))
    invalidate_caches()
    try:
        [distribution] = distributions(path=[str(folder)])
        [point] = distribution.entry_points
        yield point
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "power_good"]:
            del sys.modules[name]
