"""Giving files to a contract as admission does, and telling a refusal from a crash."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import define, frozen

from power_conformance.containers import Container
from power_conformance.edits import Edit
from power_conformance.failures import fail, refuse
from power_conformance.subjects import ContractSubject
from power_core.artifacts import ArtifactContract, ArtifactFacts, open_tensors
from power_core.errors import ArtifactError
from power_core.target import TargetModel

__all__ = ["Bench", "Verdict", "judge", "workbench"]


@frozen
class Verdict:
    """
    What became of a file: facts, a refusal, or a crash; the other two are None.

    Args:
        facts: It passed every check.
        refusal: The contract refused it, or the container's reader did where *by_reader* is set.
        crash: What was raised that is no `ArtifactError`.
        by_reader: The container itself is damaged: the contract never saw it.
    """

    facts: ArtifactFacts | None = None
    refusal: ArtifactError | None = None
    crash: Exception | None = None
    by_reader: bool = False


def judge(contract: ArtifactContract, path: Path, target: TargetModel) -> Verdict:
    """Every check of *contract*, in the order of admission; `check` also where it does not match."""
    try:
        file = open_tensors(path)
    except ArtifactError as exc:
        return Verdict(refusal=exc, by_reader=True)
    try:
        is_match = contract.matches(file)
        facts = contract.check(file)
        if not is_match:
            return Verdict(refusal=ArtifactError("not matched", where=str(path), expected="a match", fix="convert it"))
        contract.check_target(file, facts, target)
        contract.check_payload(file)
    except ArtifactError as exc:
        return Verdict(refusal=exc)
    except Exception as exc:  # noqa: BLE001 - whatever it raised is the finding
        return Verdict(crash=exc)
    return Verdict(facts=facts)


@define
class Bench:
    """
    A folder to write changed files to, and the good one to start from.

    Attributes:
        subject: The contract and its good file.
        folder: Holds one subfolder a file that was written.
        facts: What the contract reads off the good file.
        good: The good file's content.
    """

    subject: ContractSubject
    folder: Path
    facts: ArtifactFacts
    good: Container
    _written: int = 0

    def write(self, container: Container) -> Path:
        """Write *container* to a folder of its own; the tensor file's path."""
        self._written += 1
        folder = self.folder / str(self._written)
        folder.mkdir()
        return container.write(folder)

    def judge(self, container: Container) -> Verdict:
        """Write and judge it."""
        return judge(self.subject.contract, self.write(container), self.subject.model)

    def expect_told(self, edit: Edit) -> None:
        """Fail where the changed file passes with the good one's facts: the contract has not looked."""
        if self.judge(edit.apply(self.good)).facts == self.facts:
            fail(f"passes, with the same facts, a file whose {edit.did}", "a refusal, or facts that tell the two apart")

    def expect_refused(self, edit: Edit) -> None:
        """Fail where the changed file passes."""
        if self.judge(edit.apply(self.good)).facts is not None:
            fail(f"passes a file whose {edit.did}", "an ArtifactError")


@contextmanager
def workbench(subject: ContractSubject) -> Iterator[Bench]:
    """
    A bench in a folder of its own.

    Raises:
        NotApplicable: The contract refuses its own good file, so that nothing can be told from what it refuses.
    """
    verdict = judge(subject.contract, subject.path, subject.model)
    if verdict.facts is None:
        refuse("the contract does not take its own good file: see A-GOOD-01")
    with tempfile.TemporaryDirectory() as folder:
        yield Bench(subject, Path(folder), verdict.facts, Container.read(subject.path))
