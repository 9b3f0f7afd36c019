"""The suites and the pytest plugin, as an author uses them: in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from power_conformance import all_rules
from power_conformance.registry import Kind, find_rule, rule, rules_of

from power_core.errors import ConfigError

SUITE = """
import pytest
from broken import drafters
from power_conformance import DrafterConformance


class TestMine(DrafterConformance):
    @pytest.fixture
    def drafter(self):
        return drafters.{drafter}()
"""


def run_suite(folder: Path, drafter: str, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_mine.py").write_text(SUITE.format(drafter=drafter))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *args, "test_mine.py"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_one_class_with_one_fixture_is_enough(tmp_path: Path) -> None:
    """Every rule is a test of its own, named by its id; what is not applicable is skipped with the reason."""
    done = run_suite(tmp_path, "Drafter", "--conformance-seed", "3")
    assert done.returncode == 0, done.stdout
    assert "PASSED test_mine.py::TestMine::test_rule[D-RESTORE-02]" in done.stdout
    assert "the drafter reads no hidden rows" in done.stdout


def test_a_failure_reads_as_its_rule(tmp_path: Path) -> None:
    """The message stands alone: no traceback through the kit."""
    done = run_suite(tmp_path, "BROKEN['D-BATCH-01']")
    assert done.returncode == 1
    assert "D-BATCH-01: `propose` answers each request in order" in done.stdout
    assert "look at:  DraftSession.propose in power_core/drafter.py" in done.stdout
    assert "rules/drafter.py:" not in done.stdout
    assert "1 failed" in done.stdout


def test_ids_tell_the_subject() -> None:
    """The first letter of an id is its kind's, and ids are unique."""
    ids = [rule.id for rule in all_rules()]
    assert len(ids) == len(set(ids))
    for kind in Kind:
        assert {rule.id[0] for rule in rules_of(kind)} == {kind.value[0].upper()}


def test_every_rule_is_one_sentence() -> None:
    """What is promised and why, and where it is written down."""
    for each in all_rules():
        assert each.title.endswith("."), each.id
        assert each.title.rstrip(".").count(". ") == 0, each.id
        assert each.look, each.id


def test_a_rule_needs_its_sentence() -> None:
    """A check without a docstring cannot be registered, nor can an id be taken twice."""
    with pytest.raises(ValueError, match="has no sentence"):
        rule("T-NOTHING-01", look="nowhere")(lambda _subject: None)
    with pytest.raises(ValueError, match="registered twice"):
        rule("T-LENGTH-01", look="nowhere")(find_rule("T-LENGTH-01").check)


def test_an_unknown_rule_names_the_nearest() -> None:
    """A typo is answered with what was meant."""
    with pytest.raises(ConfigError, match="did you mean T-LENGTH-01"):
        find_rule("t-lenght-01")
