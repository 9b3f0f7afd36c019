"""Rules of plugins: what they register."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import click

from power_conformance.failures import fail, refuse
from power_conformance.registry import rule
from power_conformance.subjects import PluginSubject
from power_core.capabilities import Registration
from power_core.drafter import Drafter, DrafterRequirements
from power_core.errors import ArtifactError
from power_core.target import TargetBackend

_CONFIG = "RegisterTarget and RegisterStrategy in power_core/hookspecs.py"
_BACKEND = "TargetBackend in power_core/target.py"
_FOREIGN = {
    "empty": b"",
    "text": b"this is no model file, whatever its name says\n" * 20,
    "zeros": bytes(4096),
    "magic-only": b"GGUF",
    "magic-and-noise": b"GGUF" + bytes(range(256)) * 16,
}


@rule("P-CONFIG-01", look=_CONFIG)
def check_config_defaults(subject: PluginSubject) -> None:
    """
    Config classes are frozen and every field has a type and a default, so that a plugin runs without a section in
    power.toml.
    """
    for item, config in _configs(subject):
        for each in attrs.fields(config):
            if each.type is None or (each.init and each.default is attrs.NOTHING):
                fail(f"{config.__name__}.{each.name} has no {'type' if each.type is None else 'default'}", "both")
        if not _is_frozen(config):
            fail(f"{config.__name__}, the config of {item.name!r}, can be changed", "attrs.frozen")


@rule("P-CONFIG-02", look=_CONFIG)
def check_config_docs(subject: PluginSubject) -> None:
    """Every field of a config class is described in its docstring, because that is the only manual of the section."""
    for item, config in _configs(subject):
        for each in attrs.fields(config):
            if not re.search(rf"^\s*`*{re.escape(each.name)}`*\s*(\(.*\))?:", config.__doc__ or "", re.MULTILINE):
                fail(
                    f"{config.__name__}, the config of {item.name!r}, does not describe {each.name}", "an `Args:` line"
                )


@rule("P-FACTORY-01", look="power_core/hookspecs.py")
def check_factories(subject: PluginSubject) -> None:
    """
    Factories make, from the default config, what they registered for: a target backend or a drafter with its
    requirements.
    """
    registry = subject.registry()
    for item in registry.targets:
        made = item.value(_default(item))
        if not isinstance(made, TargetBackend):
            fail(f"target {item.name!r} made a {type(made).__name__}", "a TargetBackend: `claims` and `load`")
    for item, made in _drafters(subject):
        if not isinstance(made, Drafter):
            fail(f"strategy {item.name!r} made a {type(made).__name__}", "a Drafter: `requirements` and `open`")
        if not isinstance(made.requirements(), DrafterRequirements):
            fail(f"strategy {item.name!r} requires {made.requirements()!r}", "DrafterRequirements")


@rule("P-FACTORY-02", look="RegisterStrategy in power_core/hookspecs.py")
def check_zero_weight(subject: PluginSubject) -> None:
    """Only strategies that need no artifact call themselves zero-weight, because `auto` chooses among those."""
    for item in subject.registry().strategies:
        if item.options.get("zero_weight") and item.options.get("artifact_kind") is not None:
            fail(f"strategy {item.name!r} is zero-weight and loads {item.options['artifact_kind']!r}", "one of the two")
    for item, made in _drafters(subject):
        kind = made.requirements().artifact_kind
        if item.options.get("zero_weight") and kind is not None:
            fail(f"strategy {item.name!r} is zero-weight and requires an artifact of kind {kind!r}", "one of the two")


@rule("P-DOCS-01", look="RegisterStrategy and ModelSource in power_core/hookspecs.py")
def check_descriptions(subject: PluginSubject) -> None:
    """Strategies and models have a one-line description, because users choose them from a list."""
    registry = subject.registry()
    lines = [(f"strategy {item.name!r}", item.options.get("description")) for item in registry.strategies]
    lines += [(f"model {item.name!r}", item.value.description) for item in registry.models]
    for what, line in lines:
        if not line or "\n" in line:
            fail(f"{what} has the description {line!r}", "one line")


@rule("P-BACKEND-01", look=_BACKEND)
def check_claims(subject: PluginSubject) -> None:
    """
    `claims` answers for any path without raising, and claims no file that is missing, because every backend is
    asked in turn.
    """
    with tempfile.TemporaryDirectory() as folder:
        missing = Path(folder) / "missing"
        for name, backend in _backends(subject):
            paths = [missing, Path(folder), *_foreign_files(Path(folder), ".bin")]
            for path in paths:
                answer = backend.claims(path)
                if not isinstance(answer, bool) or (path in (missing, Path(folder)) and answer):
                    fail(f"target {name!r} answered {answer!r} for {path.name!r}", "a bool, False without a file")


@rule("P-BACKEND-02", look=_BACKEND)
def check_foreign_files(subject: PluginSubject) -> None:
    """
    A damaged or foreign file is refused with an ArtifactError before native code sees it, because native code would
    end the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, backend in _backends(subject):
            for path in (Path(folder) / "missing.gguf", *_foreign_files(Path(folder), ".gguf")):
                try:
                    backend.load(path)
                except ArtifactError:
                    continue
                except Exception as exc:  # noqa: BLE001 - whatever it raised is the finding
                    fail(f"target {name!r} raised {type(exc).__name__} for {path.name!r}: {exc}", "an ArtifactError")
                fail(f"target {name!r} loaded {path.name!r}", "an ArtifactError")


