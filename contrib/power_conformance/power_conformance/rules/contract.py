"""Rules of artifact contracts: what a good file is taken for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from attrs import evolve

from power_conformance.containers import JSON_VALUE, Container, Key, Tensor, Value
from power_conformance.edits import Edit, missing_tensors
from power_conformance.failures import fail, refuse
from power_conformance.judging import Verdict, judge, workbench
from power_conformance.registry import rule
from power_conformance.standins import noting
from power_conformance.subjects import ContractSubject
from power_core.artifacts import ArtifactFacts, open_tensors
from power_core.artifacts.files import file_sha256
from power_core.errors import ArtifactError
from power_core.evidence.canonical import canonical, plain

_CONTRACT = "ArtifactContract in power_core/artifacts/contract.py"
_FACTS = "ArtifactFacts in power_core/artifacts/contract.py"
_FOREIGN_KEYS: Mapping[str, Mapping[Key, Value]] = {
    "gguf": {("general.architecture",): Value("str", "llama"), ("llama.block_count",): Value("u32", 2)},
    "safetensors": {
        ("architectures",): Value(JSON_VALUE, ["LlamaForCausalLM"]),
        ("hidden_size",): Value(JSON_VALUE, 8),
    },
}


@rule("A-GOOD-01", look=_CONTRACT)
def check_good_file(subject: ContractSubject) -> None:
    """A good file passes every check for the target it was made for, because a kind nobody can load is none."""
    if not subject.contract.matches(open_tensors(subject.path)):
        fail("does not match its own good file", "True")
    verdict = judge(subject.contract, subject.path, subject.model)
    if verdict.facts is None:
        fail(f"refused its own good file: {verdict.refusal or verdict.crash}", "no exception")


@rule("A-MATCH-01", look=_CONTRACT)
def check_foreign_files(subject: ContractSubject) -> None:
    """
    `matches` answers False for other models' files and never raises, because every contract is asked about every
    file.
    """
    with workbench(subject) as bench:
        kind = bench.good.format
        for did, container in _foreign(bench.good):
            try:
                answer = subject.contract.matches(open_tensors(bench.write(container)))
            except Exception as exc:  # noqa: BLE001 - whatever it raised is the finding
                fail(f"matches raised {type(exc).__name__} for a {kind} file {did}: {exc}", "an answer")
            if answer is not False:
                fail(f"matches answered {answer!r} for a {kind} file {did}", "False")


@rule("A-MATCH-02", look=_CONTRACT)
def check_metadata_and_tensors(subject: ContractSubject) -> None:
    """
    Neither metadata without the tensors nor tensors without the metadata pass, because either is also part of other
    kinds.
    """
    with workbench(subject) as bench:
        foreign = _FOREIGN_KEYS[bench.good.format]
        bench.expect_refused(Edit("tensors are another model's", lambda c: evolve(c, tensors=_foreign_tensors())))
        bench.expect_refused(Edit("metadata is another model's", lambda c: evolve(c, keys=foreign)))


@rule("A-MATCH-03", look=_CONTRACT)
def check_one_kind(subject: ContractSubject) -> None:
    """No other installed contract takes the file for its own, because a file of two kinds cannot be admitted."""
    if not subject.rivals:
        refuse("no other contract is installed")
    file = open_tensors(subject.path)
    for other in subject.rivals:
        if other.matches(file):
            fail(f"made a file that {other.kind!r} matches too", f"a file of kind {subject.contract.kind!r} alone")


@rule("A-FACTS-01", look=_FACTS)
def check_facts(subject: ContractSubject) -> None:
    """The facts are those of the target that the file was made for, because the drafter is driven by them."""
    with workbench(subject) as bench:
        for what, found, expected in _misfits(bench.facts, subject):
            fail(f"reads {what} {found!r} off the file", f"{expected}")


@rule("A-HEADER-01", look="ArtifactContract.check in power_core/artifacts/contract.py")
def check_reads_header_only(subject: ContractSubject) -> None:
    """`matches`, `check` and `check_target` read no value, because they run on gigabytes at every load and listing."""
    # The file is given with other values too: that tells who reads them in another way.
    with workbench(subject) as bench:
        expected = bench.facts
        tensors = {name: Tensor(t.dtype, t.shape, b"\xff" * len(t.data)) for name, t in bench.good.tensors.items()}
        for path in (subject.path, bench.write(evolve(bench.good, tensors=tensors))):
            reads: list[str] = []
            file = noting(open_tensors(path), reads)
            try:
                answer = subject.contract.matches(file)
                facts = subject.contract.check(file)
                subject.contract.check_target(file, facts, subject.model)
            except ArtifactError as exc:
                fail(f"refused by its values, before check_payload: {exc}", "an answer from the header alone")
            if reads:
                fail(f"read the values of {', '.join(dict.fromkeys(reads))}", "nothing read before check_payload")
            if not answer or facts != expected:
                fail("answered otherwise for the same header before other values", "an answer from the header alone")


@rule("A-REPEAT-01", look=_CONTRACT)
def check_repeats(subject: ContractSubject) -> None:
    """
    A file is judged alike each time, whatever was judged in between, because admission and load must agree.
    """
    with workbench(subject) as bench:
        expected = bench.facts
        for edit in list(missing_tensors(bench.good))[:6]:
            container = edit.apply(bench.good)
            first = bench.judge(container)
            again = judge(subject.contract, subject.path, subject.model)
            if again.facts != expected:
                fail(f"answers {_said(again)} about the good file after one whose {edit.did}", "the facts of before")
            second = bench.judge(container)
            if _what(first.refusal) != _what(second.refusal):
                fail(f"answers {_said(second)} where it answered {_said(first)} before", "one answer a file")


@rule("A-FILES-01", look=_CONTRACT)
def check_leaves_files_alone(subject: ContractSubject) -> None:
    """No check changes a file or leaves one behind, because what is checked is what is hashed and loaded."""
    with workbench(subject) as bench:
        path = bench.write(bench.good)
        before = _content(path.parent)
        judge(subject.contract, path, subject.model)
        if _content(path.parent) != before:
            fail(f"left {sorted(_content(path.parent))} of {sorted(before)}, or changed one", "the folder as it was")


def _foreign(good: Container) -> Iterator[tuple[str, Container]]:
    yield "of another model", evolve(good, keys=_FOREIGN_KEYS[good.format], tensors=_foreign_tensors())
    kind = Value("str", "x") if good.format == "gguf" else Value(JSON_VALUE, {"": []})
    yield "with odd metadata", evolve(good, keys={("general.architecture",): kind}, tensors=_foreign_tensors())
    if good.format == "safetensors":
        yield "without a config.json", evolve(good, keys={}, tensors=_foreign_tensors())


def _foreign_tensors() -> dict[str, Tensor]:
    values = np.ones((4, 8), np.float32)
    return {"model.embed_tokens.weight": Tensor("F32", (4, 8), values.tobytes())}


def _misfits(facts: ArtifactFacts, subject: ContractSubject) -> Iterator[tuple[str, object, str]]:
    identity = subject.model.identity
    layers, vocab = facts.hidden_layers, identity.vocab_size
    if facts.vocab_size != vocab:
        yield "a vocabulary of", facts.vocab_size, f"{vocab}, the target's"
    if layers and facts.hidden_size != identity.hidden_size:
        yield "the hidden size", facts.hidden_size, f"{identity.hidden_size}, the target's"
    if not isinstance(layers, tuple) or len(set(layers)) != len(layers):
        yield "the hidden layers", layers, "a tuple, each layer once"
    if not 1 <= facts.draft_vocab_size <= vocab:
        yield "a draft vocabulary of", facts.draft_vocab_size, f"1 to {vocab}"
    if facts.block_size is not None and facts.block_size < 1:
        yield "blocks of", facts.block_size, "at least 1, or None"
    try:
        canonical(plain(facts.details))
    except Exception as exc:  # noqa: BLE001 - whatever cannot be written down
        yield "details without a JSON form,", exc, "details that a manifest can hold"


def _content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): file_sha256(path) for path in folder.rglob("*") if path.is_file()}


def _what(refusal: ArtifactError | None) -> str | None:
    return None if refusal is None else refusal.what


def _said(verdict: Verdict) -> str:
    return f"{verdict.refusal or verdict.crash or verdict.facts}"
