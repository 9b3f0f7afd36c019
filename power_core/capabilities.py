"""
The capability registry: what is registered, by whom, and what a strategy resolves to.

Everything here fails closed: a name nobody provides is an error that says what would provide it,
never a substitute.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs
from attrs import frozen

from power_core.errors import CapabilityError, NameTakenError, PluginError
from power_core.hookspecs import ArtifactSource, ModelSource
from power_core.names import NAME_RULE, is_name, one_of
from power_core.types import AUTO, OFF

__all__ = ["AUTO", "CORE_COMMANDS", "FIXTURE_KINDS", "OFF", "Registration", "Registry", "Table"]

# A separate draft model is a real technique, but nothing provides it yet: the name is kept free so
# that no plugin can take it for something else.
RESERVED = {"draft-model": "no plugin provides a separate draft model yet"}
CORE_COMMANDS = frozenset({"artifacts", "doctor", "generate", "models", "plugins", "receipt", "simulate", "verify"})
_OPTIONS = {
    "targets": frozenset[str](),
    "strategies": frozenset({"artifact_kind", "artifact_optional", "auto_rank", "description", "zero_weight"}),
    "models": frozenset({"default"}),
    "contracts": frozenset[str](),
    "artifacts": frozenset[str](),
    "commands": frozenset({"help"}),
    "fixtures": frozenset({"kind"}),
}
FIXTURE_KINDS = ("target", "drafter", "artifact")
_CONFIGURABLE = frozenset({"targets", "strategies"})
_FITS: Mapping[str, Callable[[object], bool]] = {
    "targets": callable,
    "strategies": callable,
    "models": lambda value: isinstance(value, ModelSource),
    "contracts": callable,
    "artifacts": lambda value: isinstance(value, ArtifactSource),
    "commands": lambda value: isinstance(value, str) and value.count(":") == 1,
    "fixtures": callable,
}
T = TypeVar("T")


@frozen
class Registration(Generic[T]):
    """One registered thing: its name, the plugin that owns it, and what it is."""

    name: str
    plugin: str
    owner: str  # distribution and version
    value: T
    config: type | None = None
    options: Mapping[str, Any] = {}


class Table(Generic[T]):
    """Registrations of one kind by name."""

    def __init__(self, kind: str, items: Mapping[str, Registration[T]] | None = None) -> None:
        self.kind = kind
        self._items: dict[str, Registration[T]] = dict(items or {})

    def add(self, item: Registration[T]) -> None:
        """Raises `NameTakenError` if the name is taken, naming both owners."""
        if item.name in self._items:
            raise NameTakenError(
                f"{self.kind} {item.name!r} is already registered by {self._items[item.name].owner}",
                who=item.owner,
                plugin=item.plugin,
                got=item.name,
                fix=f"uninstall one of the two, or block one with POWER_BLOCK_PLUGINS={item.plugin}",
            )
        self._items[item.name] = item

    def get(self, name: str) -> Registration[T]:
        """Raises `CapabilityError` with the nearest name if nobody registered *name*."""
        if name in self._items:
            return self._items[name]
        near = difflib.get_close_matches(name, self._items, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CapabilityError(
            f"no installed plugin provides the {self.kind} {name!r}",
            got=name,
            expected=one_of(self._items),
            fix=hint + "`power plugins` shows what is installed and what failed to load",
        )

    def names(self) -> list[str]:
        return sorted(self._items)

    def copy(self) -> Table[T]:
        return Table(self.kind, self._items)

    def __iter__(self) -> Iterator[Registration[T]]:
        return (self._items[name] for name in self.names())

    def __contains__(self, name: object) -> bool:
        return name in self._items


class Registry:
    """All tables. A new registry starts as a copy of *existing*, so that a failed plugin leaves no trace."""

    def __init__(self, existing: Registry | None = None) -> None:
        self.targets: Table[Callable[[Any], Any]] = existing.targets.copy() if existing else Table("target backend")
        self.strategies: Table[Callable[[Any], Any]] = existing.strategies.copy() if existing else Table("strategy")
        self.models: Table[ModelSource] = existing.models.copy() if existing else Table("model")
        self.contracts: Table[Callable[[], Any]] = existing.contracts.copy() if existing else Table("artifact kind")
        self.artifacts: Table[ArtifactSource] = existing.artifacts.copy() if existing else Table("artifact")
        self.commands: Table[str] = existing.commands.copy() if existing else Table("command")
        self.fixtures: Table[Callable[[Path], Any]] = existing.fixtures.copy() if existing else Table("fixture")

    def registrar(self, hook: str, plugin: str, owner: str) -> Callable[..., None]:
        """The ``register`` callback of *hook* for one plugin."""
        kind = hook.removeprefix("power_register_")
        table: Table[Any] = getattr(self, kind)

        def register(name: str, value: Any, /, *, config: type | None = None, **options: Any) -> None:
            problem = _problem(kind, name, value, config, options)
            if problem is not None:
                raise PluginError(f"{table.kind} {name!r}: {problem}", who=owner, plugin=plugin, got=name)
            if kind == "commands" and name in CORE_COMMANDS:
                raise NameTakenError(
                    f"command {name!r} is already registered by power-core", who=owner, plugin=plugin, got=name
                )
            if kind == "fixtures":
                name = f"{plugin}/{name}"  # two plugins may well have a "tiny" each
            table.add(Registration(name, plugin, owner, value, config, options))

        return register

    def strategy(self, name: str) -> Registration[Callable[[Any], Any]]:
        """The registration of strategy *name*; reserved names say what is missing."""
        if name in RESERVED:
            raise CapabilityError(
                f"strategy {name!r} is reserved: {RESERVED[name]}",
                got=name,
                expected=one_of(self.strategies.names()),
                fix="choose an installed strategy or 'off'",
            )
        return self.strategies.get(name)

    def auto_strategy(self) -> str:
        """
        What `auto` stands for on a target without artifacts: the best-ranked strategy that loads none, else `off`.

        Strategies whose artifact is there for a target come before it: see `power_core.strategies`.
        """
        ranked = [
            (item.options["auto_rank"], item.name)
            for item in self.strategies
            if item.options.get("auto_rank") is not None and item.options.get("artifact_kind") is None
        ]
        return min(ranked)[1] if ranked else OFF

    def default_model(self) -> str | None:
        return next((r.name for r in self.models if r.options.get("default")), None)


def _problem(kind: str, name: object, value: object, config: object, options: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a registration; they come from code we have never seen."""
    if not isinstance(name, str) or not name or name.startswith("-"):
        return "a name is a string, not empty, and does not begin with '-'"
    if name in RESERVED or name in (OFF, AUTO):
        return "the name is reserved"
    if kind == "strategies" and ("," in name or name != name.strip()):
        return "a strategy's name has no commas and no spaces around it: a list of names is a chain"
    for option in options:
        if option not in _OPTIONS[kind]:
            near = difflib.get_close_matches(option, _OPTIONS[kind], n=1)
            return f"unknown option {option!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if kind == "strategies" and (problem := _artifact_problem(options)):
        return problem
    if kind == "artifacts" and not is_name(name):
        return f"an artifact's name is {NAME_RULE}"
    if kind == "commands" and not isinstance(options.get("help"), str):
        return "a command needs help=, the line `power --help` shows"
    if kind == "fixtures" and options.get("kind") not in FIXTURE_KINDS:
        return f"a fixture needs kind=, one of {', '.join(FIXTURE_KINDS)}"
    if config is not None and (kind not in _CONFIGURABLE or not attrs.has(config)):  # type: ignore[arg-type]
        return "config is the attrs class of a target's or a strategy's section"
    return None if _FITS[kind](value) else f"cannot be registered by a {type(value).__name__}"


def _artifact_problem(options: Mapping[str, Any]) -> str | None:
    """What is wrong with the options of a strategy that loads an artifact."""
    kind = options.get("artifact_kind")
    if kind is None:
        return "artifact_optional needs artifact_kind=" if options.get("artifact_optional") else None
    if not isinstance(kind, str) or not kind:
        return "artifact_kind is the name of a contract"
    return "a zero-weight strategy loads no artifact" if options.get("zero_weight") else None
