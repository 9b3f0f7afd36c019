"""Engines of the parity suite: a target on a backend, with a trained drafter or for strategies without weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from parity.conftest import open_engine
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.errors import ArtifactError
from power_core.plugins import PluginSet, load_plugins
from power_core.request import SamplingSpec
from power_core.runtime import Runtime

__all__ = ["BACKENDS", "SAMPLINGS", "TRAINED", "TRAINED_WIDTHS", "Setup", "has_form", "opened"]

BACKENDS = ("llamacpp", "torch")
TRAINED = ("mtp", "dflash", "dflash2", "dspark")
TRAINED_WIDTHS = (1, 2, 3, 4, 5, 7)
SAMPLINGS = {"greedy": SamplingSpec(), "seeded": SamplingSpec(temperature=0.8, top_k=50, top_p=0.95, seed=17)}


@frozen
class Setup:
    """
    One engine.

    Args:
        backend: The target's backend.
        drafter: Whose trained drafter it is opened with, or None: strategies without weights.
        executor: What evaluates the drafter: the target's own library (`native`) or `torch`.
        model: The target: `smollm2` or `gemma`.
    """

    backend: str
    drafter: str | None = None
    executor: str | None = None
    model: str = "smollm2"

    def __str__(self) -> str:
        return "-".join(filter(None, (self.model, self.backend, self.drafter, self.executor)))


def has_form(backend: str, drafter: str, executor: str) -> bool:
    """Whether *executor* evaluates the trained *drafter* beside *backend*; an attached MTP head has no native form."""
    return executor == "torch" or (backend == "llamacpp" and drafter != "mtp")


@contextmanager
def opened(setup: Setup, model: str | Path, **options: Any) -> Iterator[Engine]:
    """The engine of *setup* on *model*; what is not installed is named as the test is skipped."""
    plugins = load_plugins()
    for backend in filter(None, (setup.backend, "torch" if setup.executor == "torch" else None)):
        if backend not in plugins.registry.targets:
            pytest.skip(f"needs power-{backend}: pip install power-{backend}")
    sections: dict[str, dict[str, Any]] = {"llamacpp": {"flash_attention": "off"}, "torch": {"dtype": "bf16"}}
    if setup.drafter is not None:
        options |= {"spec": setup.drafter, "artifact": _installed(plugins, setup.drafter)}
        sections[setup.drafter] = {"executor": setup.executor}
    used = {setup.backend, setup.drafter, setup.executor}  # the section of a plugin that is not there is refused
    sections = {name: section for name, section in sections.items() if name in used}
    options = {"spec": "off", "width_policy": "fixed", "threads": 1} | options
    with (
        Runtime(PowerConfig(sections=sections), plugins) as runtime,
        open_engine(runtime, model, backend=setup.backend, **options) as engine,
    ):
        yield engine


def _installed(plugins: PluginSet, strategy: str) -> str:
    """The name of the trained drafter of *strategy*."""
    artifact = f"smollm2-{strategy}"
    if strategy not in plugins.registry.strategies:
        pytest.skip(f"no installed plugin provides {strategy}")
    if artifact not in plugins.registry.artifacts:
        pytest.skip(f"{artifact} is not installed: pip install power-smollm2-drafters")
    try:
        plugins.registry.artifacts.get(artifact).value.locate()
    except ArtifactError as exc:
        pytest.skip(str(exc))
    return artifact
