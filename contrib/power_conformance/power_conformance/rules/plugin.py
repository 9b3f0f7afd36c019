"""Rules of plugins: how they are packaged, found and imported."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from power_conformance.failures import fail, refuse
from power_conformance.registry import rule
from power_conformance.subjects import PluginSubject
from power_core import hookspecs
from power_core.capabilities import Registry

_GUIDE = "docs/plugin-authors.md"
_HOOKSPECS = "power_core/hookspecs.py"
# What a plugin's own module must not import: each costs more than all of `power --help`.
_HEAVY = (
    "jax",
    "llama_cpp",
    "numpy",
    "onnxruntime",
    "pandas",
    "safetensors",
    "scipy",
    "tensorflow",
    "torch",
    "transformers",
)
_TABLES = ("targets", "strategies", "models", "contracts", "artifacts", "commands")
_FIND_HEAVY = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(" ".join(name for name in sys.argv[2:] if name in sys.modules))
"""


@rule("P-LOAD-01", look=f"{_GUIDE}; `power plugins` shows the cause")
def check_loads(subject: PluginSubject) -> None:
    """
    The plugin loads by its entry point alone, because a plugin that fails is skipped with everything it would have
    provided.
    """
    result = subject.load()
    if result.failures:
        fail(f"failed to load: {result.failures[0].cause}", "a plugin that loads")


@rule("P-NAME-01", look=f"{_GUIDE}: the three names")
def check_names(subject: PluginSubject) -> None:
    """
    Distribution `power-x`, package `power_x` and entry point `x` are one name in three spellings, so that an
    error's name leads to the package.
    """
    name = subject.point.name
    distribution = re.sub(r"[-_.]+", "-", _distribution(subject).name).lower()
    expected = f"power-{name.replace('_', '-')}"
    if distribution != expected or subject.package != expected.replace("-", "_"):
        fail(
            f"is entry point {name!r} of package {subject.package!r} in distribution {distribution!r}",
            f"package {expected.replace('-', '_')!r} in distribution {expected!r}",
        )


@rule("P-META-01", look=f"{_GUIDE}: pyproject.toml")
def check_metadata(subject: PluginSubject) -> None:
    """
    The distribution says what it is and needs: a summary, a licence, a Python version and power-core, so that
    installers can refuse it.
    """
    metadata = _distribution(subject).metadata
    for key in ("Summary", "Requires-Python"):
        if key not in metadata:
            fail(f"has no {key} in its metadata", f"{key} in pyproject.toml")
    if not any(key in metadata for key in ("License-Expression", "License")):
        fail("names no licence in its metadata", "license in pyproject.toml")
    needs = [re.split(r"[^\w.-]", need)[0].lower() for need in _distribution(subject).requires or ()]
    if "power-core" not in needs:
        fail(f"depends on {needs}", "power-core among its dependencies")


@rule("P-TYPED-01", look="PEP 561")
def check_typing_marker(subject: PluginSubject) -> None:
    """The package ships `py.typed`, because without it type checkers ignore its annotations."""
    spec = importlib.util.find_spec(subject.package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not any((Path(folder) / "py.typed").is_file() for folder in folders):
        fail(f"ships no {subject.package}/py.typed", "the file, and in the wheel")


@rule("P-TYPED-02", look="PEP 561")
def check_annotations(subject: PluginSubject) -> None:
    """Functions of the entry module are annotated throughout, because they are the plugin's contract with the core."""
    for function in _own_functions(_module(subject)):
        signature = inspect.signature(function)
        bare = [name for name, p in signature.parameters.items() if p.annotation is p.empty]
        if bare or signature.return_annotation is signature.empty:
            what = f"argument {bare[0]!r}" if bare else "return value"
            fail(f"has no annotation for the {what} of {function.__qualname__}", "annotations on every function")


@rule("P-LAZY-01", look=f"{_HOOKSPECS}: heavy imports belong inside factories")
def check_lazy_imports(subject: PluginSubject) -> None:
    """Importing the entry module imports nothing heavy, because every `power` command imports every plugin."""
    command = [sys.executable, "-c", _FIND_HEAVY, subject.module, *_HEAVY]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        refuse("the module cannot be imported: see P-LOAD-01")
    heavy = done.stdout.split()
    if heavy:
        fail(f"imports {', '.join(heavy)} with {subject.module}", "heavy imports inside the factories")


@rule("P-HOOK-01", look=_HOOKSPECS)
def check_hooks_are_marked(subject: PluginSubject) -> None:
    """
    Every function named like a hook is marked with `hookimpl`, because an unmarked one is never called and nobody
    notices.
    """
    known = {name for name in vars(hookspecs) if name.startswith("power_register_")}
    for function in _own_functions(_module(subject)):
        name = function.__name__
        if name.startswith("power_register_") and not hasattr(function, "power_impl"):
            hint = "@hookimpl above it" if name in known else f"one of {', '.join(sorted(known))}, with @hookimpl"
            fail(f"defines {name} without @hookimpl", hint)


@rule("P-HOOK-02", look=_HOOKSPECS)
def check_registers_something(subject: PluginSubject) -> None:
    """The plugin registers at least one thing, because an entry point that offers nothing is a mistake."""
    result = subject.load()
    if result.failures:
        refuse("the plugin does not load: see P-LOAD-01")
    registry = result.registry
    if not any(_tables(registry).values()):
        fail("registers nothing", f"something: {', '.join(_TABLES)}")


@rule("P-HOOK-03", look=_HOOKSPECS)
def check_registration_repeats(subject: PluginSubject) -> None:
    """Loading twice in one process registers the same twice, because programs may have several runtimes."""
    first, second = (_tables(subject.registry()) for _ in range(2))
    if first != second:
        fail(f"registered {second} the second time", f"{first}, as the first time")


def _distribution(subject: PluginSubject) -> Distribution:
    if subject.point.dist is None:
        refuse("the entry point belongs to no installed distribution")
    return subject.point.dist


def _module(subject: PluginSubject) -> ModuleType:
    try:
        return importlib.import_module(subject.module)
    except Exception:  # noqa: BLE001 - a plugin's import may raise anything
        refuse("the module cannot be imported: see P-LOAD-01")


def _own_functions(module: ModuleType) -> Iterator[Callable[..., Any]]:
    for value in vars(module).values():
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            yield value


def _tables(registry: Registry) -> dict[str, list[str]]:
    """Names by what they are names of; fixtures are no reason to install a plugin."""
    return {table: getattr(registry, table).names() for table in _TABLES}
