"""The kit is tested by bad plugins: each breaks its own rule, no other, and no rule goes without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from broken import contracts, drafters, plugins, states, targets
from power_conformance import ConformanceFailure, Kind, NotApplicable, Rule, all_rules, find_rule, rules_of
from power_conformance.subjects import DEFAULT_OPTIONS, ContractSubject, DrafterSubject, PluginSubject, TargetSubject

from power_core.errors import CapabilityError
from power_core.target import SessionOptions
from power_core.testing import ScriptedSession, padded_class, two_classes

assert states  # registers its targets with `broken.targets`
BROKEN = {
    Kind.TARGET: targets.BROKEN,
    Kind.DRAFTER: drafters.BROKEN,
    Kind.ARTIFACT: contracts.BROKEN,
    Kind.PLUGIN: plugins.BROKEN,
}
IDS = [(kind, rule_id) for kind, table in BROKEN.items() for rule_id in table]
# What a second process makes is worth its time for the one rule that asks.
AGAIN = {"T-SHAPE-01": "broken.again:T_SHAPE_01"}


@contextmanager
def subject_of(kind: Kind, rule_id: str, folder: Path) -> Iterator[Any]:
    """A new subject that breaks *rule_id*."""
    if kind is Kind.TARGET:
        make = targets.BROKEN[rule_id]
        yield TargetSubject(make(3), others=(make(4),), again=AGAIN.get(rule_id))
    elif kind is Kind.DRAFTER:
        yield DrafterSubject(drafters.BROKEN[rule_id](), targets.good(order=2))
    elif kind is Kind.ARTIFACT:
        path, model = contracts.good_file(folder)
        other = contracts.OTHERS.get(rule_id, contracts.OtherContract)
        yield ContractSubject(contracts.BROKEN[rule_id](), path, model, (other(),))
    else:
        with plugins.on_disk(folder, plugins.BROKEN[rule_id]) as point:
            yield PluginSubject(point)


def failures(rules: tuple[Rule, ...], subject: Any) -> dict[str, ConformanceFailure]:
    found = {}
    for rule in rules:
        try:
            with subject as made:
                rule.run(made)
        except ConformanceFailure as exc:
            found[rule.id] = exc
        except NotApplicable:
            pass
    return found


class Again:
    """Makes the subject anew each time it is entered."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __enter__(self) -> Any:
        self._manager = self._make()
        return self._manager.__enter__()

    def __exit__(self, *exc: object) -> Any:
        return self._manager.__exit__(*exc)


def test_every_rule_has_a_broken_plugin() -> None:
    """A rule that nothing breaks may check nothing."""
    assert sorted(rule_id for _, rule_id in IDS) == sorted(rule.id for rule in all_rules())


@pytest.mark.parametrize(("kind", "rule_id"), IDS, ids=[rule_id for _, rule_id in IDS])
def test_breaks_exactly_its_own_rule(kind: Kind, rule_id: str, tmp_path: Path) -> None:
    """The broken plugin fails its rule, says so in full, and keeps all others."""
    found = failures(rules_of(kind), Again(lambda: subject_of(kind, rule_id, tmp_path)))
    assert list(found) == [rule_id]
    lines = str(found[rule_id]).splitlines()
    assert lines[0].startswith(f"{rule_id}: ")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["did", "expected", "look at"]


@pytest.mark.parametrize(
    "options",
    [{}, {"rollback_capacity": 3}, {"rollback_capacity": 0, "snapshots": False}, {"profile": padded_class()},
     {"profile": two_classes(8)}, {"rollback_capacity": 2, "profile": two_classes(8)}],
    ids=["one-class", "bounded", "no-snapshots", "padded", "two-classes", "bounded-two-classes"],
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1])
def test_good_targets_keep_every_rule(options: dict[str, Any], seed: int) -> None:
    """The scripted target passes with every memory and width class it can have."""
    make = Again(
        lambda: _given(TargetSubject(targets.good(**options), others=(targets.good(4, **options),), seed=seed))
    )
    assert failures(rules_of(Kind.TARGET), make) == {}


@pytest.mark.parametrize("drafter", [drafters.Drafter, drafters.StoppingDrafter])
@pytest.mark.parametrize("seed", [0, 1])
def test_good_drafters_keep_every_rule(drafter: type[drafters.Drafter], seed: int) -> None:
    """The drafters that the broken ones are made from are not broken themselves."""
    make = Again(lambda: _given(DrafterSubject(drafter(), targets.good(order=2), seed=seed)))
    assert failures(rules_of(Kind.DRAFTER), make) == {}


@pytest.mark.parametrize("seed", [0, 1])
def test_good_contracts_keep_every_rule(seed: int, tmp_path: Path) -> None:
    """The contract that the broken ones are made from is not broken itself."""
    path, model = contracts.good_file(tmp_path)
    subject = ContractSubject(contracts.Contract(), path, model, (contracts.OtherContract(),), seed)
    assert failures(rules_of(Kind.ARTIFACT), Again(lambda: _given(subject))) == {}


def test_good_plugins_keep_every_rule(tmp_path: Path) -> None:
    """The package that the broken ones are made from is not broken itself."""
    with plugins.on_disk(tmp_path) as point:
        make = Again(lambda: _given(PluginSubject(point)))
        assert failures(rules_of(Kind.PLUGIN), make) == {}


class Shallow(targets.Target):
    """A model without the block that the other one's drafters read."""

    def open_session(self, options: SessionOptions) -> ScriptedSession:
        if options.hidden_layers:
            raise CapabilityError(f"there is no block {options.hidden_layers[0]}")
        return super().open_session(options)


def test_models_with_other_blocks_are_compared() -> None:
    """T-SHAPE-04 is about two models, and does not ask one for the hidden layers of the other."""
    options = evolve(DEFAULT_OPTIONS, hidden_layers=(3,))
    find_rule("T-SHAPE-04").run(TargetSubject(targets.good(), (options,), others=(Shallow(seed=4),)))


@contextmanager
def _given(subject: Any) -> Iterator[Any]:
    yield subject