@rule("P-MODEL-01", look="ModelSource in power_core/hookspecs.py")
def check_models(subject: PluginSubject) -> None:
    """
    A model is located as a file, or the error names the command that brings it, because models live in other
    packages.
    """
    models = list(subject.registry().models)
    if not models:
        refuse("the plugin registers no model")
    for item in models:
        try:
            path = item.value.locate()
        except ArtifactError as exc:
            if not exc.fix:
                fail(f"model {item.name!r} is missing without a hint: {exc}", "fix=, the command that brings it")
            continue
        if not path.is_file():
            fail(f"model {item.name!r} is located at {path}, which is no file", "a file, or an ArtifactError")


@rule("P-CONTRACT-01", look="RegisterContract in power_core/hookspecs.py")
def check_contracts(subject: PluginSubject) -> None:
    """
    A contract is of the kind it is registered as, and a fixture offers a good file of it, because without one nothing
    can be told from what it refuses.
    """
    registry = subject.registry()
    contracts = {item.name: item.value() for item in registry.contracts}
    if not contracts:
        refuse("the plugin registers no contract")
    for name, contract in contracts.items():
        if contract.kind != name:
            fail(f"the contract registered as {name!r} is of kind {contract.kind!r}", name)
    offered = [item for item in registry.fixtures if item.options["kind"] == "artifact"]
    if not offered:
        fail(f"offers no fixture for {', '.join(contracts)}", "power_register_fixtures with kind='artifact'")


@rule("P-COMMAND-01", look="RegisterCommand in power_core/hookspecs.py")
def check_commands(subject: PluginSubject) -> None:
    """
    A registered command is a click command that can be imported, because it is imported only when somebody runs it.
    """
    commands = list(subject.registry().commands)
    if not commands:
        refuse("the plugin registers no command")
    for item in commands:
        module, _, name = item.value.partition(":")
        command = getattr(importlib.import_module(module), name, None)
        if not isinstance(command, click.Command):
            fail(f"command {item.name!r} is {item.value}, a {type(command).__name__}", "a click.Command")


def _configs(subject: PluginSubject) -> Iterator[tuple[Registration[Any], type]]:
    registry = subject.registry()
    found = [item for item in (*registry.targets, *registry.strategies) if item.config is not None]
    if not found:
        refuse("the plugin has no config class")
    for item in found:
        if item.config is not None:
            yield item, item.config


def _is_frozen(config: type) -> bool:
    instance = config()
    try:
        for each in attrs.fields(config):
            setattr(instance, each.name, getattr(instance, each.name))
            return False
    except attrs.exceptions.FrozenInstanceError:
        pass
    return True


def _default(item: Registration[Any]) -> Any:
    return None if item.config is None else item.config()


def _drafters(subject: PluginSubject) -> Iterator[tuple[Registration[Any], Any]]:
    """Strategies with what their factories make; those that cannot be made without an artifact are left out."""
    for item in subject.registry().strategies:
        factory: Callable[..., Any] = item.value
        if item.options.get("artifact_optional"):
            yield item, factory(_default(item), None)
        elif item.options.get("artifact_kind") is None:
            yield item, factory(_default(item))


def _backends(subject: PluginSubject) -> Iterator[tuple[str, TargetBackend]]:
    targets = list(subject.registry().targets)
    if not targets:
        refuse("the plugin registers no target")
    for item in targets:
        yield item.name, item.value(_default(item))


def _foreign_files(folder: Path, suffix: str) -> Iterator[Path]:
    for name, data in _FOREIGN.items():
        path = folder / f"{name}{suffix}"
        path.write_bytes(data)
        yield path
