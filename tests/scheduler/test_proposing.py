"""The proposals of one step, without a loop around them: who is asked for what, what is kept, what a failure costs."""

from types import SimpleNamespace

import pytest

from power_core.drafter import DrafterRequirements, DraftRequest, Proposal
from power_core.errors import DrafterError
from power_core.scheduler import proposing
from power_core.scheduler.costs import CostModel
from power_core.scheduler.drafting import OpenDraft
from power_core.shapes import ShapeIdentity, WidthClass
from scheduler.sequences import make_member, make_sequence

VOCAB = 50


class Session:
    """Answers with a proposal of each sequence, or raises the error that is there for it."""

    def __init__(self, answers):
        self.answers, self.asked, self.rewound = answers, [], []

    def propose(self, requests):
        self.asked.append([*requests])
        for request in requests:
            if isinstance(self.answers[request.seq], Exception):
                raise self.answers[request.seq]
        return [self.answers[request.seq] for request in requests]


class Width:
    """Keeps the first *kept* tokens of a proposal, and remembers what it was shown."""

    stop_below = 0.25

    def __init__(self, kept=8, chances=()):
        self.kept, self.chances, self.shown = kept, chances, None

    def trim(self, token_ids, confidences, beside=0):
        self.shown = token_ids, confidences, beside
        return min(self.kept, len(token_ids))


def make(draft, seq, *, limit=4, known=1, width=None):
    """A member whose sequence drafts with *draft*; its last token is 3 + *seq*."""
    sequence = make_sequence((1, 2, 3 + seq))
    sequence.seq, sequence.draft, sequence.width = seq, draft, width or Width()
    sequence.drafting = SimpleNamespace(restore=lambda mark: draft.session.rewound.append((seq, mark)))
    member = make_member(sequence, known=known)
    member.transaction = SimpleNamespace(checkpoint_of=lambda _participant: f"mark {seq}")
    member.limit = limit
    return member


def make_costs():
    """Costs of a target whose step of one row takes a second."""
    costs = CostModel(WidthClass(ShapeIdentity("x"), (1, 2, 4), (1.0, 1.0, 1.0)))
    costs.observe_forward(1, 1.0)
    return costs


def propose(members, room=100):
    return proposing.propose(members, room=room, costs=make_costs(), vocab_size=VOCAB)


def test_each_drafter_is_asked_once_for_all_that_want_a_proposal_of_it():
    """One without a drafter and one that may check no token are asked for nothing."""
    first = OpenDraft("a", Session({0: Proposal([9]), 3: Proposal([8])}))
    second = OpenDraft("b", Session({1: Proposal([7])}))
    members = [make(first, 0), make(second, 1), make(first, 2, limit=0), make(first, 3, limit=2), make(None, 4)]
    assert propose(members) == []
    assert first.session.asked == [[DraftRequest(0, 3, 4, 0.25), DraftRequest(3, 6, 2, 0.25)]]
    assert second.session.asked == [[DraftRequest(1, 4, 4, 0.25)]]
    assert [member.proposal for member in members] == [[9], [7], [], [8], []]


def test_what_a_policy_is_shown_is_what_could_be_checked():
    """Up to the limit and to the first id that is none, with as many confidences, beside the pending rows of others."""
    draft = OpenDraft("a", Session({0: Proposal([4, VOCAB - 1, VOCAB, 6], [0.9, 0.8, 0.7, 0.6]), 1: Proposal([5] * 9)}))
    members = [make(draft, 0), make(draft, 1, known=3), make(None, 2, known=2)]
    propose(members)
    assert members[0].sequence.width.shown == ([4, VOCAB - 1], [0.9, 0.8], 5)
    assert members[1].sequence.width.shown == ([5] * 4, None, 5)


def test_a_proposal_is_cut_to_what_its_policy_keeps():
    """The rest is counted as dropped, also what lay beyond the limit."""
    draft = OpenDraft("a", Session({0: Proposal([5, 6, 7, 8, 9, 10]), 1: Proposal()}))
    members = [make(draft, 0, width=Width(kept=3)), make(draft, 1)]
    members[0].sequence.counts.dropped = 10
    propose(members)
    assert [member.proposal for member in members] == [[5, 6, 7], []]
    assert [member.sequence.counts.dropped for member in members] == [13, 0]


