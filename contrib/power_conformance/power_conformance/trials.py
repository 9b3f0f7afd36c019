"""What the rules of one plugin are run on: the package, its strategies and the fixtures it offers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Self

from attrs import evolve, frozen

from power_conformance.failures import ConformanceFailure, NotApplicable
from power_conformance.fixtures import artifact_of, contract_subject, drafter_subject, target_subject
from power_conformance.registry import Kind, Rule
from power_conformance.subjects import ContractSubject, DrafterSubject, PluginSubject, TargetSubject, import_path
from power_core.artifacts import Artifact, ArtifactContract
from power_core.artifacts.matching import installed_contracts
from power_core.capabilities import Registration, Registry
from power_core.errors import CapabilityError
from power_core.hookspecs import ENTRY_POINT_GROUP
from power_core.plugins import load_plugins
from power_core.target import TargetModel
from power_core.testing import ScriptedTarget, ScriptedTokenizer

__all__ = ["Stage", "Trial", "other_contracts", "package", "trials"]

Factory = Callable[[Path], Any]


@frozen
class Trial:
    """
    A subject by name, in two parts.

    Args:
        name: For the table: ``strategy suffix``, ``target tiny-llama``.
        kind: Of the rules that concern it.
        fixture: Makes what is dear, models and files; the stack closes and removes them. Once for all rules.
        subject: Makes the subject from it, drafters included. Once for each rule: none sees what another left.
        is_shared: False where the fixture too is made for each rule, because one factory makes target and drafter.
    """

    name: str
    kind: Kind
    fixture: Callable[[ExitStack], Any]
    subject: Callable[[Any], Any]
    is_shared: bool = True


class Stage:
    """
    The models and files of a trial, shared by its rules; a context manager that closes and removes them.

    They are made when the first rule asks, and anew after a rule that was broken or that closes the model.

    Args:
        trial: The trial.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._stack = ExitStack()
        self._made: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.clear()

    def run(self, rule: Rule) -> None:
        """
        Check *rule* on a subject of this trial.

        Raises:
            ConformanceFailure: The subject breaks the rule, or cannot be made.
            NotApplicable: The rule does not concern the subject, or it needs what is not installed.
        """
        try:
            rule.run(self._subject(rule))
        except ConformanceFailure:
            self.clear()
            raise
        finally:
            if rule.closes_model or not self._trial.is_shared:
                self.clear()

    def clear(self) -> None:
        """Close and remove everything; the next rule gets new ones."""
        self._made = None
        self._stack.close()

    def _subject(self, rule: Rule) -> Any:
        try:
            if self._made is None:
                self._made = self._trial.fixture(self._stack)
            return self._trial.subject(self._made)
        except CapabilityError as exc:  # a fixture that needs what is not installed here
            raise NotApplicable(str(exc)) from exc
        except Exception as exc:
            did = f"its factory raised {type(exc).__name__}: {' '.join(str(exc).split())}"
            raise ConformanceFailure(rule.id, rule.title, did, f"a {self._trial.kind} to check", rule.look) from exc


def package(plugin: PluginSubject) -> Trial:
    """The plugin as a package."""
    return Trial("plugin", Kind.PLUGIN, lambda _stack: plugin, _as_it_is)


def trials(registry: Registry, seed: int) -> Iterator[Trial]:
    """
    Everything else of a plugin that rules can be run on.

    Args:
        registry: What it registers.
        seed: Chooses the texts.
    """
    for item in registry.strategies:
        if item.options.get("zero_weight"):
            yield _strategy(item, seed)
    fixtures = list(registry.fixtures)
    targets = [item for item in fixtures if item.options["kind"] == "target"]
    for item in fixtures:
        kind, name = item.options["kind"], item.name.partition("/")[2]
        if kind == "target":
            others = [other.value for other in targets if other is not item][:1]
            yield _target(name, item.value, others, seed)
        elif kind == "drafter":
            yield _drafter(name, item.value, seed)
        else:
            yield _contract(name, item.value, seed)
            for strategy in registry.strategies:
                if strategy.options.get("artifact_kind") == _kind_of(item.value):
                    yield _with_artifact(name, strategy, item.value, seed)


def other_contracts() -> tuple[ArtifactContract, ...]:
    """Contracts of everything that is installed."""
    return tuple(installed_contracts(load_plugins(entry_points(group=ENTRY_POINT_GROUP), {}).registry).values())


def _strategy(item: Registration[Callable[[Any], Any]], seed: int) -> Trial:
    def fixture(stack: ExitStack) -> TargetModel:
        return _closing(stack, ScriptedTarget(tokenizer=ScriptedTokenizer.chat(), order=2, seed=seed))

    def subject(model: TargetModel) -> DrafterSubject:
        return DrafterSubject(item.value(_default(item)), model, seed=seed)

    return Trial(f"strategy {item.name}", Kind.DRAFTER, fixture, subject)


def _target(name: str, factory: Factory, others: Sequence[Factory], seed: int) -> Trial:
    def fixture(stack: ExitStack) -> TargetSubject:
        made = target_subject(factory(_folder(stack)), seed=seed, again=import_path(factory))
        _closing(stack, made.model)
        models = [_closing(stack, target_subject(other(_folder(stack))).model) for other in others]
        return evolve(made, others=tuple(models))

    return Trial(f"target {name}", Kind.TARGET, fixture, _as_it_is)


def _drafter(name: str, factory: Factory, seed: int) -> Trial:
    def fixture(stack: ExitStack) -> DrafterSubject:
        made = drafter_subject(factory(_folder(stack)), seed=seed)
        _closing(stack, made.model)
        return made

    return Trial(f"drafter {name}", Kind.DRAFTER, fixture, _as_it_is, is_shared=False)


def _contract(name: str, factory: Factory, seed: int) -> Trial:
    def fixture(stack: ExitStack) -> ContractSubject:
        made = contract_subject(factory(_folder(stack)), others=other_contracts(), seed=seed)
        _closing(stack, made.model)
        return made

    return Trial(f"artifact {name}", Kind.ARTIFACT, fixture, _as_it_is)


def _with_artifact(name: str, item: Registration[Callable[..., Any]], factory: Factory, seed: int) -> Trial:
    """A strategy with the good file of one of the plugin's artifact fixtures."""

    def fixture(stack: ExitStack) -> tuple[Artifact, TargetModel]:
        made = contract_subject(factory(_folder(stack)))
        _closing(stack, made.model)
        return artifact_of(made), made.model

    def subject(made: tuple[Artifact, TargetModel]) -> DrafterSubject:
        artifact, model = made
        return DrafterSubject(item.value(_default(item), artifact), model, seed=seed)

    return Trial(f"strategy {item.name} on {name}", Kind.DRAFTER, fixture, subject)


def _kind_of(factory: Factory) -> str | None:
    """The kind of an artifact fixture; None where it cannot be made, which its own trial tells in full."""
    with tempfile.TemporaryDirectory() as folder, suppress(Exception):
        contract, _, model = factory(Path(folder))
        model.close()
        return str(contract.kind)
    return None


def _default(item: Registration[Any]) -> Any:
    return None if item.config is None else item.config()


def _as_it_is(made: Any) -> Any:
    return made


def _folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory()))


def _closing(stack: ExitStack, model: TargetModel) -> TargetModel:
    """*model*, closed with *stack*; that closing works is asked by a rule of its own."""

    def close() -> None:
        with suppress(Exception):
            model.close()

    stack.callback(close)
    return model
