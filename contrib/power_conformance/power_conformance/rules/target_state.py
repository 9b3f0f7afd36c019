"""Rules of targets: lengths, checkpoints, rollback, refusals and ends. State is compared by the next row's logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from attrs import frozen

from power_conformance.failures import fail, refuse
from power_conformance.probing import PROMPT, Probe, Reference, expect_refusal, expect_same
from power_conformance.registry import rule
from power_conformance.subjects import TargetSubject
from power_core.target import SessionOptions, TargetSession
from power_core.types import Capability, TokenId

_STATE = "TargetSession.checkpoint and restore in power_core/target.py"
_CUT = "TargetSession.truncate and rollback_capacity in power_core/target.py"
_FORWARD = "TargetSession.forward in power_core/target.py"
_LENGTHS = 6  # lengths after the prompt at which state is checkpointed


@frozen
class Scene:
    """A session with a prompt evaluated in sequence 0, and plain decoding to compare it with."""

    session: TargetSession
    probe: Probe
    reference: Reference
    subject: TargetSubject

    @property
    def chain(self) -> int:
        """Rows of a speculative step."""
        return min(4, self.session.profile.decode.max_rows)

    def text(self, length: int, stream: int = 1) -> list[TokenId]:
        return self.subject.text(length, stream)

    def restart(self) -> None:
        """Sequence 0 as at the beginning."""
        self.session.close(0)
        self.probe.open(0, self.subject.text(PROMPT))

    def expect_after(self, held: Sequence[TokenId], did: str) -> None:
        """Fail unless sequence 0 stands where plain decoding of *held* does; evaluates one token more."""
        length, expected = self.session.length(0), PROMPT + len(held)
        if length != expected:
            fail(f"{did}: length is {length}", f"length {expected}")
        token = self.text(1, stream=77)[0]
        expect_same(self.probe.decode(0, [token])[0], self.reference.after([*held, token]), did)


@contextmanager
def scene(subject: TargetSubject, options: SessionOptions) -> Iterator[Scene]:
    """A `Scene` of *options*."""
    with subject.session(options) as session:
        probe, prompt = Probe(session), subject.text(PROMPT)
        probe.open(0, prompt)
        yield Scene(session, probe, Reference(subject, options, prompt), subject)


def each_scene(subject: TargetSubject, check: Callable[[Scene], None]) -> None:
    """Run *check* in a scene of each of the subject's options."""
    for options in subject.options:
        with scene(subject, options) as made:
            check(made)


@rule("T-LENGTH-01", look="TargetSession.length in power_core/target.py")
def check_length(subject: TargetSubject) -> None:
    """`length` counts the positions held, pad rows not among them, because the next chain starts there."""

    def check(s: Scene) -> None:
        s.session.close(0)
        s.session.open(0)
        expected = 0
        for count in (0, 1, s.chain, 1, 2):
            if count:
                s.probe.decode(0, s.text(min(count, s.chain)))
                expected += min(count, s.chain)
            if s.session.length(0) != expected:
                fail(f"holds {s.session.length(0)} positions after {expected} rows", f"length {expected}")

    each_scene(subject, check)


@rule("T-CHECKPOINT-01", look=_STATE)
def check_restore_at_every_length(subject: TargetSubject) -> None:
    """
    A restored sequence decodes on as plain decoding of the same prefix does, at every length and after any number
    of rows.
    """

    def check(s: Scene) -> None:
        held: list[TokenId] = []
        for length in range(_LENGTHS):
            for rows in range(1, s.chain + 1):
                mark = s.session.checkpoint(0, rows)
                s.probe.decode(0, s.text(rows, stream=10 + rows))
                if not s.session.can_restore(0, mark):
                    s.restart()
                    s.probe.step(0, held)
                    continue
                s.session.restore(0, mark)
                mark = s.session.checkpoint(0, 1)
                s.expect_after(held, f"a restore over {rows} rows, {length} tokens after the prompt,")
                _undo(s, mark, held)
            token = s.text(length + 1)[-1]
            s.probe.decode(0, [token])
            held.append(token)

    each_scene(subject, check)


