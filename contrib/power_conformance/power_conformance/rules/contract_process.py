"""Rules of artifact contracts that need a process of their own: no native library, little time and memory."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from power_conformance.contract_child import FILES, MEMORY, SECONDS, SUBJECT
from power_conformance.edits import (
    Edit,
    added_tensors,
    dropped_keys,
    huge_numbers,
    missing_tensors,
    not_finite,
    reshaped_tensors,
    retyped_tensors,
)
from power_conformance.failures import fail, refuse
from power_conformance.judging import Bench, workbench
from power_conformance.registry import rule
from power_conformance.standins import StandIn
from power_conformance.subjects import ContractSubject

_CONTRACT = "power_core/artifacts/contract.py"


@rule("A-NATIVE-01", look=_CONTRACT)
def check_no_native_library(subject: ContractSubject) -> None:
    """
    No native library is loaded to judge a file, good or bad, because a damaged one must be refused before native code
    could end the process.
    """
    with workbench(subject) as bench:
        makers = (missing_tensors, reshaped_tensors, retyped_tensors, added_tensors, not_finite)
        edits = [edit for make in makers for edit in make(bench.good)]
        edits += [edit for _, edit in dropped_keys(bench.good)]
        for did, answer in _judged(bench, edits):
            if answer is None:
                refuse(f"the process died over a {did}: see A-COST-01")
            if answer["tried"]:
                fail(f"loads {', '.join(dict.fromkeys(answer['tried']))} to judge a {did}", "Python and numpy alone")


@rule("A-COST-01", look="ArtifactContract.check in power_core/artifacts/contract.py")
def check_costs_little(subject: ContractSubject) -> None:
    """
    A huge number in a header costs neither time nor memory, because files are checked in servers that anybody may
    send one to.
    """
    with workbench(subject) as bench:
        for did, answer in _judged(bench, huge_numbers(bench.good)):
            if answer is None or "MemoryError" in (answer["crash"] or ""):
                limits = f"{SECONDS} s of processor time or {MEMORY >> 30} GiB"
                fail(f"took more than {limits} for a {did}", "an answer at once")


def _judged(bench: Bench, edits: Iterable[Edit]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """What another process answers about the good file and changed ones; None, as the last, for what it died over."""
    if os.name != "posix":
        refuse("this system cannot bound what a process takes")
    folder = bench.folder
    tried = [("good file", bench.good), *((f"file whose {edit.did}", edit.apply(bench.good)) for edit in edits)]
    paths = [str(bench.write(container)) for _, container in tried]
    try:
        (folder / SUBJECT).write_bytes(pickle.dumps((bench.subject.contract, StandIn.of(bench.subject.model))))
    except Exception as exc:  # noqa: BLE001 - pickle raises anything
        refuse(f"the contract cannot be sent to another process: {exc}")
    (folder / FILES).write_text(json.dumps(paths))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "power_conformance.contract_child", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if not lines:
        refuse(f"the contract cannot be made in another process: {done.stderr.strip().splitlines()[-1:]}")
    answers = lines[1::2]
    for (did, _), answer in zip(tried, answers, strict=False):
        yield did, answer
    if len(answers) < len(tried):
        yield tried[len(answers)][0], None
