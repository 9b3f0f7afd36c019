"""Drafters at arm's length: whatever plugin code raises is one error with a name, and nothing stays open."""

import sys

import pytest

from power_core.drafter import DraftRequest
from power_core.errors import DrafterError
from power_core.scheduler.drafting import DraftPool, OpenDraft


class Session:
    """A draft session whose calls raise what they are told to."""

    def __init__(self, error=None):
        self.error = error
        self.is_closed = False

    def propose(self, requests):
        raise self.error

    def close(self):
        self.is_closed = True
        if self.error is not None:
            raise self.error


def test_every_session_is_closed_and_the_first_failure_named():
    """One that cannot be closed keeps none of the others open."""
    sessions = {"a": Session(), "b": Session(RuntimeError("stuck")), "c": Session(SystemExit(3)), "d": Session()}
    pool = DraftPool(lambda name: OpenDraft(name, sessions[name]))
    for name in sessions:
        pool.get(name)
    with pytest.raises(DrafterError, match="strategy 'c': SystemExit: 3"):
        pool.close()
    assert all(session.is_closed for session in sessions.values())
    pool.close()


def test_an_exit_in_a_drafter_ends_the_request_and_not_the_process():
    """Of one request and of several; an interrupt is none of the drafter's and goes through."""
    draft = OpenDraft("mine", Session(SystemExit("bye")))
    requests = [DraftRequest(0, 1, 2), DraftRequest(1, 1, 2)]
    for some in (requests[:1], requests):
        answers = draft.propose(some, [lambda: None] * len(some))
        assert [type(answer) for answer in answers] == [DrafterError] * len(some)
        assert "SystemExit: bye" in str(answers[0])
    with pytest.raises(DrafterError, match="SystemExit"):
        draft.call(sys.exit, 1)
    interrupted = OpenDraft("mine", Session(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        interrupted.propose(requests, [lambda: None] * 2)
