"""Scripted parts as installed plugins, through the real loader but without entry points on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

from attrs import frozen

from power_core.drafter import Drafter
from power_core.hookspecs import (
    ModelSource,
    RegisterModel,
    RegisterStrategy,
    RegisterTarget,
    hookimpl,
)
from power_core.plugins import PluginSet, load_plugins
from power_core.target import TargetBackend

__all__ = ["inline_plugin", "scripted_plugins"]


@frozen
class _InlinePoint:
    """What the loader reads of an entry point."""

    name: str
    plugin: object
    value: str = "power_core.testing"
    group: str = "power"
    dist: None = None

    def load(self) -> object:
        return self.plugin


def inline_plugin(name: str, plugin: object) -> EntryPoint:
    """
    *plugin*, any object with hook implementations, as an entry point that `load_plugins` accepts.

    >>> from types import SimpleNamespace
    >>> load_plugins([inline_plugin("empty", SimpleNamespace())], {}).loaded[0].name
    'empty'
    """
    return cast("EntryPoint", _InlinePoint(name, plugin))


def scripted_plugins(
    *,
    targets: Mapping[str, TargetBackend] | None = None,
    strategies: Mapping[str, Drafter | Callable[[], Drafter]] | None = None,
    models: Mapping[str, Path] | None = None,
    more: Iterable[EntryPoint] = (),
) -> PluginSet:
    """
    A plugin set that offers exactly these targets, strategies and models, as zero-weight strategies in order.

    Args:
        targets: Backends by name.
        strategies: Drafters by strategy name, or functions that make one.
        models: Paths by model name; the first is the default model.
        more: Further plugins to load with them.

    >>> from power_core.testing.drafters import RandomDrafter
    >>> plugins = scripted_plugins(strategies={"random": RandomDrafter(8)})
    >>> plugins.registry.strategies.names(), plugins.registry.auto_strategy()
    (['random'], 'random')
    """
    plugin = _Plugin(targets or {}, strategies or {}, models or {})
    return load_plugins([inline_plugin("scripted", plugin), *more], {})


@frozen(eq=False)  # pluggy keeps plugins by hash
class _Plugin:
    targets: Mapping[str, TargetBackend]
    strategies: Mapping[str, Drafter | Callable[[], Drafter]]
    models: Mapping[str, Path]

    @hookimpl
    def power_register_targets(self, register: RegisterTarget) -> None:
        for name, backend in self.targets.items():
            register(name, partial(_given, backend))

    @hookimpl
    def power_register_strategies(self, register: RegisterStrategy) -> None:
        for rank, (name, drafter) in enumerate(self.strategies.items()):
            register(name, partial(_made, drafter), zero_weight=True, auto_rank=rank)

    @hookimpl
    def power_register_models(self, register: RegisterModel) -> None:
        for rank, (name, path) in enumerate(self.models.items()):
            register(name, ModelSource(partial(_same, path)), default=rank == 0)


def _given(backend: TargetBackend, _config: Any) -> TargetBackend:
    return backend


def _made(drafter: Drafter | Callable[[], Drafter], _config: Any) -> Drafter:
    return drafter if isinstance(drafter, Drafter) else drafter()


def _same(path: Path) -> Path:
    return path
