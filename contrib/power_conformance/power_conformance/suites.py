"""The suites plugin authors subclass: one class, one fixture."""

from __future__ import annotations

from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from typing import ClassVar

import pytest

from power_conformance.failures import NotApplicable
from power_conformance.fixtures import contract_subject
from power_conformance.registry import Kind, Rule, rules_of
from power_conformance.subjects import DEFAULT_OPTIONS, DrafterSubject, PluginSubject, TargetSubject
from power_conformance.trials import other_contracts
from power_core.artifacts import ArtifactContract
from power_core.drafter import Drafter
from power_core.hookspecs import ENTRY_POINT_GROUP
from power_core.target import SessionOptions, TargetModel
from power_core.testing import ScriptedTarget, ScriptedTokenizer

__all__ = ["ArtifactContractConformance", "DrafterConformance", "PluginConformance", "TargetConformance"]

_BY_ID = attrgetter("id")


class TargetConformance:
    """
    Every rule of targets, on the model that the fixture ``target`` returns; each rule gets a new one.

    Attributes:
        factory: ``module:function`` that makes the model from a folder, for the rule that needs a second process.
    """

    factory: ClassVar[str | None] = None

    @pytest.fixture
    def target(self) -> TargetModel:
        """The model to check."""
        raise NotImplementedError("a TargetConformance suite needs a fixture `target` that returns a TargetModel")

    @pytest.fixture
    def options(self) -> tuple[SessionOptions, ...]:
        """Sessions to try; every rule is run on each."""
        return (DEFAULT_OPTIONS,)

    @pytest.fixture
    def others(self) -> tuple[TargetModel, ...]:
        """Models with other weights, to compare identities with."""
        return ()

    @pytest.mark.parametrize("rule", rules_of(Kind.TARGET), ids=_BY_ID)
    def test_rule(
        self,
        rule: Rule,
        target: TargetModel,
        options: tuple[SessionOptions, ...],
        others: tuple[TargetModel, ...],
        conformance_seed: int,
    ) -> None:
        """The target keeps the rule."""
        _run(rule, TargetSubject(target, options, others, conformance_seed, self.factory))


class DrafterConformance:
    """Every rule of drafters, on the drafter that the fixture ``drafter`` returns; each rule gets a new one."""

    @pytest.fixture
    def drafter(self) -> Drafter:
        """The drafter to check."""
        raise NotImplementedError("a DrafterConformance suite needs a fixture `drafter` that returns a Drafter")

    @pytest.fixture
    def target(self) -> TargetModel:
        """A target the drafter can draft for: a scripted one, unless it needs its own."""
        return ScriptedTarget(tokenizer=ScriptedTokenizer.chat(), order=2)

    @pytest.fixture
    def shares_state(self) -> bool:
        """Whether the drafter is configured to use what earlier requests left."""
        return False

    @pytest.mark.parametrize("rule", rules_of(Kind.DRAFTER), ids=_BY_ID)
    def test_rule(
        self, rule: Rule, drafter: Drafter, target: TargetModel, shares_state: bool, conformance_seed: int
    ) -> None:
        """The drafter keeps the rule."""
        _run(rule, DrafterSubject(drafter, target, shares_state=shares_state, seed=conformance_seed))


class ArtifactContractConformance:
    """
    Every rule of artifact contracts, on what the fixture ``good`` returns.

    Contracts of other kinds are those that are installed.
    """

    @pytest.fixture
    def good(self, tmp_path: Path) -> tuple[ArtifactContract, Path, TargetModel]:
        """The contract, a good file without anything optional, and a target that the file was made for."""
        raise NotImplementedError("an ArtifactContractConformance suite needs a fixture `good`: contract, path, target")

    @pytest.mark.parametrize("rule", rules_of(Kind.ARTIFACT), ids=_BY_ID)
    def test_rule(self, rule: Rule, good: tuple[ArtifactContract, Path, TargetModel], conformance_seed: int) -> None:
        """The contract keeps the rule."""
        _run(rule, contract_subject(good, others=other_contracts(), seed=conformance_seed))


class PluginConformance:
    """
    Every rule of packaging, on an installed plugin.

    Attributes:
        plugin: The plugin's entry point in the group ``power``.
    """

    plugin: ClassVar[str]

    @pytest.mark.parametrize("rule", rules_of(Kind.PLUGIN), ids=_BY_ID)
    def test_rule(self, rule: Rule) -> None:
        """The plugin keeps the rule."""
        points = tuple(entry_points(group=ENTRY_POINT_GROUP, name=self.plugin))
        if not points:
            pytest.fail(f"no installed distribution has the entry point {self.plugin!r}; pip install -e . first")
        _run(rule, PluginSubject(points[0]))


def _run(rule: Rule, subject: object) -> None:
    try:
        rule.run(subject)
    except NotApplicable as exc:
        pytest.skip(str(exc))
