"""``power new-plugin``: a complete plugin project, written from the templates beside this file."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

import click

from power_core.capabilities import AUTO, OFF, RESERVED
from power_core.errors import ConfigError

__all__ = ["new_plugin", "write_project"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@click.command("new-plugin")
@click.argument("name")
@click.option("--kind", type=click.Choice(["target", "drafter", "artifact"]), required=True, help="What it provides.")
@click.option(
    "--directory", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Where. [default: power-NAME]"
)
def new_plugin(name: str, kind: str, directory: Path | None) -> None:
    """
    Write a plugin project NAME: installable, typed, tested, and passing its own conformance run.

    NAME is the entry point, and the name of the strategy, file suffix or artifact kind; the distribution is power-NAME.
    """
    folder = write_project(name, kind, Path(f"power-{name}") if directory is None else directory)
    click.echo(f"wrote {folder}")
    click.echo(f"next: pip install -e '{folder}[test]' && power conformance {name}")


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
    if not _NAME.fullmatch(name) or keyword.iskeyword(identifier) or name in (OFF, AUTO, *RESERVED):
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
