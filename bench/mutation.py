"""
Mutation testing of what must not be wrong: transaction, sampler and scheduler.

    pip install cosmic-ray
    python bench/mutation.py --most 200 --seed 1 [MODULE ...]

Works on a copy of the working tree and prints a diff of each mutant that survived, then a table: mutants, tried,
killed. What survives, and why it may, is in bench/mutation.md. Mutants of annotations and docstrings are left out:
they change nothing that runs.

One pytest session collects all tests and runs each once, to learn which lines it reaches and how long it takes. Then
each mutant gets a fork of that session, where the changed functions take on their new code and the tests that reach
the changed statement run, the quickest first, until one fails. Property tests draw few examples there. What is
changed at import (constants, defaults, decorators) needs a fork that imports everything anew, and with `--confirm`
so does each survivor, with the examples of an ordinary run. Bounds are on processor time, so that a busy machine
kills no mutant; one that waits for ever is found by using none.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import hypothesis
import pytest
from mutants import Key, Module, changed_lines, mutants, statement_lines

ROOT = Path(__file__).resolve().parents[1]
SCHEDULER = "power_core/scheduler/{}.py"
# By what reaches the files: tests of each by itself, tests of what decides lengths, and tests through an engine.
UNITS = ["acceptance", "admission", "cache_disk", "checks", "outcome", "plan", "policy", "prefix", "prompt_cache"]
UNITS += ["queue", "replica_loop", "replicas", "reuse", "sequence", "serving", "sharing", "verifying", "widths"]
LENGTHS = ["backlog", "drafting", "kept_rows", "proposing"]
# With their own tests only, as nothing else asks for them by hand; those of cost_aware that replay texts take seconds.
ALONE = {name: [name] for name in ("chains", "costs", "loading", "simulate", "stats", "traces")}
ALONE["cost_aware"] = ["cost_aware_numbers"]
ENGINE = ["batch", "ends", "faults", "policies", "reuse", "rollback", "serving", "widths"]


def test_files(folder: str, names: list[str]) -> list[str]:
    """The test files there are of *names*."""
    files = [f"tests/{folder}test_{name}.py" for name in names]
    return [file for file in files if (ROOT / file).is_file()]


TESTS = {
    "power_core/transaction.py": test_files("", ["transaction"]),
    "power_core/sampling": sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_sampling*.py")),
    **dict.fromkeys(map(SCHEDULER.format, UNITS), test_files("scheduler/", UNITS)),
    **dict.fromkeys(
        map(SCHEDULER.format, LENGTHS), test_files("scheduler/", [*LENGTHS, "chains", "cost_aware", "costs"])
    ),
    **{SCHEDULER.format(name): test_files("scheduler/", tests) for name, tests in ALONE.items()},
    SCHEDULER.format("loop"): test_files("scheduler/", ["loop", "loop_settling"]) + test_files("engine/", ENGINE),
}
PARAMETERS = 3  # of a test through an engine: of those that have more, some evenly chosen ones
OUT = os.fdopen(os.dup(1), "w", buffering=1)  # what pytest prints goes nowhere
IDLE_S = 3.0  # without any processor time: it waits for what never comes


class Examples:
    """A pytest plugin: property tests draw *count* examples, the same ones each time, and shrink none."""

    def __init__(self, count: int) -> None:
        self._count = count

    def pytest_collection(self) -> None:
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile(
            "mutation", max_examples=self._count, phases=phases, derandomize=True, database=None, deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        hypothesis.settings.load_profile("mutation")


class Session:
    """
    A pytest plugin whose loop tries mutants.

    Args:
        root: The copy of the tree.
        files: What to change, relative to it.
        options: Of the command line.
    """

    def __init__(self, root: Path, files: list[str], options: argparse.Namespace) -> None:
        self._root = root
        self._options = options
        self._modules = {file: Module.of(root / file, (root / file).read_text(encoding="utf-8")) for file in files}
        self._reached: dict[str, dict[int, set[str]]] = {file: defaultdict(set) for file in files}
        self._items: dict[str, pytest.Item] = {}
        self._seconds: dict[str, float] = {}
        self._functions: dict[str, dict[Key, list[FunctionType]]] = {}
        self._in_fork = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_function: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            machine = getattr(item, "cls", None)
            if machine is not None and issubclass(machine, unittest.TestCase):
                machine.settings = hypothesis.settings(max_examples=self._options.examples)
            is_large = item.nodeid.startswith("tests/engine/")
            by_function[item.nodeid.partition("[")[0] if is_large else item.nodeid].append(item)
        items[:] = [item for group in by_function.values() for item in group[:: -(-len(group) // PARAMETERS)]]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise SystemExit("not all tests could be collected")
        self._items = {item.nodeid: item for item in session.items}
        self._run_once()
        self._find_functions()
        for file, module in self._modules.items():
            self._try_all(file, module)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> None:
        if self._in_fork and call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            os._exit(1)  # at once: a report takes longer than most tests

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(report.longreprtext, file=OUT)
            os._exit(1)

    def _run_once(self) -> None:
        """Learn what each test reaches and how long it takes."""
        by_path = {str(module.path): self._reached[file] for file, module in self._modules.items()}
        items = list(self._items.values())
        for item, following in zip_longest(items, items[1:]):
            started, trace = time.process_time(), tracer(item.nodeid, by_path)
            threading.settrace(trace)
            sys.settrace(trace)
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            finally:
                sys.settrace(None)
                threading.settrace(None)
            self._seconds[item.nodeid] = time.process_time() - started
        print(f"{len(self._items)} tests pass in {sum(self._seconds.values()):.0f} s of processor time", file=OUT)

    def _find_functions(self) -> None:
        """The functions there are of each file, so that no fork has to look for them."""
        self._functions = {str(module.path): defaultdict(list) for module in self._modules.values()}
        gc.collect()
        for found in gc.get_objects():
            if isinstance(found, FunctionType) and found.__code__.co_filename in self._functions:
                code = found.__code__
                self._functions[code.co_filename][code.co_qualname, code.co_firstlineno].append(found)
        gc.freeze()  # a collection in a fork would write to each object, and so copy all memory

    def _try_all(self, file: str, module: Module) -> None:
        """Try mutants of *file*, print those that survive and a row of the table."""
        population = list(mutants(module.text, file))
        random.Random(self._options.seed).shuffle(population)
        counts: Counter[str] = Counter()
        for mutant in population:
            if counts.total() - counts["void"] >= self._options.most:
                break
            outcome = self._outcome(file, module, mutant.text(module.text))
            counts[outcome] += 1
            if outcome in ("survived", "unreached"):
                print(f"{outcome.upper()}\n{mutant.diff(module.text)}", file=OUT)
        tried = counts.total() - counts["void"]
        print(f"| {file} | {len(population)} | {tried} | {counts['killed']} | {tried - counts['killed']} |", file=OUT)

    def _outcome(self, file: str, module: Module, text: str) -> str:
        """ "killed", "survived", "unreached" where no test runs what is changed, "void" where nothing that runs is."""
        try:
            other = Module.of(module.path, text)
        except (SyntaxError, ValueError):
            return "killed"
        changed, reached = module.changed(other), self._reached[file]
        is_deep = module.differs(other)
        if not changed and not is_deep:
            return "void"
        lines = statement_lines(module.text, changed_lines(module.text, text))
        found = set(self._items) if is_deep else {test for line in lines for test in reached[line]}
        tests = sorted(found, key=self._seconds.__getitem__)
        if not tests:
            return "unreached"
        if not is_deep and is_killed(lambda: self._run_patched(module, other, changed, tests)):
            return "killed"
        if not is_deep and not self._options.confirm:
            return "survived"
        module.path.write_text(text, encoding="utf-8")
        try:
            return "killed" if is_killed(lambda: self._run_anew(tests)) else "survived"
        finally:
            module.path.write_text(module.text, encoding="utf-8")

    def _run_patched(self, module: Module, other: Module, changed: set[Key], tests: list[str]) -> None:
        """In a fork: give the changed functions their new code and run *tests*."""
        self._in_fork = True
        for key in changed:
            for found in self._functions[str(module.path)].get(key, ()):
                found.__code__ = other.functions[key]
        items = [self._items[test] for test in tests]
        for item, following in zip_longest(items, items[1:]):
            signal.setitimer(signal.ITIMER_PROF, 1 + 5 * self._seconds[item.nodeid])
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _run_anew(self, tests: list[str]) -> None:
        """In a fork: import everything again and run *tests*."""
        signal.setitimer(signal.ITIMER_PROF, 60 + 20 * sum(map(self._seconds.__getitem__, tests)))
        for name, module in list(sys.modules.items()):
            if name.startswith("power") or str(getattr(module, "__file__", None)).startswith(str(self._root)):
                del sys.modules[name]
        if run_pytest(tests, Examples(100 if self._options.confirm else self._options.examples)):
            os._exit(1)


def tracer(test: str, by_path: dict[str, dict[int, set[str]]]) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that notes *test* with each line of the files that it reaches."""

    def trace(frame: FrameType, _event: str, _arg: object) -> Any:
        reached = by_path.get(frame.f_code.co_filename)
        if reached is None:
            return None
        reached[frame.f_lineno].add(test)
        return trace

    return trace


