"""Rules of drafters: what is undone, what is forgotten, and what ends."""

from __future__ import annotations

from power_conformance.drafting import DraftRun, drafting, parts
from power_conformance.failures import fail, refuse
from power_conformance.registry import rule
from power_conformance.subjects import DrafterSubject
from power_core.types import TokenId

_RESTORE = "DraftSession.checkpoint and restore in power_core/drafter.py"
_END = "DraftSession.end and close in power_core/drafter.py"
_TEXT = 40


@rule("D-RESTORE-01", look=_RESTORE)
def check_restore(subject: DrafterSubject) -> None:
    """
    A restored sequence proposes what it proposed before, whatever was observed in between: a failed step never
    happened.
    """
    text = subject.text(_TEXT)
    with drafting(subject) as run:
        run.begin(0, text[:10], text[10])
        for part in parts(text[11:]):
            for detour in ([], subject.text(3, stream=8)):
                mark = run.draft.checkpoint(0)
                expected = run.propose(0)
                if detour:
                    run.detour(0, detour, mark)
                else:
                    run.draft.restore(0, mark)
                mark = run.draft.checkpoint(0)
                got = run.propose(0)
                if got != expected:
                    fail(f"proposed {got} after a restore", f"{expected}, as before it")
                run.draft.restore(0, mark)
            run.round(0, part)


@rule("D-RESTORE-02", look=_RESTORE)
def check_detours_leave_no_trace(subject: DrafterSubject) -> None:
    """What was observed and taken back leaves no trace in later proposals, because rejected text is not the user's."""
    text = subject.text(_TEXT)
    with drafting(subject) as run:
        expected = run.follow(0, text)
    with drafting(subject) as run:
        run.begin(0, text[:10], text[10])
        for number, part in enumerate(parts(text[11:])):
            for detour in _misleading(text, part, number):
                mark = run.draft.checkpoint(0)
                run.propose(0)
                run.detour(0, detour, mark)
            got = run.round(0, part)
            if got != expected[number]:
                fail(f"proposed {got} in round {number}, after a detour that was taken back", f"{expected[number]}")


@rule("D-RESTORE-03", look=_RESTORE)
def check_restore_twice(subject: DrafterSubject) -> None:
    """A checkpoint can be restored more than once, because a step may fail again."""
    text = subject.text(_TEXT)
    with drafting(subject) as run:
        run.follow(0, text)
        mark = run.draft.checkpoint(0)
        expected = run.propose(0)
        for _ in range(3):
            run.draft.restore(0, mark)
        run.draft.checkpoint(0)
        if (got := run.propose(0)) != expected:
            fail(f"proposed {got} after three restores of one checkpoint", f"{expected}, as before")


@rule("D-ISOLATION-01", look="DraftSession.end in power_core/drafter.py")
def check_requests_are_isolated(subject: DrafterSubject) -> None:
    """A request's proposals do not depend on requests that ended before, because their text belongs to other users."""
    if subject.shares_state:
        refuse("the drafter is configured to share a store between requests")
    text = subject.text(_TEXT)
    with drafting(subject) as run:
        expected = run.follow(0, text)
    with drafting(subject) as run:
        for other in (text, subject.text(_TEXT, stream=3), text[::-1]):
            run.follow(0, other)
            run.end(0)
        for number, (got, wanted) in enumerate(zip(run.follow(0, text), expected, strict=True)):
            if got != wanted:
                fail(f"proposed {got} in round {number} after three other requests", f"{wanted}, as in a new session")


@rule("D-ISOLATION-02", look="DraftSession in power_core/drafter.py")
def check_sequences_are_isolated(subject: DrafterSubject) -> None:
    """A sequence's proposals do not depend on other open sequences, because requests run beside each other."""
    if subject.options.max_sequences < 2:
        refuse("the target has one sequence")
    text, other = subject.text(_TEXT), subject.text(_TEXT, stream=3)
    with drafting(subject) as run:
        expected = run.follow(0, text)
    with drafting(subject) as run:
        run.begin(1, other[:10], other[10])
        run.begin(0, text[:10], text[10])
        others = parts(other[11:])
        for number, part in enumerate(parts(text[11:])):
            run.round(1, next(others))
            got = run.round(0, part)
            if got != expected[number]:
                fail(f"proposed {got} in round {number} beside another sequence", f"{expected[number]}, as alone")


@rule("D-END-01", look=_END)
def check_end_at_any_point(subject: DrafterSubject) -> None:
    """A sequence can end at any point of a step and begin again with another text, because requests are cancelled."""
    text = subject.text(_TEXT)
    with drafting(subject) as run:
        run.begin(0, text[:10], text[10])
        run.end(0)
        for leave in (_checkpointed, _proposed, _restored):
            run.begin(0, text[10:20], text[20])
            leave(run)
            run.end(0)
        run.follow(0, text)


@rule("D-END-02", look=_END)
def check_end_frees(subject: DrafterSubject) -> None:
    """Ended sequences leave nothing that runs out, however many there were, because a server never restarts."""
    text = subject.text(12)
    with drafting(subject) as run:
        for _ in range(300):
            run.begin(0, text[:8], text[8])
            run.round(0, text[9:11])
            run.end(0)


@rule("D-CLOSE-01", look=_END)
def check_close(subject: DrafterSubject) -> None:
    """A session can be closed twice, with sequences open, and the drafter's other sessions go on."""
    text = subject.text(_TEXT)
    with drafting(subject) as run:
        expected = run.follow(0, text)
    with drafting(subject) as run, drafting(subject) as other:
        for each in (run, other):
            each.begin(0, text[:10], text[10])
        other.draft.close()
        other.draft.close()
        for number, part in enumerate(parts(text[11:])):
            if (got := run.round(0, part)) != expected[number]:
                fail(f"proposed {got} in round {number} after another session was closed", f"{expected[number]}")


def _misleading(text: list[TokenId], part: list[TokenId], number: int) -> list[list[TokenId]]:
    """
    Detours of five tokens that an index would mix up with the text.

    They begin as the text goes on, or as it began, and then go another way: what they leave behind is
    found again by the very n-grams that come next.
    """
    return [[*part[:2], *text[number : number + 3], text[0]][:5], [*text[number : number + 2], *text[8:5:-1]]]


def _checkpointed(run: DraftRun) -> None:
    run.draft.checkpoint(0)


def _proposed(run: DraftRun) -> None:
    run.draft.checkpoint(0)
    run.propose(0)


def _restored(run: DraftRun) -> None:
    mark = run.draft.checkpoint(0)
    run.propose(0)
    run.draft.restore(0, mark)
