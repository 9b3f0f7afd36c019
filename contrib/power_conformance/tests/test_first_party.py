"""The plugins of this repository keep every rule that concerns them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from power_conformance.runner import check_plugin

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "conformance_intro.md"
SLOW = {"dflash", "dspark", "llamacpp", "mtp", "torch"}  # real models and sessions, hundreds of files


def plugins() -> Iterator[object]:
    """Entry points of the repository's packages."""
    for file in sorted(ROOT.glob("*/power_*/pyproject.toml")):
        for name in tomllib.loads(file.read_text())["project"].get("entry-points", {}).get("power", {}):
            yield pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.parametrize("name", list(plugins()))
def test_first_party_plugins_are_green(name: str) -> None:
    """No rule is broken, some of each subject are kept, and the page says how many."""
    points = tuple(entry_points(group="power", name=name))
    if not points:
        pytest.skip(f"the plugin {name!r} is not installed here")
    report = check_plugin(points[0])
    failures = [str(outcome.failure) for subject in report.subjects for outcome in subject.outcomes if outcome.failure]
    assert failures == []
    assert all(subject.count("passed") > 0 for subject in report.subjects)
    passed, absent = (sum(subject.count(word) for subject in report.subjects) for word in ("passed", "not applicable"))
    [row] = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}` |")]
    assert row.endswith(f"| {passed} | {absent} |")
