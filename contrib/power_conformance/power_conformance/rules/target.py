"""Rules of targets: what decides a row's bits, and what must not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

from attrs import evolve

from power_conformance.failures import fail, refuse
from power_conformance.probing import PROMPT, Probe, Reference, Row, expect_same, is_same
from power_conformance.registry import rule
from power_conformance.subjects import TargetSubject
from power_core.errors import PowerError
from power_core.shapes import ExactnessLevel, WidthClass
from power_core.target import SessionOptions
from power_core.types import Capability

_SHAPES = "power_core/shapes.py and docs/exactness.md"
_FORWARD = "TargetSession.forward in power_core/target.py"


@rule("T-PROFILE-01", look=_SHAPES)
def check_profile(subject: TargetSubject) -> None:
    """
    A session's profile fits together, because the scheduler believes it: positive costs, width 1 computed as the
    level says, a row for every sequence.
    """
    for options in subject.options:
        with subject.session(options) as session:
            profile = session.profile
            for name, shape in (("decode", profile.decode), ("prefill", profile.prefill)):
                _check_costs(name, shape)
            if profile.decode.max_rows < session.max_sequences:
                fail(
                    f"declared {session.max_sequences} sequences and a decode class of {profile.decode.max_rows} rows",
                    "a decode class with a row for every sequence",
                )
            single = profile.decode.widths[0]
            if (profile.level is ExactnessLevel.BITWISE) != (single == 1) and profile.level in _PROMISES:
                fail(
                    f"declared level {profile.level} and computes a single row at width {single}",
                    "width 1 for bitwise, a wider one for padded",
                )


_PROMISES = (ExactnessLevel.BITWISE, ExactnessLevel.PADDED)


def _check_costs(name: str, shape: WidthClass) -> None:
    if len(shape.costs) > len(shape.widths) or min(shape.costs, default=1) <= 0:
        fail(f"declared costs {shape.costs} for the {name} widths {shape.widths}", "a positive cost a width, or fewer")


@rule("T-CAPABILITY-01", look="Capability in power_core/types.py")
def check_capabilities(subject: TargetSubject) -> None:
    """
    Capabilities are names of the core, `logits` among them, because drafters and the sampler ask for them by name.
    """
    for options in subject.options:
        with subject.session(options) as session:
            unknown = sorted(session.capabilities - {str(name) for name in Capability})
            if unknown:
                fail(f"declared the capability {unknown[0]!r}", "one of " + ", ".join(Capability))
            if Capability.LOGITS not in session.capabilities:
                fail(f"declared {sorted(session.capabilities)}", "`logits` among them: `Rows.logits` is not optional")


@rule("T-DETERMINISM-01", look=_SHAPES)
def check_determinism(subject: TargetSubject) -> None:
    """Two sessions give the same logits for the same rows, bit for bit; without that nothing can be promised."""
    text = subject.text(36, stream=1)
    for options in subject.options:
        _skip_unverified(subject, options)
        first = Reference(subject, options, subject.text(PROMPT)).rows(text)
        second = Reference(subject, options, subject.text(PROMPT)).rows(text)
        for position, (got, expected) in enumerate(zip(second, first, strict=True)):
            expect_same(got, expected, f"a second session, {position + 1} tokens after the prompt,")


@rule("T-WIDTH-01", look=_SHAPES)
def check_widths(subject: TargetSubject) -> None:
    """
    Every row count of the decode class gives a row the same bits, because speculative steps are wider than plain
    ones.
    """
    prompt = subject.text(PROMPT)
    for options in subject.options:
        _skip_unverified(subject, options)
        reference = Reference(subject, options, prompt)
        with subject.session(options) as session:
            for width in _chain_lengths(session.profile.decode, session.context_size - PROMPT):
                text = subject.text(width, stream=1)
                probe = Probe(session)
                probe.open(0, prompt)
                for i, row in enumerate(probe.decode(0, text)):
                    expect_same(row, reference.after(text[: i + 1]), f"row {i} of a forward of {width} rows")
                session.close(0)


@rule("T-WIDTH-02", look="Rows.width in power_core/target.py")
def check_reported_width(subject: TargetSubject) -> None:
    """`Rows.width` is the covering width of the class, because receipts and cost models count rows by it."""
    for options in subject.options:
        with subject.session(options) as session:
            probe, shape = Probe(session), session.profile.decode
            probe.open(0, subject.text(PROMPT))
            for count in range(1, min(shape.max_rows, 8) + 1):
                got = probe.forward((0, subject.text(count))).rows.width
                if got != shape.cover(count):
                    fail(f"reported width {got} for {count} rows of {shape.widths}", f"width {shape.cover(count)}")


@rule("T-PREFILL-01", look=_SHAPES)
def check_prefill_chunks(subject: TargetSubject) -> None:
    """
    However a prompt is cut into chunks, its last row has the same bits, because chunking depends on load and cache.
    """
    for options in subject.options:
        _skip_unverified(subject, options)
        with subject.session(options) as session:
            probe = Probe(session)
            prompt = subject.text(min(session.context_size, 23))
            expected = probe.open(0, prompt)
            for chunk in (1, 2, 3, 5, 7, 11, 16):
                session.close(0)
                expect_same(probe.open(0, prompt, chunk=chunk), expected, f"a prompt in chunks of {chunk}")


@rule("T-BATCH-01", look=_FORWARD)
def check_companions(subject: TargetSubject) -> None:
    """Rows of other sequences in the same forward change nothing, because who decodes beside a request is chance."""
    for options in _with_companions(subject):
        prompt, text = subject.text(PROMPT), subject.text(4, stream=1)
        reference = Reference(subject, options, prompt)
        with subject.session(options) as session:
            probe = Probe(session)
            companion = session.max_sequences - 1
            probe.open(0, prompt)
            probe.open(companion, subject.text(PROMPT, stream=2))
            for i, token in enumerate(text):
                count = 1 + i % max(1, session.profile.decode.max_rows - 1)
                answer = probe.forward((companion, subject.text(count, stream=3 + i)), (0, [token]))
                row = answer.rows.logits(answer.starts[1]).copy()
                expect_same(row, reference.after(text[: i + 1]), f"a row beside {count} rows of another sequence")


@rule("T-BATCH-02", look=_FORWARD)
def check_interleaving(subject: TargetSubject) -> None:
    """Forwards of one sequence leave the others alone, because requests take turns."""
    for options in _with_companions(subject):
        prompt, text = subject.text(PROMPT), subject.text(4, stream=1)
        reference = Reference(subject, options, prompt)
        with subject.session(options) as session:
            probe = Probe(session)
            probe.open(0, prompt)
            for i, token in enumerate(text):
                probe.open(1, subject.text(PROMPT, stream=2 + i))
                probe.decode(1, subject.text(2, stream=9))
                session.close(1)
                expect_same(
                    probe.decode(0, [token])[0],
                    reference.after(text[: i + 1]),
                    "a forward of sequence 0 after one of sequence 1",
                )


@rule("T-SHAPE-01", look=_SHAPES)
def check_identity_across_processes(subject: TargetSubject) -> None:
    """A shape identity is the same in every process, because receipts and caches of two runs are compared by it."""
    if subject.again is None:
        refuse("needs a factory that a second process can import; set `factory` or register a fixture")
    with subject.session() as session:
        here = session.profile.identity.digest
    command = [sys.executable, "-m", "power_conformance.child", subject.again]
    environ = {**os.environ, "PYTHONHASHSEED": "271", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    there = done.stdout.strip()
    if done.returncode:
        fail(f"failed in a second process: {done.stderr.strip().splitlines()[-1:]}", "the same identity as here")
    if there != here:
        fail(f"has identity {here} here and {there} in a second process", "one identity: digest facts, not objects")


@rule("T-SHAPE-02", look=_SHAPES)
def check_one_identity_one_path(subject: TargetSubject) -> None:
    """Prompt and decode class share an identity only if they give the same bits, because then their rows are mixed."""
    for options in subject.options:
        _skip_unverified(subject, options)
        prompt = subject.text(12)
        with subject.session(options) as session:
            profile, probe = session.profile, Probe(session)
            if not profile.mixable:
                continue
            expected = probe.open(0, prompt)
            session.close(0)
            session.open(0)
            row = [probe.forward((0, [token])).rows.logits(0).copy() for token in prompt][-1]
            expect_same(
                row, expected, "a prompt evaluated in the decode class, which has the prefill class's identity,"
            )


@rule("T-SHAPE-03", look=_SHAPES)
def check_identity_of_options(subject: TargetSubject) -> None:
    """Sessions whose options change the bits have other identities, because equal identities promise equal bits."""
    base = subject.options[0]
    prompt, text = subject.text(PROMPT), subject.text(3, stream=1)
    found: dict[str, tuple[SessionOptions, list[Row]]] = {}
    for options in (base, *_variations(base)):
        with ExitStack() as stack:  # one session a variation: a backend may measure each before it opens
            try:
                session = stack.enter_context(subject.session(options))
            except PowerError:  # an option this backend does not have is no matter of identity
                continue
            identity, probe = session.profile.identity.digest, Probe(session)
            probe.open(0, prompt)
            rows = probe.step(0, text)
        before, expected = found.setdefault(identity, (options, rows))
        if not all(is_same(a, b) for a, b in zip(rows, expected, strict=True)):
            fail(f"gave other logits with {options} than with {before}, under one identity", "two identities")


@rule("T-SHAPE-04", look=_SHAPES)
def check_identity_of_models(subject: TargetSubject) -> None:
    """Another model has another shape identity and another file digest, because caches are looked up by them."""
    if not subject.others:
        refuse("needs a second model; give `others`, or register another target fixture")
    # Without the layers that drafters read: the other model may not have them.
    with subject.session(hidden_layers=()) as session:
        mine = session.profile.identity
    for other in subject.others:
        with evolve(subject, model=other).session(hidden_layers=()) as session:
            theirs = session.profile.identity
        if other.identity.file_sha256 == subject.model.identity.file_sha256:
            fail(f"models {subject.model.identity.name!r} and {other.identity.name!r} have one file digest", "two")
        if mine == theirs:
            fail(f"models {subject.model.identity.name!r} and {other.identity.name!r} have one shape identity", "two")


def _variations(base: SessionOptions) -> Iterator[SessionOptions]:
    yield evolve(base, threads=1)
    yield evolve(base, threads=2)
    yield evolve(base, max_sequences=1)
    yield evolve(base, max_rows=max(base.max_sequences, 4))
    yield evolve(base, context_size=2 * (base.context_size or 64))
    yield evolve(base, rollback_rows=base.rollback_rows + 1)


def _with_companions(subject: TargetSubject) -> Iterator[SessionOptions]:
    several = [options for options in subject.options if options.max_sequences > 1]
    if not several:
        refuse("no session has more than one sequence")
    for options in several:
        _skip_unverified(subject, options)
        yield options


def _skip_unverified(subject: TargetSubject, options: SessionOptions) -> None:
    with subject.session(options) as session:
        if session.profile.level is ExactnessLevel.UNVERIFIED:
            refuse("the session promises nothing: its level is unverified")


def _chain_lengths(shape: WidthClass, room: int) -> list[int]:
    most = min(shape.max_rows, room)
    return sorted({*range(1, min(most, 9) + 1), *(n for n in shape.widths if n <= most), most})
