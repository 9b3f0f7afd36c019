"""Rules of artifact contracts: changes of the header."""

from __future__ import annotations

from collections.abc import Iterator

from power_conformance.containers import Key, Value
from power_conformance.edits import (
    Edit,
    added_tensors,
    bad_numbers,
    dropped_keys,
    missing_tensors,
    reshaped_tensors,
    retyped_keys,
    retyped_tensors,
    spelled,
)
from power_conformance.failures import fail
from power_conformance.judging import Bench, workbench
from power_conformance.registry import rule
from power_conformance.subjects import ContractSubject

_CHECK = "ArtifactContract.check in power_core/artifacts/contract.py"


@rule("A-TENSORS-01", look=_CHECK)
def check_missing_tensors(subject: ContractSubject) -> None:
    """A file without one of its tensors is refused or has other facts, because native code looks it up by name."""
    with workbench(subject) as bench:
        for edit in missing_tensors(bench.good):
            bench.expect_told(edit)


@rule("A-TENSORS-02", look=_CHECK)
def check_shapes(subject: ContractSubject) -> None:
    """
    A tensor of another shape is refused or has other facts, because native code computes addresses from sizes.
    """
    with workbench(subject) as bench:
        for edit in reshaped_tensors(bench.good):
            bench.expect_told(edit)


@rule("A-TENSORS-03", look=_CHECK)
def check_types(subject: ContractSubject) -> None:
    """Whole numbers in place of floats are refused, and the reverse, because kernels read the bytes as they are."""
    with workbench(subject) as bench:
        for edit in retyped_tensors(bench.good):
            bench.expect_told(edit)


@rule("A-TENSORS-04", look=_CHECK)
def check_unknown_tensors(subject: ContractSubject) -> None:
    """A file with a tensor more is refused or has other facts, because it is of another kind or version."""
    with workbench(subject) as bench:
        for edit in added_tensors(bench.good):
            bench.expect_told(edit)


@rule("A-KEYS-01", look=_CHECK)
def check_key_types(subject: ContractSubject) -> None:
    """
    A key that must be there must be there with its type, because a text in place of a number is converted to
    anything.
    """
    with workbench(subject) as bench:
        for key, value in needed_keys(bench):
            for edit in retyped_keys(key, value):
                bench.expect_told(edit)


@rule("A-KEYS-02", look=_CHECK)
def check_key_ranges(subject: ContractSubject) -> None:
    """
    Numbers that must be there are finite, and whole ones not negative, because sizes and scales are computed from
    them.
    """
    with workbench(subject) as bench:
        for key, value in needed_keys(bench):
            for edit in bad_numbers(key, value):
                bench.expect_told(edit)


@rule("A-MESSAGE-01", look="ArtifactContract.check in power_core/artifacts/contract.py; power_core/errors.py")
def check_messages(subject: ContractSubject) -> None:
    """
    Each refusal is one line with the file, what was found, what was expected and what to do, because it is all that a
    user sees.
    """
    with workbench(subject) as bench:
        for edit in _header_edits(bench):
            verdict = bench.judge(edit.apply(bench.good))
            error = verdict.refusal
            if error is None or verdict.by_reader:
                continue
            lacks = [name for name in ("where", "expected", "fix") if not getattr(error, name)]
            if "\n" in error.what or len(str(error)) > 1000:
                fail(f"refused a file whose {edit.did} at length: {error.what!r:.200}", "one line")
            if lacks:
                fail(f"refused a file whose {edit.did} without {', '.join(lacks)}: {error}", "where=, expected=, fix=")


def needed_keys(bench: Bench) -> Iterator[tuple[Key, Value]]:
    """
    Keys that the file is not taken without, or described otherwise: found by leaving each out.

    A contract that passes over a missing key passes over what it holds: a name, a date, a licence.
    """
    facts, found = bench.facts, 0
    for key, edit in dropped_keys(bench.good):
        verdict = bench.judge(edit.apply(bench.good))
        if verdict.facts != facts and not verdict.by_reader:
            found += 1
            yield key, bench.good.keys[key]
    if not found:
        keys = ", ".join(spelled(key) for key in bench.good.keys) or "none"
        fail(f"needs no key of the file ({keys})", "a key that says the kind")


def _header_edits(bench: Bench) -> Iterator[Edit]:
    good = bench.good
    yield from missing_tensors(good)
    yield from reshaped_tensors(good)
    yield from retyped_tensors(good)
    yield from added_tensors(good)
    for key, edit in dropped_keys(good):
        yield edit
        yield from retyped_keys(key, good.keys[key])
        yield from bad_numbers(key, good.keys[key])
