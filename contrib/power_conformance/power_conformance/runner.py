"""Running the rules on installed plugins: packaging, zero-weight strategies and the fixtures they offer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from power_conformance.failures import ConformanceFailure, NotApplicable
from power_conformance.fixtures import artifact_of, contract_subject, drafter_subject, target_subject
from power_conformance.registry import Kind, Rule, rules_of
from power_conformance.report import Outcome, PluginReport, SubjectReport
from power_conformance.subjects import DrafterSubject, PluginSubject, import_path
from power_core.artifacts import ArtifactContract
from power_core.artifacts.matching import installed_contracts
from power_core.capabilities import Registration, Registry
from power_core.errors import CapabilityError, PluginError
from power_core.hookspecs import ENTRY_POINT_GROUP
from power_core.plugins import load_plugins
from power_core.testing import ScriptedTarget, ScriptedTokenizer

__all__ = ["check_plugin", "installed", "other_contracts"]

Make = Callable[[Path], Any]
Progress = Callable[[str, Rule], None]


@frozen
class _Trial:
    """A subject by name: made anew for each rule, so that no rule sees what another left."""

    name: str
    kind: Kind
    make: Make


def installed(names: Sequence[str]) -> list[EntryPoint]:
    """
    Entry points of the plugins of these names, of all installed ones where there is none.

    Raises:
        PluginError: One is not installed.
    """
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    for name in names:
        if name not in found:
            raise PluginError(
                f"no installed distribution has the entry point {name!r}", who="conformance", got=name,
                expected="one of " + ", ".join(sorted(found)), fix="pip install it first", plugin=name,
            )  # fmt: skip
    return [found[name] for name in (names or sorted(found))]


def check_plugin(
    point: EntryPoint, *, rules: Collection[str] = (), seed: int = 0, progress: Progress | None = None
) -> PluginReport:
    """
    Run every rule that concerns the plugin.

    Args:
        point: Its entry point.
        rules: Ids of the rules to run; empty for all.
        seed: Chooses the texts.
        progress: Told the subject and the rule before each check.
    """
    subject = PluginSubject(point)
    trials = [_Trial("plugin", Kind.PLUGIN, lambda _folder: subject), *_trials(subject.registry(), seed)]
    reports = []
    for trial in trials:
        wanted = [rule for rule in rules_of(trial.kind) if not rules or rule.id in rules]
        outcomes = tuple(_outcome(trial, rule, progress) for rule in wanted)
        if outcomes:
            reports.append(SubjectReport(trial.name, outcomes))
    distribution, version = ("unknown", "unknown") if point.dist is None else (point.dist.name, point.dist.version)
    return PluginReport(point.name, distribution, version, tuple(reports))


def other_contracts() -> tuple[ArtifactContract, ...]:
    """Contracts of everything that is installed."""
    return tuple(installed_contracts(load_plugins(entry_points(group=ENTRY_POINT_GROUP), {}).registry).values())


def _trials(registry: Registry, seed: int) -> Iterator[_Trial]:
    for item in registry.strategies:
        if item.options.get("zero_weight"):
            yield _Trial(f"strategy {item.name}", Kind.DRAFTER, _strategy(item, seed))
    fixtures = list(registry.fixtures)
    targets = [item for item in fixtures if item.options["kind"] == "target"]
    for item in fixtures:
        kind, name = item.options["kind"], item.name.partition("/")[2]
        if kind == "target":
            others = [other.value for other in targets if other is not item][:1]
            yield _Trial(f"target {name}", Kind.TARGET, _target(item.value, others, seed))
        elif kind == "drafter":
            yield _Trial(f"drafter {name}", Kind.DRAFTER, _drafter(item.value, seed))
        else:
            yield _Trial(f"artifact {name}", Kind.ARTIFACT, _contract(item.value, seed))
            for strategy in registry.strategies:
                if strategy.options.get("artifact_kind") == _kind_of(item.value):
                    made = _with_artifact(strategy, item.value, seed)
                    yield _Trial(f"strategy {strategy.name} on {name}", Kind.DRAFTER, made)


def _strategy(item: Registration[Callable[[Any], Any]], seed: int) -> Make:
    def make(_folder: Path) -> DrafterSubject:
        config = None if item.config is None else item.config()
        model = ScriptedTarget(tokenizer=ScriptedTokenizer.chat(), order=2, seed=seed)
        return DrafterSubject(item.value(config), model, seed=seed)

    return make


def _target(factory: Make, others: Sequence[Make], seed: int) -> Make:
    def make(folder: Path) -> Any:
        made = target_subject(factory(_empty(folder, "model")), seed=seed, again=import_path(factory))
        models = [target_subject(other(_empty(folder, f"other-{i}"))).model for i, other in enumerate(others)]
        return evolve(made, others=tuple(models))

    return make


def _contract(factory: Make, seed: int) -> Make:
    return lambda folder: contract_subject(factory(folder), others=other_contracts(), seed=seed)


def _kind_of(factory: Make) -> str | None:
    """The kind of an artifact fixture; None where it cannot be made, which its own trial tells in full."""
    with tempfile.TemporaryDirectory() as folder, suppress(Exception):
        contract, _, model = factory(Path(folder))
        model.close()
        return str(contract.kind)
    return None


def _with_artifact(item: Registration[Callable[..., Any]], factory: Make, seed: int) -> Make:
    """A strategy with the good file of one of the plugin's artifact fixtures."""

    def make(folder: Path) -> DrafterSubject:
        subject = contract_subject(factory(folder))
        config = None if item.config is None else item.config()
        return DrafterSubject(item.value(config, artifact_of(subject)), subject.model, seed=seed)

    return make


def _drafter(factory: Make, seed: int) -> Make:
    return lambda folder: drafter_subject(factory(folder), seed=seed)


def _empty(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir()
    return path


def _outcome(trial: _Trial, rule: Rule, progress: Progress | None) -> Outcome:
    if progress is not None:
        progress(trial.name, rule)
    try:
        with _subject(trial, rule) as subject:
            rule.run(subject)
    except ConformanceFailure as exc:
        return Outcome(rule, failure=exc)
    except NotApplicable as exc:
        return Outcome(rule, reason=str(exc))
    return Outcome(rule)


@contextmanager
def _subject(trial: _Trial, rule: Rule) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            subject = trial.make(Path(folder))
        except CapabilityError as exc:  # a fixture that needs what is not installed here
            raise NotApplicable(str(exc)) from exc
        except Exception as exc:
            did = f"its factory raised {type(exc).__name__}: {' '.join(str(exc).split())}"
            raise ConformanceFailure(rule.id, rule.title, did, f"a {trial.kind} to check", rule.look) from exc
        try:
            yield subject
        finally:
            for model in (getattr(subject, "model", None), *getattr(subject, "others", ())):
                if model is not None:
                    model.close()
