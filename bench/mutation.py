"""
Mutation testing of what must not be wrong: transaction, sampler and scheduler.

    pip install cosmic-ray
    python bench/mutation.py --minutes 10 --seed 1 [MODULE ...]

Works on a copy of the working tree. Takes the mutants in an order that the seed decides, runs the tests of the mutant's
module until one fails, and prints a diff of each mutant that survived. Mutants of annotations and docstrings alone are
left out: they change nothing that runs. What survives, and why it may, is in bench/mutation.md.

Each mutant is tried in a fork of one process that has imported everything but Power, which saves most of the time;
the bound on a mutant that hangs is on processor time, so that a busy machine kills none.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest
from attrs import frozen
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
SCHEDULER = [
    "tests/scheduler",
    *(f"tests/engine/test_{name}.py" for name in ["exhaustive", "rollback", "ends", "batch", "faults"]),
]
TESTS = {
    "power_core/transaction.py": ["tests/test_transaction.py"],
    "power_core/sampling": ["tests/test_sampling.py"],
    "power_core/scheduler": SCHEDULER,
}
PRELOADED = ["attrs", "click", "hypothesis", "hypothesis.strategies", "numpy", "pluggy", "structlog", "unittest.mock"]


@frozen
class Mutant:
    """A change to be made to a file: the *occurrence*-th that *operator* finds."""

    file: Path
    operator: str
    occurrence: int
    tests: tuple[str, ...]

    def code(self, root: Path) -> str | None:
        """The file's code after the change, or None where nothing that runs is another."""
        code = (root / self.file).read_text(encoding="utf-8")
        changed = mutate_code(code, get_operator(self.operator)(), self.occurrence)
        return None if changed is None or running(changed) == running(code) else changed


def mutants(root: Path, file: Path, tests: Sequence[str]) -> Iterator[Mutant]:
    """Every change of *file*; making them all takes long, counting them does not."""
    nodes = list(ast_nodes(get_ast((root / file).read_text(encoding="utf-8"))))
    for name in sorted(operator_names()):
        if get_operator(name).arguments():  # it would have to be told what to look for
            continue
        operator = get_operator(name)()
        count = sum(len(list(operator.mutation_positions(node))) for node in nodes)
        yield from (Mutant(file, name, occurrence, tuple(tests)) for occurrence in range(count))


def running(code: str) -> str:
    """The syntax tree without what does not run; the code itself where it has none."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return code
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("object")
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.dump(tree)


def is_killed(root: Path, mutant: Mutant, code: str, seconds: int) -> bool:
    """Whether a test fails, or takes more than *seconds* of processor time, with the mutant in place."""
    path = root / mutant.file
    original = path.read_text(encoding="utf-8")
    path.write_text(code, encoding="utf-8")
    try:
        return not passes(root, mutant.tests, seconds)
    finally:
        path.write_text(original, encoding="utf-8")


def passes(root: Path, tests: Sequence[str], seconds: int) -> bool:
    """Run *tests* of the copy in a fork of this process."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            os.chdir(root)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            sys.path[:] = [str(root), *(entry for entry in sys.path if not entry.startswith(str(ROOT / "bench")))]
            sys.dont_write_bytecode = True
            os.environ["PYTHONPATH"] = str(root)
            quiet = [option for plugin in ("cacheprovider", "randomly", "xdist") for option in ("-p", f"no:{plugin}")]
            code = int(pytest.main(["-x", "-q", "--assert=plain", *quiet, *tests]))
        except BaseException:  # noqa: BLE001 - a fork must not go on as its parent would
            code = 1
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def difference(root: Path, mutant: Mutant, code: str) -> str:
    """The mutant as a diff of one line of context."""
    original = (root / mutant.file).read_text(encoding="utf-8").splitlines()
    lines = difflib.unified_diff(original, code.splitlines(), str(mutant.file), mutant.operator, n=1, lineterm="")
    return "\n".join(lines)


def modules(wanted: list[str]) -> Iterator[tuple[Path, list[str]]]:
    """Files to mutate, with their tests."""
    for name, tests in TESTS.items():
        path = ROOT / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            relative = file.relative_to(ROOT)
            if file.name != "__init__.py" and (not wanted or any(str(relative).startswith(want) for want in wanted)):
                yield relative, tests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="paths to mutate; all of them by default")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seconds", type=int, default=60, help="of processor time, after which a mutant is killed")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for name in PRELOADED:
        import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy(root)
        population = [m for file, tests in modules(options.modules) for m in mutants(root, file, tests)]
        random.Random(options.seed).shuffle(population)
        report(root, population, options.minutes, options.seconds)


def copy(root: Path) -> None:
    """What git tracks, as it is in the working tree."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)


def report(root: Path, population: list[Mutant], minutes: float, seconds: int) -> None:
    for tests in {mutant.tests for mutant in population}:
        if not passes(root, tests, 10 * seconds):
            raise SystemExit(f"the tests {' '.join(tests)} fail without any mutant")
    end, tried, survived = time.monotonic() + minutes * 60, 0, 0
    for mutant in population:
        if time.monotonic() > end:
            break
        code = mutant.code(root)
        if code is None:
            continue
        tried += 1
        if is_killed(root, mutant, code, seconds):
            print(f"killed {mutant.file} {mutant.operator} {mutant.occurrence}", flush=True)
        else:
            survived += 1
            print(f"SURVIVED {mutant.operator} {mutant.occurrence}\n{difference(root, mutant, code)}", flush=True)
    score = f"{(tried - survived) / tried:.1%}" if tried else "unknown"
    print(f"{tried} of {len(population)} mutants tried, {survived} survived: score {score}")


if __name__ == "__main__":
    main()
