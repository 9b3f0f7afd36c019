"""``power plugins``."""

from __future__ import annotations

from typing import Any

import click

from power_core.capabilities import Registry
from power_core.cli.options import json_option
from power_core.cli.output import print_json, print_table
from power_core.cli.state import State

__all__ = ["plugins"]

_KINDS = ("targets", "strategies", "models", "commands")


@click.command()
@json_option
@click.pass_obj
def plugins(state: State, as_json: bool) -> None:
    """List plugins, what each provides, and which failed to load."""
    found = state.plugins
    document = {
        "plugins": [
            {
                "name": item.name,
                "distribution": item.distribution,
                "version": item.version,
                "provides": _provided(state, item.name),
            }
            for item in found.loaded
        ],
        "failed": [
            {"name": f.name, "distribution": f.distribution, "version": f.version, "cause": f.cause}
            for f in found.failures
        ],
        "blocked": found.blocked,
    }
    if as_json:
        print_json(document)
    else:
        _print(document)


def _provided(state: State, plugin: str) -> dict[str, list[str]]:
    registry = state.plugins.registry
    provided = {kind: [item.name for item in getattr(registry, kind) if item.plugin == plugin] for kind in _KINDS}
    return {**provided, "artifact_kinds": _artifact_kinds(state, registry, plugin)}


def _artifact_kinds(state: State, registry: Registry, plugin: str) -> list[str]:
    """Artifact kinds the plugin's drafters load. Zero-weight ones load none, and are not made to find out."""
    kinds = set()
    for item in registry.strategies:
        if item.plugin == plugin and not item.options.get("zero_weight"):
            try:
                kind = item.value(state.config({}).plugin(item)).requirements().artifact_kind
            except Exception as exc:  # noqa: BLE001 - plugin code may raise anything; the list must still be shown
                kind = f"unknown ({type(exc).__name__}: {exc})"
            if kind is not None:
                kinds.add(kind)
    return sorted(kinds)


def _print(document: dict[str, Any]) -> None:
    rows = [("PLUGIN", "DISTRIBUTION", "VERSION", "PROVIDES")]
    for item in document["plugins"]:
        provides = "; ".join(
            f"{kind.replace('_', ' ')}: {', '.join(names)}" for kind, names in item["provides"].items() if names
        )
        rows.append((item["name"], item["distribution"], item["version"], provides or "nothing"))
    rows += [(f["name"], f["distribution"], f["version"], f"FAILED: {f['cause']}") for f in document["failed"]]
    rows += [(name, "-", "-", "blocked by POWER_BLOCK_PLUGINS, not imported") for name in document["blocked"]]
    print_table(rows)
