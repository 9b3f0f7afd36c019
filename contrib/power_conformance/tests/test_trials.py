"""Models and files are made once for the rules of a subject, and no rule sees what another left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from broken import contracts, drafters, targets
from power_conformance import ConformanceFailure, Kind, NotApplicable, rules_of
from power_conformance.registry import Rule, find_rule
from power_conformance.trials import Stage, Trial, trials

from power_core.capabilities import Registry
from power_core.errors import BackendError, CapabilityError
from power_core.target import SessionOptions
from power_core.testing import ScriptedSession

T_RULES = [find_rule(name) for name in ("T-LENGTH-01", "T-CLOSE-03", "T-IDENTITY-01")]
CLOSES = find_rule("T-CLOSE-04")


def trial(hook: str, factory: Callable[..., Any], **options: Any) -> Trial:
    """The trial of what a plugin registers with *hook*."""
    registry = Registry()
    registry.registrar(hook, "mine", "mine 1.0")("one", factory, **options)
    [found] = trials(registry, 0)
    return found


def fixture(kind: str, factory: Callable[..., Any]) -> Trial:
    """The trial of a fixture."""
    return trial("power_register_fixtures", factory, kind=kind)


def strategy(make: Callable[..., Any]) -> Trial:
    """The trial of a zero-weight strategy."""
    return trial("power_register_strategies", make, zero_weight=True)


def broken(stage: Stage, rules: Sequence[Rule]) -> list[str]:
    """Ids of the rules that are broken."""
    found = []
    for rule in rules:
        try:
            stage.run(rule)
        except ConformanceFailure:
            found.append(rule.id)
        except NotApplicable:
            pass
    return found


class Models:
    """A target fixture that keeps what it made."""

    def __init__(self, model: type[targets.Target] = targets.Target) -> None:
        self._model = model
        self.made: list[targets.Target] = []
        self.folders: list[Path] = []
        self.closed: list[targets.Target] = []

    def __call__(self, folder: Path) -> targets.Target:
        made = self._model(seed=3)
        made.close = lambda: self.closed.append(made)  # type: ignore[method-assign]  # to hear of it
        self.made.append(made)
        self.folders.append(folder)
        return made


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("kind", [Kind.TARGET, Kind.ARTIFACT, Kind.DRAFTER])
def test_rules_may_share_a_model_in_any_order(kind: Kind, is_reversed: bool) -> None:
    """What a rule leaves behind in a good subject's models and files breaks no other rule."""
    made = {
        Kind.TARGET: fixture("target", lambda _folder: targets.good()),
        Kind.ARTIFACT: fixture("artifact", lambda folder: (contracts.Contract(), *contracts.good_file(folder))),
        Kind.DRAFTER: strategy(lambda _config: drafters.Drafter()),
    }
    with Stage(made[kind]) as stage:
        assert broken(stage, rules_of(kind)[:: -1 if is_reversed else 1]) == []


def test_a_model_is_made_once_and_closed() -> None:
    """The rules of a target share one model; after the last of them it is closed and its folder removed."""
    models = Models()
    with Stage(fixture("target", models)) as stage:
        assert broken(stage, T_RULES) == []
        assert (len(models.made), models.closed) == (1, [])
    assert models.closed == models.made
    assert not models.folders[0].exists()


def test_a_rule_that_closes_the_model_is_the_last_to_use_it() -> None:
    """T-CLOSE-04 ends a model on purpose; the rules after it get another."""
    models = Models()
    with Stage(fixture("target", models)) as stage:
        broken(stage, [*T_RULES, CLOSES, *T_RULES])
        assert len(models.made) == 2
        assert models.closed == [models.made[0]] * 3  # twice by the rule, and once more at its end


def test_a_broken_rule_is_the_last_to_use_a_model() -> None:
    """Whatever a broken rule left behind is gone, so that rules after it are judged by themselves."""

    class Late(targets.Target):
        """Cannot be opened the first time."""

        def open_session(self, options: SessionOptions) -> ScriptedSession:
            if len(models.made) == 1:
                raise BackendError("not yet")
            return super().open_session(options)

    models = Models(Late)
    with Stage(fixture("target", models)) as stage:
        assert broken(stage, T_RULES) == [T_RULES[0].id]
    assert len(models.made) == 2


def test_a_drafter_is_made_for_each_rule() -> None:
    """What a drafter holds cannot carry over, whether it comes from a strategy or with a target of its own."""
    made: list[drafters.Drafter] = []

    def make(*_args: object) -> drafters.Drafter:
        made.append(drafters.Drafter())
        return made[-1]

    rules = [find_rule(name) for name in ("D-BOUNDS-01", "D-VOCABULARY-01", "D-PROMPT-01")]
    for found in (strategy(make), fixture("drafter", lambda _folder: (make(), targets.good()))):
        made.clear()
        with Stage(found) as stage:
            assert broken(stage, rules) == []
        assert len(made) == len(rules)


def test_what_is_not_installed_is_not_applicable() -> None:
    """A fixture that needs another package says so, and nothing is called broken."""

    def missing(_folder: Path) -> object:
        raise CapabilityError("the package torch is missing")

    with Stage(fixture("target", missing)) as stage, pytest.raises(NotApplicable, match="torch is missing"):
        stage.run(T_RULES[0])
