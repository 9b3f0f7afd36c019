"""``power plugins``."""

from __future__ import annotations

from typing import Any

import click

from power_core.cli.options import json_option
from power_core.cli.output import print_json, print_table
from power_core.cli.state import State

__all__ = ["plugins"]

_KINDS = ("targets", "strategies", "models", "artifacts", "commands")


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
        "blocked_in_vain": found.blocked_in_vain,
    }
    if as_json:
        print_json(document)
    else:
        _print(document)


def _provided(state: State, plugin: str) -> dict[str, list[str]]:
    registry = state.plugins.registry
    tables = {kind: getattr(registry, kind) for kind in _KINDS} | {"artifact_kinds": registry.contracts}
    return {kind: [item.name for item in table if item.plugin == plugin] for kind, table in tables.items()}


def _print(document: dict[str, Any]) -> None:
    rows = [("PLUGIN", "DISTRIBUTION", "VERSION", "PROVIDES")]
    for item in document["plugins"]:
        provides = "; ".join(
            f"{kind.replace('_', ' ')}: {', '.join(names)}" for kind, names in item["provides"].items() if names
        )
        rows.append((item["name"], item["distribution"], item["version"], provides or "nothing"))
    rows += [(f["name"], f["distribution"], f["version"], f"FAILED: {f['cause']}") for f in document["failed"]]
    rows += [(name, "-", "-", "blocked by POWER_BLOCK_PLUGINS, not imported") for name in document["blocked"]]
    rows += [(name, "-", "-", "in POWER_BLOCK_PLUGINS, but no plugin's name") for name in document["blocked_in_vain"]]
    print_table(rows)
