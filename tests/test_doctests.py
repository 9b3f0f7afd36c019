"""Every example in a docstring of the core and of the plugins beside it runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

PLUGINS = ["power_conformance", "power_example_drafter", "power_llamacpp", "power_ngram", "power_smollm2"]
_COMMANDS = ("__main__", "probe_child")  # run as programs


def modules() -> list[str]:
    """All modules of the packages, tests' own ones excepted."""
    found = []
    for name in ["power_core", *PLUGINS]:
        package = importlib.import_module(name)
        found += [name, *(m.name for m in pkgutil.walk_packages(package.__path__, f"{name}."))]
    return [name for name in found if not name.endswith(_COMMANDS)]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name: str) -> None:
    """What a docstring shows is what happens."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0