@rule("T-CHECKPOINT-02", look=_STATE)
def check_snapshots_are_kept(subject: TargetSubject) -> None:
    """
    With `state-snapshot`, a checkpoint can be restored after the rows it was taken for, because replays count on
    it.
    """

    def check(s: Scene) -> None:
        if Capability.STATE_SNAPSHOT not in s.session.capabilities:
            refuse("the session does not declare `state-snapshot`")
        for rows in range(1, s.chain + 1):
            mark = s.session.checkpoint(0, rows)
            s.probe.decode(0, s.text(rows))
            if not s.session.can_restore(0, mark):
                fail(f"cannot restore a checkpoint for {rows} rows after {rows} rows", "can_restore to be true")
            s.session.restore(0, mark)

    each_scene(subject, check)


@rule("T-CHECKPOINT-03", look=_STATE)
def check_restore_twice(subject: TargetSubject) -> None:
    """A checkpoint can be restored more than once, because a step that failed is tried again."""

    def check(s: Scene) -> None:
        mark = s.session.checkpoint(0, s.chain)
        for attempt in range(3):
            s.probe.decode(0, s.text(s.chain, stream=20 + attempt))
            if not s.session.can_restore(0, mark):
                if attempt:
                    fail("a checkpoint that was restored once cannot be restored again", "can_restore to be true")
                refuse("the session cannot restore this far; the engine evaluates again from the tokens")
            s.session.restore(0, mark)
        s.expect_after([], "a checkpoint restored three times")

    each_scene(subject, check)


@rule("T-CHECKPOINT-04", look=_STATE)
def check_stale_checkpoints(subject: TargetSubject) -> None:
    """A checkpoint whose rows have been replaced is refused or restored exactly, never to a mixture of two texts."""

    def check(s: Scene) -> None:
        first, second = s.text(3), s.text(4, stream=30)
        s.probe.decode(0, first[: min(3, s.chain)])
        held = first[: min(3, s.chain)]
        mark = s.session.checkpoint(0, s.chain)
        s.restart()
        s.probe.step(0, second)
        with suppress(Exception):  # refusing by an exception is as good as by an answer
            if s.session.can_restore(0, mark):
                s.session.restore(0, mark)
                second = held
        s.expect_after(second, "a checkpoint of a text that was replaced")

    each_scene(subject, check)


@rule("T-CHECKPOINT-05", look=_STATE)
def check_checkpoint_is_passive(subject: TargetSubject) -> None:
    """Taking a checkpoint changes nothing, because one is taken at every step and mostly dropped."""

    def check(s: Scene) -> None:
        text = s.text(5)
        for end, token in enumerate(text, 1):
            for rows in (0, 1, s.chain):
                s.session.checkpoint(0, rows)
            row = s.probe.decode(0, [token])[0]
            expect_same(row, s.reference.after(text[:end]), f"a forward after {3 * end} checkpoints")

    each_scene(subject, check)


@rule("T-ROLLBACK-01", look=_CUT)
def check_truncate_is_exact(subject: TargetSubject) -> None:
    """After every cut that `can_truncate` allows, the sequence decodes on as plain decoding of what is left."""

    def check(s: Scene) -> None:
        for rows in range(1, s.chain + 1):
            for dropped in range(1, rows + 2):
                s.restart()
                text = s.text(rows + 1, stream=rows)
                s.probe.decode(0, text[:1])
                s.probe.decode(0, text[1:])
                length = PROMPT + len(text) - dropped
                if s.session.can_truncate(0, length):
                    s.session.truncate(0, length)
                    s.expect_after(text[: len(text) - dropped], f"{dropped} of {rows} rows cut off")

    each_scene(subject, check)


