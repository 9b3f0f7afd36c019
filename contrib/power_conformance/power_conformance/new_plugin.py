"""``power new-plugin``: a complete plugin project, written from the templates beside this file."""

from __future__ import annotations

import keyword
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

import click

from power_core.capabilities import AUTO, OFF, RESERVED
from power_core.cli.state import State
from power_core.errors import ConfigError
from power_core.plugins import LoadedPlugin, PluginFailure, PluginSet

__all__ = ["expect_new", "new_plugin", "write_project"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_NO_NAMES = (OFF, AUTO, *RESERVED, "core")  # power_core is the core's own package
_TABLES = {"target": ("targets",), "drafter": ("strategies",), "artifact": ("strategies", "contracts")}


@click.command("new-plugin")
@click.argument("name")
@click.option("--kind", type=click.Choice(["target", "drafter", "artifact"]), required=True, help="What it provides.")
@click.option(
    "--directory", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Where. [default: power-NAME]"
)
@click.pass_obj
def new_plugin(state: State, name: str, kind: str, directory: Path | None) -> None:
    """
    Write a plugin project NAME: installable, typed, tested, and passing its own conformance run.

    NAME is the entry point, and the name of the strategy, file suffix or artifact kind; the distribution is power-NAME.
    What is installed under that name already is refused, unless --directory says that another one is meant.
    """
    if directory is None:
        expect_new(name, kind, state.plugins)
    folder = write_project(name, kind, Path(f"power-{name}") if directory is None else directory)
    click.echo(f"wrote {folder}")
    click.echo(f"next: pip install -e '{folder}[test]' && power conformance {name}")


def expect_new(name: str, kind: str, plugins: PluginSet) -> None:
    """
    Refuse the name of something installed: the new project would replace it, or one of the two would not load.

    Args:
        name: Of the new plugin.
        kind: What it is to provide.
        plugins: What is installed.

    Raises:
        ConfigError: The name is taken.
    """
    tables = (getattr(plugins.registry, table) for table in _TABLES[kind])
    taken = [f"the {table.kind} of {table.get(name).owner}" for table in tables if name in table]
    found: list[LoadedPlugin | PluginFailure] = [*plugins.loaded, *plugins.failures]
    taken += [f"the plugin of {each.distribution} {each.version}" for each in found if each.name == name]
    with suppress(PackageNotFoundError):
        taken.append(f"installed as power-{name} {version(f'power-{name}')}")
    if taken:
        raise ConfigError(
            f"{name!r} is {taken[-1]}", who="new-plugin", got=name,
            fix="choose another name, or say with --directory where to write another plugin of that name",
        )  # fmt: skip


def write_project(name: str, kind: str, folder: Path) -> Path:
    """
    Write the project to *folder*, which must not hold anything yet.

    Raises:
        ConfigError: The name is no name for a plugin, or the folder is not empty.
    """
    values = _values(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            "exists and is not empty", who="new-plugin", where=str(folder), fix="choose another --directory"
        )
    template = files("power_conformance") / "templates" / kind
    _write(template, folder, values)
    return folder


def _values(name: str) -> dict[str, str]:
    """What the templates' placeholders stand for."""
    identifier = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(identifier) or name in _NO_NAMES:
        raise ConfigError(
            f"{name!r} is no name for a plugin", who="new-plugin", got=name,
            expected="lower-case letters, digits and single hyphens, not a reserved word", fix="for example my-drafter",
        )  # fmt: skip
    return {
        "name": name,
        "identifier": identifier,
        "package": f"power_{identifier}",
        "distribution": f"power-{name}",
        "Class": "".join(part.capitalize() for part in name.split("-")),
    }


def _write(source: Traversable, target: Path, values: dict[str, str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.is_dir():
            _write(entry, target / (values["package"] if entry.name == "package" else entry.name), values)
        else:
            text = Template(entry.read_text(encoding="utf-8")).substitute(values)
            (target / entry.name.removesuffix(".tmpl")).write_text(text, encoding="utf-8")
