"""Rules of targets: the end of the context, of a sequence, of a session and of a model."""

from __future__ import annotations

from power_conformance.failures import fail
from power_conformance.probing import PROMPT, Probe, expect_refusal
from power_conformance.registry import rule
from power_conformance.rules.target_state import Scene, each_scene
from power_conformance.subjects import TargetSubject


@rule("T-CONTEXT-01", look="TargetSession.context_size in power_core/target.py")
def check_whole_context(subject: TargetSubject) -> None:
    """
    Every sequence can hold `context_size` positions at the same time, because the last legal token belongs to the
    caller.
    """

    def check(s: Scene) -> None:
        s.session.close(0)
        for seq in range(s.session.max_sequences):
            s.probe.open(seq, s.text(s.session.context_size - 1, stream=seq))
        for seq in range(s.session.max_sequences):
            s.probe.decode(seq, s.text(1))
            if s.session.length(seq) != s.session.context_size:
                fail(f"holds {s.session.length(seq)} positions of {s.session.context_size}", "all of them")

    each_scene(subject, check)


@rule("T-CONTEXT-02", look="TargetSession.context_size in power_core/target.py")
def check_beyond_context(subject: TargetSubject) -> None:
    """
    A row beyond the context is refused and no sequence changes, because a shifted or overwritten cache is another
    text.
    """

    def check(s: Scene) -> None:
        s.session.close(0)
        size = s.session.context_size
        s.probe.open(0, s.text(size))
        expect_refusal(s.probe, 0, s.text(1), at=size, did=f"a row at position {size} of a context of {size}")
        if s.session.length(0) != size:
            fail(f"holds {s.session.length(0)} positions after the refusal", f"still {size}")

    each_scene(subject, check)


@rule("T-CLOSE-01", look="TargetSession.close in power_core/target.py")
def check_close_forgets(subject: TargetSubject) -> None:
    """A sequence that is opened again is empty, because the next request must not see the last one's rows."""

    def check(s: Scene) -> None:
        s.probe.decode(0, s.text(s.chain, stream=40))
        s.session.close(0)
        s.session.open(0)
        if s.session.length(0):
            fail(f"holds {s.session.length(0)} positions after close and open", "length 0")
        s.probe.prompt(0, s.subject.text(PROMPT))
        s.expect_after([], "a sequence closed and opened again")

    each_scene(subject, check)


@rule("T-CLOSE-02", look="TargetSession.close in power_core/target.py")
def check_close_frees(subject: TargetSubject) -> None:
    """Closing frees a sequence's rows, however many requests came before, because a server never restarts."""

    def check(s: Scene) -> None:
        s.session.close(0)
        for round_ in range(10):
            for seq in range(s.session.max_sequences):
                s.probe.open(seq, s.text(s.session.context_size, stream=round_))
            for seq in range(s.session.max_sequences):
                s.session.close(seq)

    each_scene(subject, check)


@rule("T-CLOSE-03", look="TargetSession.shutdown in power_core/target.py")
def check_shutdown(subject: TargetSubject) -> None:
    """Shutdown can be called twice, and a session refuses work after it, because freed memory must not be used."""

    def check(s: Scene) -> None:
        s.session.shutdown()
        s.session.shutdown()
        expect_refusal(s.probe, 0, s.text(1), at=PROMPT, did="a row after shutdown")

    each_scene(subject, check)


@rule("T-CLOSE-04", look="TargetModel.close in power_core/target.py", closes_model=True)
def check_model_close(subject: TargetSubject) -> None:
    """Closing a model shuts its open sessions down first and can be repeated, because programs end in any order."""
    session = subject.model.open_session(subject.options[0])
    probe = Probe(session)
    probe.open(0, subject.text(PROMPT))
    subject.model.close()
    subject.model.close()
    expect_refusal(probe, 0, subject.text(1), at=PROMPT, did="a row after the model was closed")
