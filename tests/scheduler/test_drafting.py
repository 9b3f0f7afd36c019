"""Drafters at arm's length: whatever plugin code raises is one error with a name, and nothing stays open."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from power_core.drafter import DrafterRequirements, DraftRequest, HiddenRows, Proposal
from power_core.errors import CapabilityError, DrafterError
from power_core.scheduler import drafting
from power_core.scheduler.backlog import BacklogSession
from power_core.scheduler.costs import CostModel
from power_core.scheduler.drafting import DraftPool, OpenDraft, checked_confidences, checked_ids
from power_core.shapes import ShapeIdentity, WidthClass


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


class Answering:
    """A draft session that gives each of its answers to a `propose`, the last one again and again."""

    def __init__(self, *answers):
        self.answers, self.asked = [*answers], []

    def propose(self, requests):
        self.asked.append([request.seq for request in requests])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(requests) if callable(answer) else answer


REQUESTS = [DraftRequest(0, 1, 2), DraftRequest(1, 1, 2)]


@pytest.mark.parametrize("first", [[Proposal([1])], [Proposal([1])] * 3, None], ids=["too few", "too many", "none"])
def test_a_batch_with_a_wrong_answer_is_asked_again_one_request_at_a_time(first):
    """Each draft is brought back to where the step opened before it is asked again."""
    session, rewound = Answering(first, [Proposal([5])], [Proposal([6])]), []
    rewinds = [lambda: rewound.append(0), lambda: rewound.append(1)]
    assert OpenDraft("mine", session).propose(REQUESTS, rewinds) == [Proposal([5]), Proposal([6])]
    assert session.asked == [[0, 1], [0], [1]]
    assert rewound == [0, 1]


def test_a_request_alone_is_not_asked_again():
    """Its error names the strategy and what came; a draft that cannot be brought back is an error as well."""
    session = Answering([])
    (error,) = OpenDraft("mine", session).propose(REQUESTS[:1], [lambda: None])
    assert "strategy 'mine'" in str(error)
    assert (str(error.got), str(error.expected), session.asked) == ("0", "1", [[0]])
    answers = OpenDraft("mine", Answering([], [Proposal([5])])).propose(REQUESTS, [lambda: None, lambda: 1 / 0])
    assert answers[0] == Proposal([5])
    assert "ZeroDivisionError" in str(answers[1])


@pytest.mark.parametrize("answer", [None, [1, 2], Proposal(7), Proposal(None), Proposal(iter([1]))])
def test_what_is_no_proposal_is_the_requests_error(answer):
    """Whatever its type; the request beside it keeps its proposal, and nobody is asked again."""
    good = Proposal(np.array([3, 4]))
    session = Answering([answer, good])
    answers = OpenDraft("mine", session).propose(REQUESTS, [lambda: None] * 2)
    assert isinstance(answers[0], DrafterError)
    assert answers[1] is good
    assert session.asked == [[0, 1]]


def test_errors_of_power_go_through_as_they_are():
    """Anything else becomes one that names the strategy; what is returned is handed on."""
    draft, own = OpenDraft("mine", Session()), CapabilityError("lacks rows", who="target")

    def fail(error):
        raise error

    with pytest.raises(CapabilityError) as caught:
        draft.call(fail, own)
    assert caught.value is own
    with pytest.raises(DrafterError, match="strategy 'mine': KeyError: 3") as caught:
        draft.call(fail, KeyError(3))
    assert isinstance(caught.value.__cause__, KeyError)
    assert draft.call(divmod, 7, 2) == (3, 1)


class Reader:
    """A draft session that reads states, and may fail to."""

    def __init__(self, error=None):
        self.error = error

    def begin(self, seq, tokens): ...

    def checkpoint(self, seq): ...

    def restore(self, seq, checkpoint): ...

    def observe(self, seq, committed, rows):
        if self.error is not None:
            raise self.error


def waiting(rows, error=None):
    """A draft that has yet to be told of *rows* rows."""
    session = BacklogSession(Reader(error), ())
    session.begin(0, [1])
    session.observe(0, [2], HiddenRows(None, 0, rows, 0))
    return OpenDraft("mine", session)


def test_telling_of_a_backlog_is_timed(monkeypatch):
    """Eight seconds where a step takes one; a failure is returned and not timed, and without a backlog nothing is."""
    ticks = iter([5.0, 13.0, 20.0])
    monkeypatch.setattr(drafting, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    costs = CostModel(WidthClass(ShapeIdentity("x"), (1, 2), (1.0, 1.0)))
    costs.observe_forward(1, 1.0)
    draft, failing = waiting(rows=2), waiting(rows=2, error=ValueError("no"))
    assert (draft.backlog(0), OpenDraft("plain", Session()).backlog(0)) == (2, 0)
    assert draft.catch_up(0, costs) is None
    assert draft.backlog(0) == 0
    assert draft.catch_up(0, costs) is None
    assert OpenDraft("plain", Session()).catch_up(0, costs) is None
    assert "ValueError: no" in str(failing.catch_up(0, costs))
    costs.observe_draft("other", 1, 1.0)  # so that the curve is a new one
    assert costs.curve.feed("mine", 2) == 8.0


def test_what_a_draft_needs_is_as_declared():
    """Nothing, where nothing is said."""
    plain = OpenDraft("mine", Session())
    assert (plain.owner, plain.needs) == ("", DrafterRequirements())
    needs = DrafterRequirements(hidden_layers=(2,), fixed_shape=True)
    reader = OpenDraft("mine", Session(), needs, owner="p 1.0")
    assert (reader.owner, reader.needs) == ("p 1.0", needs)


def test_a_strategy_is_opened_once():
    """One that cannot be opened is tried again for the next request."""
    opened = []

    def opener(name):
        opened.append(name)
        if len(opened) == 1:
            raise CapabilityError("not yet", who="target")
        return OpenDraft(name, Session())

    pool = DraftPool(opener)
    with pytest.raises(CapabilityError):
        pool.get("a")
    assert pool.get("a") is pool.get("a")
    pool.get("b")
    assert opened == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("ids", "limit", "checked"),
    [
        ([5, 7, -1, 8], 8, [5, 7]),
        ([5, 7, 8], 2, [5, 7]),
        ([0, 9, 10], 3, [0, 9]),
        ([0, 11], 3, [0]),
        ([5, 7.0, 8], 3, [5]),
        ([5, None], 3, [5]),
        (np.array([3, 4], np.int32), 2, [3, 4]),
        ((), 3, []),
    ],
)
def test_ids_that_are_none_end_a_proposal(ids, limit, checked):
    found = checked_ids(Proposal(ids), limit, vocab_size=10)
    assert found == checked
    assert all(type(token) is int for token in found)


@pytest.mark.parametrize(
    ("confidences", "checked"),
    [
        (None, None),
        ([0.5, 0.25, 0.1], [0.5, 0.25]),
        ([0.5, 0.25], [0.5, 0.25]),
        ([0.5], None),
        ([0.5, None], None),
        ([0.5, "much"], None),
        ([0.5, math.nan], None),
        ([0.5, 0.25, math.nan], [0.5, 0.25]),
        ([10**400, 0.5], None),
    ],
)
def test_confidences_count_where_each_token_has_one(confidences, checked):
    assert checked_confidences(Proposal([5, 7, 8], confidences), 2) == checked
