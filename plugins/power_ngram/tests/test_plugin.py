"""Registration: names, options and what is imported for it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

from power_core.drafter import Drafter, DraftRequest
from power_core.plugins import PluginSet, load_plugins

NAMES = ["ngram-context", "ngram-map-k4v", "ngram-mod", "prompt-lookup", "suffix"]


def loaded() -> PluginSet:
    return load_plugins([EntryPoint("ngram", "power_ngram.plugin", "power")], {})


def test_every_strategy_is_registered_as_zero_weight() -> None:
    """All five register under the names users write, and `auto` takes `suffix`."""
    plugins = loaded()
    assert plugins.failures == []
    registry = plugins.registry
    assert registry.strategies.names() == NAMES
    for registration in registry.strategies:
        assert registration.options["zero_weight"] is True
        assert registration.options["description"]
        assert registration.config is not None
    assert registry.auto_strategy() == "suffix"


def test_every_factory_makes_a_drafter_for_any_target() -> None:
    """The registered factory takes the registered config class; the drafter asks nothing of the target."""
    target: Any = object()
    for registration in loaded().registry.strategies:
        assert registration.config is not None
        drafter = registration.value(registration.config())
        assert isinstance(drafter, Drafter)
        assert not drafter.requirements().capabilities
        assert drafter.requirements().artifact_kind is None
        session = drafter.open(target, target)
        session.begin(0, [3, 4] * 16)
        assert list(session.propose([DraftRequest(0, 4, 2)])[0].token_ids) == [3, 4]


def test_registration_imports_no_numpy() -> None:
    """Loading the plugin must not slow `power --help` down."""
    code = "import sys, power_ngram.plugin; sys.exit('numpy' in sys.modules or 'power_core.target' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
