"""The plugins of this repository keep every rule that concerns them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from power_conformance.runner import check_plugin

ROOT = Path(__file__).resolve().parents[3]
SLOW = {"dflash", "dspark", "llamacpp", "mtp", "torch"}  # several models, each loaded for every rule


def plugins() -> Iterator[object]:
    """Entry points of the repository's packages."""
    for file in sorted(ROOT.glob("*/power_*/pyproject.toml")):
        for name in tomllib.loads(file.read_text())["project"].get("entry-points", {}).get("power", {}):
            yield pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.parametrize("name", list(plugins()))
def test_first_party_plugins_are_green(name: str) -> None:
    """No rule is broken, and some of each kind of subject are kept."""
    points = tuple(entry_points(group="power", name=name))
    if not points:
        pytest.skip(f"the plugin {name!r} is not installed here")
    report = check_plugin(points[0])
    failures = [str(outcome.failure) for subject in report.subjects for outcome in subject.outcomes if outcome.failure]
    assert failures == []
    assert all(subject.count("passed") > 0 for subject in report.subjects)