def test_rows_that_do_not_suffice_go_to_the_likeliest_tokens():
    draft = OpenDraft("a", Session({0: Proposal([5, 6, 7]), 1: Proposal([8, 9])}))
    members = [make(draft, 0, width=Width(chances=(0.5, 0.2, 0.1))), make(draft, 1, width=Width(chances=(0.9, 0.8)))]
    propose(members, room=3)
    assert [member.proposal for member in members] == [[5], [8, 9]]
    assert [member.sequence.counts.dropped for member in members] == [2, 0]


def test_a_failure_is_the_members_own():
    """The others are asked again alone, their drafts brought back before, and get their proposals."""
    draft = OpenDraft("a", Session({0: Proposal([5]), 1: RuntimeError("lost"), 2: Proposal([6])}))
    members = [make(draft, seq) for seq in range(3)]
    ((failed, error),) = propose(members)
    assert failed is members[1]
    assert "lost" in str(error)
    assert draft.session.rewound == [(seq, f"mark {seq}") for seq in range(3)]
    assert [member.proposal for member in members] == [[5], [], [6]]
    assert [member.sequence.counts.dropped for member in members] == [0, 0, 0]


def test_the_time_of_a_batch_is_shared_out_and_that_of_a_failure_forgotten(monkeypatch):
    """Seven seconds for two requests are three and a half each; one that fails says nothing about either."""
    ticks = iter([2.0, 9.0, 20.0, 50.0])
    monkeypatch.setattr(proposing, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    costs, answers = make_costs(), {0: Proposal([5]), 1: Proposal([6])}
    for answers[1] in (Proposal([6]), ValueError("none")):
        draft = OpenDraft("a", Session(answers))
        proposing.propose([make(draft, 0, limit=4), make(draft, 1, limit=2)], room=9, costs=costs, vocab_size=VOCAB)
        assert (costs.curve.draft("a", 4), costs.curve.draft("a", 2)) == (3.5, 3.5)


def test_a_sequential_drafter_took_the_time_of_what_it_proposed(monkeypatch):
    """Asked for four tokens it stopped after two; what is beyond those asked for was no use either."""
    ticks = iter([0.0, 3.0, 3.0, 8.0])
    monkeypatch.setattr(proposing, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    costs = make_costs()
    for answer in (Proposal([5, 6]), Proposal([5, 6, 7, 8, 9])):
        draft = OpenDraft("a", Session({0: answer}), DrafterRequirements(sequential=True))
        proposing.propose([make(draft, 0, limit=4)], room=9, costs=costs, vocab_size=VOCAB)
    assert (costs.curve.draft("a", 2), costs.curve.draft("a", 4)) == (3.0, 5.0)


def test_a_drafter_that_cannot_be_told_is_not_asked(monkeypatch):
    """Those of its other members still are, and nobody where all have failed."""
    error = DrafterError("no", who="strategy 'a'")
    draft = OpenDraft("a", Session({0: Proposal([5]), 1: Proposal([6])}))
    members = [make(draft, 0), make(draft, 1)]
    failing = {1}
    monkeypatch.setattr(draft, "catch_up", lambda seq, _costs: error if seq in failing else None)
    assert propose(members) == [(members[1], error)]
    assert [member.proposal for member in members] == [[5], []]
    failing.add(0)
    assert propose(members) == [(members[0], error), (members[1], error)]
    assert draft.session.asked == [[DraftRequest(0, 3, 4, 0.25)]]


@pytest.mark.parametrize("room", [0, -1])
def test_without_room_nothing_is_checked(room):
    draft = OpenDraft("a", Session({0: Proposal([5, 6])}))
    member = make(draft, 0)
    propose([member], room=room)
    assert (member.proposal, member.sequence.counts.dropped) == ([], 2)
