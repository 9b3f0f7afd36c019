"""Rules of artifact contracts: values, targets, and whatever else can be wrong with a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from power_conformance.containers import Container
from power_conformance.edits import (
    Edit,
    added_tensors,
    bad_ids,
    bad_numbers,
    dropped_keys,
    missing_tensors,
    not_finite,
    odd_values,
    reshaped_tensors,
    retyped_keys,
    retyped_tensors,
)
from power_conformance.failures import fail, refuse
from power_conformance.judging import Bench, judge, workbench
from power_conformance.registry import rule
from power_conformance.standins import StandIn
from power_conformance.subjects import ContractSubject
from power_core.artifacts import open_tensors
from power_core.errors import ArtifactError

_PAYLOAD = "ArtifactContract.check_payload in power_core/artifacts/contract.py"
_TARGET = "ArtifactContract.check_target in power_core/artifacts/contract.py"
_EXAMPLES = 150


@rule("A-PAYLOAD-01", look=_PAYLOAD)
def check_finite(subject: ContractSubject) -> None:
    """NaN and infinity are found wherever they are, because one of them turns every draft into noise for good."""
    with workbench(subject) as bench:
        for edit in not_finite(bench.good):
            bench.expect_refused(edit)


@rule("A-PAYLOAD-02", look=_PAYLOAD)
def check_ids(subject: ContractSubject) -> None:
    """Ids outside the vocabulary are found wherever they are, because they index the target's tables."""
    with workbench(subject) as bench:
        edits = list(bad_ids(bench.good, bench.facts.vocab_size))
        if not edits:
            refuse("the file holds no ids")
        for edit in edits:
            bench.expect_refused(edit)


@rule("A-TARGET-01", look=_TARGET)
def check_sizes_of_target(subject: ContractSubject) -> None:
    """A target of another vocabulary or hidden size is refused, because ids and features would not be its own."""
    with workbench(subject) as bench:
        vocab, hidden = subject.model.identity.vocab_size, subject.model.identity.hidden_size
        for size in (vocab + 1, vocab - 1, 2 * vocab):
            _expect_misfit(bench, f"a vocabulary of {size}", vocab_size=size)
        if bench.facts.hidden_layers:
            for size in (hidden // 2, 2 * hidden):
                _expect_misfit(bench, f"the hidden size {size}", hidden_size=size)


@rule("A-TARGET-02", look=_TARGET)
def check_layers_of_target(subject: ContractSubject) -> None:
    """A target that has not all blocks the drafter reads is refused, because there is nothing to read."""
    with workbench(subject) as bench:
        layers = bench.facts.hidden_layers
        if not layers:
            refuse("the drafter reads no hidden layers")
        _expect_misfit(bench, f"{max(layers)} blocks", num_layers=max(layers))


@rule("A-TARGET-03", look=_TARGET)
def check_tokenizer_of_target(subject: ContractSubject) -> None:
    """
    A target with another tokenizer is refused where the file carries one, because vocabularies of one size still
    differ.
    """
    with workbench(subject) as bench:
        digest = subject.model.identity.tokenizer_sha256.removeprefix("sha256:")
        values = [value.value for value in bench.good.keys.values()]
        has_digest = any(isinstance(value, str) and digest in value for value in values)
        if not has_digest and ("tokenizer.ggml.tokens",) not in bench.good.keys:
            refuse("the file carries neither its tokenizer nor the digest of one")
        other = StandIn.of(
            subject.model, names={subject.model.identity.vocab_size - 1: "another"}, tokenizer_sha256="0" * 64
        )
        if _fits(bench, other):
            fail("fits a target of the same sizes with another tokenizer", "an ArtifactError from check_target")


@rule("A-ERRORS-01", look="power_core/errors.py")
def check_errors(subject: ContractSubject) -> None:
    """Whatever is wrong with a file, the answer is an ArtifactError, because anything else is a crash to the user."""
    with workbench(subject) as bench:
        edits = list(_edits(bench))
        for edit in edits:
            _expect_no_crash(bench, edit.apply(bench.good), edit.did)
        _combinations(bench, edits, subject.seed)
        _damaged_bytes(bench, subject.seed)


def _combinations(bench: Bench, edits: list[Edit], seed: int) -> None:
    """Several changes at once; hypothesis finds the fewest that do it."""

    @hypothesis.seed(seed)
    @_settings
    @hypothesis.given(st.lists(st.sampled_from(edits), min_size=2, max_size=4, unique_by=id))
    def check(chosen: list[Edit]) -> None:
        container = bench.good
        for edit in chosen:
            container = edit.apply(container)
        _expect_no_crash(bench, container, " and whose ".join(edit.did for edit in chosen))

    check()


def _damaged_bytes(bench: Bench, seed: int) -> None:
    """A file cut anywhere, and one with other bytes in its header."""
    path = bench.write(bench.good)
    data = path.read_bytes()
    header = min(tensor.offset for tensor in open_tensors(path).tensors.values())
    ends = st.integers(0, len(data) - 1) | st.none()
    changes = st.dictionaries(st.integers(0, header - 1), st.integers(0, 255), max_size=4)

    @hypothesis.seed(seed)
    @_settings
    @hypothesis.given(ends, changes)
    def check(end: int | None, bytes_at: dict[int, int]) -> None:
        damaged = bytearray(data)
        for at, byte in bytes_at.items():
            damaged[at] = byte
        path.write_bytes(damaged[:end])
        did = f"bytes are {bytes_at} by position" + ("" if end is None else f" and that ends after {end}")
        _expect_no_crash(bench, path, did)

    check()


def _settings(test: Any) -> Any:
    return hypothesis.settings(
        max_examples=_EXAMPLES, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )(test)  # fmt: skip


def _edits(bench: Bench) -> Iterator[Edit]:
    good = bench.good
    for edits in (missing_tensors, reshaped_tensors, retyped_tensors, added_tensors, not_finite):
        yield from edits(good)
    yield from bad_ids(good, bench.facts.vocab_size)
    for key, edit in dropped_keys(good):
        yield edit
        for changed in (retyped_keys, bad_numbers, odd_values):
            yield from changed(key, good.keys[key])


def _expect_no_crash(bench: Bench, file: Container | Path, did: str) -> None:
    path = file if isinstance(file, Path) else bench.write(file)
    crash = judge(bench.subject.contract, path, bench.subject.model).crash
    if crash is not None:
        fail(f"raised {type(crash).__name__} for a file whose {did}: {crash}", "an ArtifactError")


def _expect_misfit(bench: Bench, what: str, **changes: Any) -> None:
    facts = bench.facts
    if _fits(bench, StandIn.of(bench.subject.model, **changes)):
        fail(f"fits a target with {what}; the file says {facts}", "an ArtifactError from check_target")


def _fits(bench: Bench, target: StandIn) -> bool:
    facts = bench.facts
    try:
        bench.subject.contract.check_target(open_tensors(bench.subject.path), facts, target)
    except ArtifactError:
        return False
    return True
