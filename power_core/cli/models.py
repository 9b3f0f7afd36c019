"""``power models``, ``power models add``, ``power models remove``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from power_core import models as store
from power_core.cli.options import json_option
from power_core.cli.output import print_json, print_table, refuse_shipped
from power_core.cli.state import State
from power_core.errors import PowerError
from power_core.hookspecs import ModelSource

__all__ = ["models"]


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def models(ctx: click.Context, as_json: bool) -> None:
    """List models, or add and remove named ones."""
    if ctx.invoked_subcommand is not None:
        ctx.default_map = {name: {"as_json": as_json} for name in models.commands}  # also `models --json add ...`
        return
    registry = ctx.ensure_object(State).plugins.registry
    known = [_entry(item.name, item.owner, item.value) for item in registry.models]
    known += [_entry(name, "added", source) for name, source in store.added_models().items()]
    default = registry.default_model()
    if as_json:
        print_json({"models": known, "default": default})
    elif known:
        rows = [("MODEL", "FROM", "FILE", "ABOUT")]
        rows += [_row(item, is_default=item["name"] == default) for item in known]
        print_table(rows)
    else:
        click.echo("no models; `power models add NAME PATH` adds one, or pip install power-smollm2")


@models.command()
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
@click.pass_obj
def add(state: State, name: str, path: Path, as_json: bool) -> None:
    """
    Give the file PATH a model NAME.

    PATH may be a folder where a backend loads such. It is not loaded, but a backend must know its format.
    """
    from power_core.strategies import make_configured

    registry, config = state.plugins.registry, state.config({})
    taken = {item.name: item.owner for item in registry.models}
    backends = ((item.name, make_configured(config, item)) for item in registry.targets)  # some are slow to import
    file = store.add_model(name, path, taken, backends)
    if as_json:
        print_json({"added": name, "path": str(file)})
    else:
        click.echo(f"added {name}: {file}")


@models.command()
@click.argument("name")
@json_option
@click.pass_obj
def remove(state: State, name: str, as_json: bool) -> None:
    """Forget the model NAME that was added; its file stays."""
    refuse_shipped(state.plugins.registry.models, name, store.added_models())
    store.remove_model(name)
    if as_json:
        print_json({"removed": name})
    else:
        click.echo(f"removed {name}; its file was left alone")


def _entry(name: str, owner: str, source: ModelSource) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "from": owner, "description": source.description, "sha256": source.sha256}
    try:
        return {**entry, "path": str(source.locate()), "problem": None}
    except PowerError as exc:
        return {**entry, "path": None, "problem": str(exc)}
    except Exception as exc:  # noqa: BLE001 - `locate` is plugin code; one model must not hide the others
        return {**entry, "path": None, "problem": f"{type(exc).__name__}: {exc}"}


def _row(item: dict[str, Any], *, is_default: bool) -> tuple[str, str, str, str]:
    about = item["problem"] or item["description"]
    return item["name"] + (" (default)" if is_default else ""), item["from"], item["path"] or "MISSING", about