def is_killed(run: Callable[[], None]) -> bool:
    """Whether *run* fails in a fork, by an exception, an exit or a signal, or waits for ever."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(1, 2)
            limit = 8 << 30  # of memory: some mutants ask for very large arrays
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            run()
            code = 0
        finally:
            os._exit(code)
    handle = os.pidfd_open(child)
    used = -1.0
    while not select.select([handle], [], [], IDLE_S)[0]:
        before, used = used, processor_time(child)
        if used == before:
            os.kill(child, signal.SIGKILL)
    os.close(handle)
    return os.waitpid(child, 0)[1] != 0


def processor_time(process: int) -> float:
    """Clock ticks that *process* has used."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return float(fields[11]) + float(fields[12])


def run_pytest(tests: list[str], *plugins: object) -> int:
    """Run *tests* of the copy, up to the first failure, in this process."""
    quiet = [option for name in ("cacheprovider", "randomly", "xdist") for option in ("-p", f"no:{name}")]
    return int(pytest.main(["-x", "-q", "-s", "-m", "not slow", "--assert=plain", *quiet, *tests], plugins=plugins))


def copy(root: Path) -> None:
    """The working tree, without what git ignores."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)


def selected(wanted: list[str]) -> tuple[list[str], list[str]]:
    """Files to change, and the tests of all of them."""
    chosen: list[str] = []
    chosen_tests: list[str] = []
    for name, tests in TESTS.items():
        found = sorted((ROOT / name).glob("*.py")) if (ROOT / name).is_dir() else [ROOT / name]
        files = [str(path.relative_to(ROOT)) for path in found if path.name != "__init__.py"]
        files = [file for file in files if not wanted or file.startswith(tuple(wanted))]
        chosen += files
        chosen_tests += [test for test in tests if files and test not in chosen_tests]
    return chosen, chosen_tests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="paths to mutate; all of them by default")
    parser.add_argument("--most", type=int, default=200, help="mutants of one file")
    parser.add_argument("--seed", type=int, default=1, help="decides which")
    parser.add_argument("--examples", type=int, default=10, help="of a property test")
    parser.add_argument("--confirm", action="store_true", help="try survivors again, anew and with all examples")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy(root)
        os.chdir(root)
        sys.path[:] = [folder, *(entry for entry in sys.path if entry != str(ROOT / "bench"))]
        sys.dont_write_bytecode = True
        os.environ["PYTHONPATH"] = folder
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        files, tests = selected(options.modules)
        run_pytest(tests, Examples(options.examples), Session(root, files, options))


if __name__ == "__main__":
    main()