@rule("T-ROLLBACK-02", look=_CUT)
def check_capacity_is_honoured(subject: TargetSubject) -> None:
    """
    Within the declared rollback capacity every cut after a forward is possible, because proposals are as long as
    that.
    """

    def check(s: Scene) -> None:
        capacity = s.session.rollback_capacity
        for rows in range(1, s.chain + 1):
            for dropped in range(1, min(rows - 1, rows if capacity is None else capacity) + 1):
                s.restart()
                s.probe.decode(0, s.text(rows))
                if not s.session.can_truncate(0, PROMPT + rows - dropped):
                    fail(f"cannot drop {dropped} of {rows} rows with capacity {capacity}", "can_truncate to be true")

    each_scene(subject, check)


@rule("T-ROLLBACK-03", look=_CUT)
def check_honest_beyond_capacity(subject: TargetSubject) -> None:
    """
    A cut that `can_truncate` denies raises and changes nothing, because a partial cut would corrupt the text
    silently.
    """
    refused = 0

    def check(s: Scene) -> None:
        nonlocal refused
        held = s.text(6)
        s.probe.step(0, held)
        for dropped in range(1, len(held) + 1):
            length = PROMPT + len(held) - dropped
            if s.session.can_truncate(0, length):
                continue
            refused += 1
            raised = False
            try:
                s.session.truncate(0, length)
            except Exception:  # noqa: BLE001 - BackendError by the protocol; that it raises is what matters
                raised = True
            if not raised:
                fail(f"accepted a cut of {dropped} rows that can_truncate denied", "a BackendError")
        s.expect_after(held, "cuts that were refused")

    each_scene(subject, check)
    if not refused:
        refuse("every cut is possible")


@rule("T-FAILURE-01", look=_FORWARD)
def check_foreign_tokens(subject: TargetSubject) -> None:
    """
    A token outside the vocabulary is refused and no sequence changes, because native code would read past a table.
    """
    size = subject.model.tokenizer.vocab_size
    for token in (size, size + 5, -1, 2**31 - 1):
        _check_refusal(subject, [token], 0, f"the token {token} of a vocabulary of {size}")


@rule("T-FAILURE-02", look=_FORWARD)
def check_too_many_rows(subject: TargetSubject) -> None:
    """More rows than the class holds are refused and no sequence changes, because another kernel would compute them."""

    def check(s: Scene) -> None:
        most = s.session.profile.decode.max_rows
        if PROMPT + most + 1 > s.session.context_size:
            refuse("the class holds more rows than the context has positions")
        expect_refusal(s.probe, 0, s.text(most + 1), at=PROMPT, did=f"{most + 1} rows in a class of {most}")
        s.expect_after([], "a forward of too many rows, refused,")

    each_scene(subject, check)


@rule("T-FAILURE-03", look=_FORWARD)
def check_gaps(subject: TargetSubject) -> None:
    """
    A chain that does not start at the sequence's length is refused and no sequence changes, because it leaves a
    hole.
    """
    for offset in (1, 3, -1):
        _check_refusal(subject, subject.text(1, stream=3), offset, f"a chain at {offset:+d} of the sequence's length")


@rule("T-FAILURE-04", look=_FORWARD)
def check_closed_sequences(subject: TargetSubject) -> None:
    """
    Rows of a sequence that is not open are refused and no other sequence changes, because a late step must not
    revive it.
    """

    def check(s: Scene) -> None:
        if s.session.max_sequences < 2:
            refuse("the session has one sequence")
        expect_refusal(s.probe, 1, s.text(1), at=0, did="a row of a sequence that was never opened")
        s.expect_after([], "a forward of a closed sequence, refused,")

    each_scene(subject, check)


def _check_refusal(subject: TargetSubject, tokens: list[TokenId], offset: int, did: str) -> None:
    def check(s: Scene) -> None:
        held = s.text(2)
        s.probe.step(0, held)
        expect_refusal(s.probe, 0, tokens, at=PROMPT + 2 + offset, did=did)
        s.expect_after(held, f"{did}, refused,")

    each_scene(subject, check)


def _undo(s: Scene, mark: object, held: Sequence[TokenId]) -> None:
    """Take back the token that `Scene.expect_after` evaluated."""
    if s.session.can_restore(0, mark):
        s.session.restore(0, mark)
    else:
        s.restart()
        s.probe.step(0, held)
