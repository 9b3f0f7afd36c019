"""
Mutation testing of what must not be wrong: transaction, sampler and scheduler.

    pip install cosmic-ray
    python bench/mutation.py --minutes 10 --seed 1 [MODULE ...]

Works on a copy of what is committed. Takes a sample of the mutants, the same for the same seed, runs the tests of the
mutant's module until one fails, and prints a diff of each mutant that survived. Mutants of annotations and
docstrings alone are left out: they change nothing that runs.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
ENGINE = [
    "tests/scheduler",
    *(f"tests/engine/test_{name}.py" for name in ["exhaustive", "rollback", "ends", "batch", "faults"]),
]
SAMPLING = ["tests/test_sampling.py", "tests/engine/test_sampling.py"]
TESTS = {
    "power_core/transaction.py": ["tests/test_transaction.py", *ENGINE],
    "power_core/sampling": SAMPLING,
    "power_core/scheduler": ENGINE,
}


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


def is_killed(root: Path, mutant: Mutant, code: str, timeout: float) -> bool:
    """Whether a test fails, or does not end, with the mutant in place."""
    path = root / mutant.file
    original = path.read_text(encoding="utf-8")
    path.write_text(code, encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *mutant.tests]
    try:
        done = subprocess.run(command, cwd=root, env=environ, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(original, encoding="utf-8")
    return done.returncode != 0


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
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds after which a hanging mutant counts as killed"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", root], input=archive.stdout, check=True)
        population = [m for file, tests in modules(options.modules) for m in mutants(root, file, tests)]
        random.Random(options.seed).shuffle(population)
        report(root, population, options.minutes, options.timeout)


def report(root: Path, population: list[Mutant], minutes: float, timeout: float) -> None:
    end, tried, survived = time.monotonic() + minutes * 60, 0, 0
    for mutant in population:
        if time.monotonic() > end:
            break
        code = mutant.code(root)
        if code is None:
            continue
        tried += 1
        if is_killed(root, mutant, code, timeout):
            print(f"killed {mutant.file} {mutant.operator} {mutant.occurrence}", flush=True)
        else:
            survived += 1
            print(f"SURVIVED {mutant.operator} {mutant.occurrence}\n{difference(root, mutant, code)}", flush=True)
    score = f"{(tried - survived) / tried:.1%}" if tried else "unknown"
    print(f"{tried} of {len(population)} mutants tried, {survived} survived: score {score}")


if __name__ == "__main__":
    main()
