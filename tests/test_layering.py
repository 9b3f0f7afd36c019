"""The shape of the code: imports go one way, and plugins use what is public."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "power_core"
# Leaves first. A module may import those on lines above it; modules of one line may import each other.
LAYERS = [
    {"errors", "types"},
    {"host", "locks", "names", "shapes", "user_cache"},
    {"hookspecs", "structuring"},
    {"capabilities", "log", "models", "target"},
    {"chat", "draft_context", "drafter", "prefix", "request"},
    {"plugins", "sampling", "decoding", "grammar", "grammar_size", "transaction"},
    {"artifacts", "evidence", "scheduler", "config"},
    {"strategies"},
    {"engine", "generation"},
    {"runtime"},
    {"cli", "testing"},
]
PACKAGES = sorted(path.parent for path in ROOT.glob("*/power_*/power_*/__init__.py"))


def imported(file: Path, *, types_too: bool = False, inner: bool = True) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of the file; for type checkers only where *types_too*, in functions if *inner*."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if not types_too and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {child for statement in node.body for child in ast.walk(statement)}
    if not inner:
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        skipped |= {child for function in functions for child in ast.walk(function)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def unit(file: Path) -> str:
    """The core module or subpackage a file belongs to."""
    return file.relative_to(CORE).parts[0].removesuffix(".py")


def test_every_core_module_has_a_layer() -> None:
    """A new module is put on a line of the table, and one that is gone leaves it."""
    units = {unit(file) for file in CORE.rglob("*.py")} - {"__init__"}
    assert units == set().union(*LAYERS)


@pytest.mark.parametrize("file", sorted(CORE.rglob("*.py")), ids=lambda file: str(file.relative_to(CORE)))
def test_core_imports_go_one_way(file: Path) -> None:
    """No module imports one above it: the leaves can be read, tested and used alone."""
    if unit(file) == "__init__":
        return
    rank = {name: index for index, layer in enumerate(LAYERS) for name in layer}
    wrong = [
        module
        for module, _ in imported(file)
        if module.startswith("power_core.") and rank[module.split(".")[1]] > rank[unit(file)]
    ]
    assert wrong == []


def test_the_core_imports_no_plugin() -> None:
    """Not even for types: everything the core knows of a plugin it was given."""
    plugins = {package.name for package in PACKAGES}
    wrong = {
        str(file.relative_to(ROOT)): module
        for file in CORE.rglob("*.py")
        for module, _ in imported(file, types_too=True)
        if module.split(".")[0] in plugins
    }
    assert wrong == {}


def test_the_step_loop_knows_no_plugins() -> None:
    """Hooks run at start-up; the loop sees protocols only, never who registered what."""
    forbidden = ("pluggy", "power_core.plugins", "power_core.capabilities", "power_core.hookspecs", "power_core.config")
    files = [*CORE.glob("scheduler/*.py"), CORE / "transaction.py"]
    wrong = [(file.name, module) for file in files for module, _ in imported(file) if module.startswith(forbidden)]
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_plugins_import_public_names_of_the_core(package: Path) -> None:
    """A plugin outside this repository could be written the same way."""
    wrong = []
    for file in package.rglob("*.py"):
        for module, name in imported(file, types_too=True):
            parts = [*module.split("."), name]
            if parts[0] == "power_core" and any(part.startswith("_") for part in parts):
                wrong.append((file.name, module, name))
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_plugins_need_no_other_plugin(package: Path) -> None:
    """Each can be installed without the others: what its entry point imports at once is its own, or the core's."""
    others = {other.name for other in PACKAGES} - {package.name}
    waiting, seen = [f"{package.name}.plugin"], set()
    while waiting:
        module = waiting.pop()
        file = package.parent.joinpath(*module.split(".")).with_suffix(".py")
        if module in seen or not file.exists():
            continue
        seen.add(module)
        names = set(imported(file, inner=False))
        assert not {name for name, _ in names if name.split(".")[0] in others}, module
        waiting += [full for name, part in names for full in (name, f"{name}.{part}") if full.startswith(package.name)]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_plugins_import_public_names_of_other_plugins(package: Path) -> None:
    """What one uses of another where it is installed is that one's interface."""
    others = {other.name for other in PACKAGES} - {package.name}
    imports = [(file.name, module, name) for file in package.rglob("*.py") for module, name in imported(file)]
    wrong = [each for each in imports if each[1].split(".")[0] in others and "._" in f"{each[1]}.{each[2]}"]
    assert wrong == []
