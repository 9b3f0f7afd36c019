"""Guarded plugin loading: isolated, checked and loud. One broken plugin never breaks another."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter

import pluggy
from attrs import Factory, define, frozen

from power_core import hookspecs
from power_core.capabilities import Registry
from power_core.errors import PluginError
from power_core.hookspecs import ENTRY_POINT_GROUP

__all__ = ["LoadedPlugin", "PluginFailure", "PluginSet", "load_plugins"]

BLOCK_VARIABLE = "POWER_BLOCK_PLUGINS"
_HOOKS = (
    "power_register_targets",
    "power_register_strategies",
    "power_register_models",
    "power_register_contracts",
    "power_register_artifacts",
    "power_register_commands",
    "power_register_fixtures",
)


@frozen
class LoadedPlugin:
    """A plugin that loaded: its entry-point name, distribution and version."""

    name: str
    distribution: str
    version: str


@frozen
class PluginFailure:
    """A plugin that did not load, and why."""

    name: str
    distribution: str
    version: str
    cause: str
    detail: str = ""


@define
class PluginSet:
    """
    Everything found at start-up.

    Args:
        registry: What the loaded ones provide.
        loaded: Plugins that loaded.
        failures: Plugins that did not.
        blocked: Names of those that `POWER_BLOCK_PLUGINS` kept out.
        blocked_in_vain: Names in that variable that no installed plugin has.
    """

    registry: Registry
    loaded: list[LoadedPlugin] = Factory(list)
    failures: list[PluginFailure] = Factory(list)
    blocked: list[str] = Factory(list)
    blocked_in_vain: list[str] = Factory(list)


def blocked_names(environ: Mapping[str, str]) -> frozenset[str]:
    """Names in ``POWER_BLOCK_PLUGINS`` (comma separated)."""
    return frozenset(filter(None, (part.strip() for part in environ.get(BLOCK_VARIABLE, "").split(","))))


def load_plugins(points: Iterable[EntryPoint] | None = None, environ: Mapping[str, str] | None = None) -> PluginSet:
    """
    Load every entry point of the group ``power`` and collect what each registers.

    Args:
        points: Entry points to load instead of the installed ones.
        environ: Environment to read ``POWER_BLOCK_PLUGINS`` from instead of the process's.

    Returns:
        What loaded and what failed. Nothing a plugin does raises here.
    """
    found = entry_points(group=ENTRY_POINT_GROUP) if points is None else points
    blocked = blocked_names(os.environ if environ is None else environ)
    manager = pluggy.PluginManager("power")
    manager.add_hookspecs(hookspecs)
    result = PluginSet(Registry())
    for point in sorted(found, key=attrgetter("name", "value")):
        if point.name in blocked:  # before load(): a blocked plugin is never imported
            result.blocked.append(point.name)
            continue
        _load_one(manager, point, result)
    result.blocked_in_vain = sorted(blocked.difference(result.blocked))
    return result


def _load_one(manager: pluggy.PluginManager, point: EntryPoint, result: PluginSet) -> None:
    distribution, version = _origin(point)
    owner = f"{distribution} {version}"
    if manager.has_plugin(point.name):  # pluggy itself would skip the second one silently
        taken = f"the entry-point name {point.name!r} is already taken by another distribution"
        result.failures.append(PluginFailure(point.name, distribution, version, taken))
        return
    try:
        manager.register(point.load(), name=point.name)
        manager.check_pending()  # a misspelt hook is an error, not a no-op
        staged = Registry(existing=result.registry)
        _collect(manager, point.name, owner, staged)
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - plugin code may raise anything, or try to leave
        if manager.has_plugin(point.name):
            manager.unregister(name=point.name)  # register() records the name before it validates
        cause = str(exc) if isinstance(exc, PluginError) else f"{type(exc).__name__}: {exc}"
        failure = PluginFailure(point.name, distribution, version, " ".join(cause.split()), traceback.format_exc())
        result.failures.append(failure)
        return
    result.registry = staged  # all of a plugin's registrations, or none
    result.loaded.append(LoadedPlugin(point.name, distribution, version))


def _collect(manager: pluggy.PluginManager, name: str, owner: str, registry: Registry) -> None:
    others = [plugin for other, plugin in manager.list_name_plugin() if other != name]
    for hook in _HOOKS:
        # One caller per plugin, so that each registration knows its owner.
        caller = manager.subset_hook_caller(hook, others)
        caller(register=registry.registrar(hook, name, owner))


def _origin(point: EntryPoint) -> tuple[str, str]:
    if point.dist is None:
        return point.value.partition(":")[0], "unknown"
    return point.dist.name, point.dist.version
