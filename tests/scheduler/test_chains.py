"""Strategy chains: the proposal that promises most, each round."""

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from power_core.drafter import DrafterRequirements, DraftRequest, HiddenRows, Proposal
from power_core.errors import ConfigError, DrafterError
from power_core.scheduler.backlog import BacklogDrafter
from power_core.scheduler.chains import ChainDrafter, chain_names
from power_core.scheduler.costs import CostCurve, CostModel
from power_core.shapes import ShapeIdentity, WidthClass
from power_core.testing import AdversarialDrafter, Faults, OracleDrafter, ScriptedDrafter, ScriptedTarget, ZeroDrafter

VOCAB = 24
CPU = WidthClass(ShapeIdentity("x"), tuple(range(1, 10)), (1.0, 1.9, 2.15, 2.4, 2.7, 3.0, 3.4, 3.7, 3.9))


def make_chain(**members):
    costs = CostModel(CPU)
    costs.observe_forward(1, 0.01)
    return ChainDrafter(members, costs, clock=lambda: 0.0).open(None, None)


def play(chain, following, rounds, prompt=(1, 2, 3)):
    """Run *rounds* greedy rounds of one sequence; the proposals made, and how many of their tokens were right."""
    tokens, made = list(prompt), []
    chain.begin(0, prompt)
    for _ in range(rounds):
        chain.checkpoint(0)
        (proposal,) = chain.propose([DraftRequest(0, tokens[-1], 8)])
        chosen = []
        for offered in [*proposal.token_ids, None]:
            chosen.append(following([*tokens, *chosen]))
            if chosen[-1] != offered:
                break
        chain.observe(0, chosen, None)
        tokens += chosen
        made.append((proposal, len(chosen) - 1))
    chain.end(0)
    return made


@pytest.fixture
def following():
    return ScriptedTarget(vocab_size=VOCAB).greedy


def test_names_are_split_and_checked():
    assert chain_names("suffix, dspark") == ("suffix", "dspark")
    assert [chain_names(name) for name in ("auto", "off")] == [("auto",), ("off",)]
    for bad in ("", "a,", ",a", "a,a", "auto,off", "suffix,auto", "off,suffix"):
        with pytest.raises(ConfigError):
            chain_names(bad)


@pytest.mark.parametrize("order", [("right", "wrong"), ("wrong", "right")])
def test_the_member_that_is_right_is_found_whatever_the_order(following, order):
    members = {"right": OracleDrafter(following, VOCAB), "wrong": ZeroDrafter(following, VOCAB)}
    made = play(make_chain(**{name: members[name] for name in order}), following, 30)
    assert [right for _, right in made[-10:]] == [8] * 10


def test_two_members_that_are_right_by_turns_beat_either(following):
    """One drafts well while the text is young, the other later."""

    def until(limit, is_young):
        def propose(tokens, wanted, _round):
            oracle = OracleDrafter(following, VOCAB)
            zero = ZeroDrafter(following, VOCAB)
            return (oracle if (len(tokens) < limit) == is_young else zero).proposal(tokens, wanted, 0)

        return ScriptedDrafter(propose)

    young, old = until(120, is_young=True), until(120, is_young=False)
    rights = [right for _, right in play(make_chain(young=young, old=old), following, 40)]
    assert sum(rights) > 8 * 40 * 0.8


def test_chances_replace_the_members_own_confidences(following):
    """A member that is sure of what is always wrong is not believed."""
    wrong = AdversarialDrafter(following, VOCAB, wrong_at=1)
    chain = make_chain(boaster=wrong)
    last = play(chain, following, 60)[-1][0]
    assert last.confidences[0] > 0.8
    assert last.confidences[1] < 0.2


def test_a_member_that_fails_to_begin_leaves_no_member_begun():
    first = ScriptedDrafter([])
    second = ScriptedDrafter([], faults=Faults({"begin": 1}))
    chain = make_chain(first=first, second=second)
    with pytest.raises(Exception, match="begin"):
        chain.begin(0, [1, 2])
    first.assert_all_ended()
    chain.close()


def test_a_restored_chain_goes_on_as_if_the_step_had_not_been(following):
    oracle, zero = OracleDrafter(following, VOCAB), ZeroDrafter(following, VOCAB)
    chain = make_chain(oracle=oracle, zero=zero)
    chain.begin(0, [1, 2, 3])
    mark = chain.checkpoint(0)
    (before,) = chain.propose([DraftRequest(0, 3, 4)])
    chain.restore(0, mark)
    chain.checkpoint(0)
    (after,) = chain.propose([DraftRequest(0, 3, 4)])
    assert list(before.token_ids) == list(after.token_ids)
    with pytest.raises(DrafterError):
        chain.restore(0, "nonsense")
    chain.end(0)
    for drafter in (oracle, zero):
        drafter.assert_all_ended()


def test_several_requests_are_asked_in_one_batch(following):
    oracle = OracleDrafter(following, VOCAB)
    chain = make_chain(zero=ZeroDrafter(following, VOCAB), oracle=oracle)
    for seq in range(3):
        chain.begin(seq, [1 + seq, 2])
        chain.checkpoint(seq)
    answers = chain.propose([DraftRequest(seq, 2, 4) for seq in range(3)])
    assert [len(answer.token_ids) for answer in answers] == [4, 4, 4]
    for seq in range(3):
        chain.end(seq)


@pytest.mark.parametrize(("steps", "most"), [(CPU.costs, 2), ((1.0,) * 9, 60)], ids=["rows cost much", "rows are free"])
def test_a_dear_member_is_asked_as_far_as_it_pays(following, steps, most):
    """Behind a cheap member that is always wrong stands one that costs 0.7 of a step and is never right either."""
    model, clock = CostModel(WidthClass(ShapeIdentity("x"), tuple(range(1, 10)), steps)), iter(count())
    model.observe_forward(1, 1.0)
    for _ in range(5):
        model.observe_draft("dear", 8, 0.7)
    dear = ZeroDrafter(following, VOCAB)
    members = {"cheap": ZeroDrafter(following, VOCAB), "dear": dear}
    play(ChainDrafter(members, model, clock=lambda: 0.7 * next(clock)).open(None, None), following, 256)
    asked = len(dear.sessions[0].history)
    assert 0 < asked <= most


def test_a_sequential_member_is_told_when_to_stop():
    """Its time is that of what it proposed; one of another kind is told nothing and took that of what was asked."""
    costs, told = Costs(), []
    costs.curve = CostCurve(0, (0.0, 1.0), 0.25, {"steps": (0.0, 0.25, 0.375, 0.5)})
    steps, block = Member(Proposal([7, 8], [0.9, 0.1]), sequential=True), Member(Proposal([7]))
    for member in (steps, block):
        member.propose = lambda requests, answer=member.proposal: (told.extend(requests), [answer])[1]
    chain = ChainDrafter({"steps": steps, "block": block}, costs, clock=lambda: 0.0).open(None, None)
    chain.begin(0, (1, 2))
    chain.propose([DraftRequest(0, 2, 3)])
    assert told == [DraftRequest(0, 2, 3, 0.5), DraftRequest(0, 2, 3)]
    assert costs.told == [("draft", "steps", 2, 0.0), ("draft", "block", 3, 0.0)]


class Costs:
    """Costs as they are said to be, and what the chain told of them."""

    def __init__(self, steps=(1.0,) * 17, drafts=(), feeds=()):
        tables = {name: (0.0, *[cost] * 16) for name, cost in dict(drafts).items()}
        self.curve = CostCurve(0, (0.0, *steps), 0.0, tables, dict(feeds))
        self.told = []

    def observe_draft(self, *what):
        self.told.append(("draft", *what))

    def observe_feed(self, *what):
        self.told.append(("feed", *what))


class Member:
    """A drafter and its session: always proposes the same, and remembers its calls."""

    def __init__(self, proposal=None, fails_in=(), **needs):
        self.proposal, self.fails_in, self.needs, self.calls = proposal or Proposal(), fails_in, needs, []

    def requirements(self):
        return DrafterRequirements(**self.needs)

    def _call(self, name, *what):
        self.calls.append((name, *what))
        if name in self.fails_in:
            raise ValueError(f"{name} of {self.proposal.token_ids}")

    def open(self, *_where):
        self._call("open")
        return self

    def begin(self, seq, tokens):
        self._call("begin", seq, [*tokens])

    def propose(self, requests):
        self._call("propose", *(request.seq for request in requests))
        return [self.proposal] * len(requests)

    def observe(self, seq, committed, rows):
        self._call("observe", seq, [*committed], rows)

    def checkpoint(self, seq):
        self._call("checkpoint", seq)
        return f"mark of {self.proposal.token_ids}"

    def restore(self, seq, checkpoint):
        self._call("restore", seq, checkpoint)

    def end(self, seq):
        self._call("end", seq)

    def close(self):
        self._call("close")

    @property
    def asked(self):
        return [call[1:] for call in self.calls if call[0] == "propose"]


def opened(costs, *members, begun=1, clock=lambda: 0.0):
    """A chain of *members* named a, b, c in which *begun* sequences have begun."""
    chain = ChainDrafter(dict(zip("abc", members, strict=False)), costs, clock).open(None, None)
    for seq in range(begun):
        chain.begin(seq, [1, 2])
    return chain


def ask(chain, *seqs, tokens=4):
    return chain.propose([DraftRequest(seq, 2, tokens) for seq in seqs or (0,)])


def test_a_chain_needs_what_its_members_need():
    first = Member(capabilities=frozenset({"x"}), hidden_layers=(7, 3))
    second = Member(capabilities=frozenset({"y"}), hidden_layers=(3, 5), fixed_shape=True)
    needs = ChainDrafter({"a": first, "b": second}, Costs()).requirements()
    assert needs == DrafterRequirements(frozenset({"x", "y"}), None, (3, 5, 7), True)
    assert not ChainDrafter({"a": first}, Costs()).requirements().fixed_shape


def test_a_member_that_cannot_be_opened_leaves_none_open():
    members = [Member(), Member(), Member(fails_in=("open",))]
    with pytest.raises(ValueError, match="open"):
        opened(Costs(), *members)
    assert [member.calls[1:] for member in members] == [[("close",)], [("close",)], []]


def test_members_are_told_what_concerns_them():
    """All of what was committed, and rows where they read states; a commit of neither is told to nobody."""
    reader, other = Member(hidden_layers=(1,)), Member()
    chain = opened(Costs(), reader, other)
    for committed, rows in (([4, 5], "rows"), ([], "more rows"), ([6], None), ([], None)):
        chain.observe(0, committed, rows)
    seen = [[call[2:] for call in member.calls if call[0] == "observe"] for member in (reader, other)]
    assert seen == [[([4, 5], "rows"), ([], "more rows"), ([6], None)], [([4, 5], None), ([6], None)]]


@pytest.mark.parametrize("method", ["restore", "end", "close"])
def test_no_member_is_spared_by_the_failure_of_another(method):
    """The first failure is raised; each member gets its own checkpoint back."""
    members = [Member(Proposal([7])), *(Member(Proposal([n]), fails_in=(method,)) for n in (8, 9))]
    chain = opened(Costs(), *members)
    arguments = {"restore": [0, chain.checkpoint(0)], "end": [0], "close": []}[method]
    with pytest.raises(ValueError, match=rf"{method} of \[8\]"):
        getattr(chain, method)(*arguments)
    marks = [[f"mark of [{n}]"] if method == "restore" else [] for n in (7, 8, 9)]
    assert [member.calls[-1] for member in members] == [(method, *arguments[:1], *mark) for mark in marks]


@pytest.mark.parametrize(("cost", "is_asked"), [(1.49, True), (1.51, False)])
def test_a_member_is_asked_where_it_may_bring_more_than_it_costs(cost, is_asked):
    """At first it is taken to be right with 0.6 a token: 1.4996 tokens of 16, where rows are free."""
    second = Member(Proposal([6]))
    ask(opened(Costs(drafts={"b": cost}), Member(), second))
    assert second.asked == [(0,)] * is_asked


@pytest.mark.parametrize(("cost", "is_asked"), [(0.52, True), (0.54, False)])
def test_what_is_on_the_table_counts_against_a_member(cost, is_asked):
    """A sure token is worth 0.97 already."""
    first, second = Member(Proposal([5], [0.99])), Member(Proposal([6] * 4, [0.99] * 4))
    (best,) = ask(opened(Costs(drafts={"b": cost}), first, second))
    assert second.asked == [(0,)] * is_asked
    assert best.token_ids == ([6] * 4 if is_asked else [5])


@pytest.mark.parametrize(("cost", "is_asked"), [(0.008, True), (0.009, False)])
def test_a_member_that_costs_next_to_nothing_is_always_asked(cost, is_asked):
    """Also where all that is hoped of it is on the table."""
    second = Member()
    ask(opened(Costs(drafts={"b": cost}), Member(Proposal([5] * 4, [0.99] * 4)), second))
    assert second.asked == [(0,)] * is_asked


def test_the_first_member_is_asked_whatever_it_costs():
    first, second = Member(Proposal([5])), Member()
    chain = opened(Costs(drafts={"a": 9.0, "b": 9.0}), first, second)
    for _ in range(3):
        ask(chain)
    assert (len(first.asked), second.asked) == (3, [])


def test_of_requests_in_one_batch_each_is_asked_of_whom_it_is_worth():
    """One has learned that the first member is right, the other that it is wrong, which its proposals show."""
    first, second = Member(Proposal([5, 5], [0.99, 0.99])), Member(Proposal([6] * 3, [0.8] * 3))
    chain = opened(Costs(drafts={"b": 0.2}), first, second, begun=2)
    for _ in range(8):
        ask(chain, 0, 1)
        for seq, token in ((0, 5), (1, 6)):
            chain.observe(seq, [token] * 3, None)
    second.calls.clear()
    best = ask(chain, 0, 1)
    assert second.asked == [(1,)]
    assert [proposal.token_ids for proposal in best] == [[5, 5], [6] * 3]


def test_a_member_that_answers_too_few_requests_fails():
    """Nobody could say whose proposal is whose."""
    member = Member()
    member.propose = lambda _requests: [Proposal([5])]
    with pytest.raises(ValueError, match="shorter"):
        ask(opened(Costs(), member, begun=2), 0, 1)


def test_of_equal_promises_the_first_is_taken():
    """And any proposal before none at all, though it promises nothing where rows cost a step each."""
    first, second, third = Member(Proposal([5])), Member(Proposal([6])), Member(Proposal([7]))
    assert ask(opened(Costs(), first, second))[0].token_ids == [5]
    dear = Costs(steps=range(1, 18))
    assert ask(opened(dear, Member(), second, third))[0] == Proposal([6], [0.75])
    assert ask(opened(dear, Member(), Member()))[0] == Proposal()


@pytest.mark.parametrize("single", [1.0, 2.0])
@pytest.mark.parametrize(("fifth", "taken"), [(4.6, 4), (4.7, 1)])
def test_a_promise_is_what_the_best_cut_saves(single, fifth, taken):
    """Sure tokens, one or four; two or three save nothing. Four are expected to bring 3.71, and one alone 0.07."""
    members = [Member(Proposal([9] * count, [0.99] * count)) for count in (1, 4)]
    steps = [single - 1 + cost for cost in (1.0, 1.9, 3.8, 5.7, fifth, *[9.0] * 12)]
    (best,) = ask(opened(Costs(steps), *members))
    assert len(best.token_ids) == taken


def test_what_a_member_takes_is_told_by_request():
    """Five seconds for a batch of two; what it takes to tell it of states is timed apart, where there are any."""
    ticks = iter([0.0, 1.0, 10.0, 13.0, 20.0, 25.0, 30.0, 31.0])
    costs, reader = Costs(), Member(Proposal([5]), hidden_layers=(1,))
    chain = opened(costs, BacklogDrafter(reader), begun=2, clock=lambda: next(ticks))
    states = SimpleNamespace(hidden=lambda block, _layer: np.zeros((7, 2), np.float32)[block])
    for seq in (0, 1):
        chain.observe(seq, [3], HiddenRows(states, 0, 2 + seq, 0))
    chain.propose([DraftRequest(0, 3, 4), DraftRequest(1, 3, 6)])
    assert costs.told == [("feed", "a", 2, 1.0), ("feed", "a", 3, 3.0), ("draft", "a", 4, 2.5), ("draft", "a", 6, 2.5)]
    assert reader.asked == [(0, 1)]
    ask(chain, 1)
    assert costs.told[4:] == [("draft", "a", 4, 1.0)]


@pytest.mark.parametrize(
    ("cost", "asked"), [(0.012, (1, 1049)), (0.1, (9, 125)), (0.2, (17, 62)), (5.9, (492, 2)), (6.1, (None, 0))]
)
def test_a_member_that_promises_too_little_is_asked_once_tokens_have_paid(cost, asked):
    """In which round first, and how often: each puts 0.006 steps aside, up to 6, and asking takes them."""
    second, first = Member(), None
    chain = opened(Costs(steps=range(1, 18), drafts={"b": cost}), Member(), second)
    for round_ in range(1050):
        ask(chain)
        first = round_ if first is None and second.asked else first
        chain.observe(0, [4, 4], None)
    assert (first, len(second.asked)) == asked


def test_what_a_member_is_told_is_paid_for_as_well():
    """Asking takes 0.05 and so does telling: 99 rounds of 2 tokens put aside what 11 of both take."""
    reader = Member(hidden_layers=(1,))
    costs = Costs(steps=range(1, 18), drafts={"b": 0.05}, feeds={"b": (0.05, 0.001)})
    chain = opened(costs, Member(), BacklogDrafter(reader))
    states = SimpleNamespace(hidden=lambda block, _layer: np.zeros((1, 2), np.float32)[block])
    for _ in range(100):
        ask(chain)
        chain.observe(0, [4, 4], HiddenRows(states, 0, 1, 0))
    assert len(reader.asked) == 11


def test_nothing_is_learned_of_a_proposal_that_was_undone():
    """What is committed instead says nothing about it: the next is as likely as the first."""
    chain = opened(Costs(), Member(Proposal([5])))
    mark = chain.checkpoint(0)
    ask(chain)
    chain.restore(0, mark)
    chain.observe(0, [9], None)
    assert ask(chain) == [Proposal([5], [0.75])]


def test_the_rows_of_a_prompt_count_once_against_a_member():
    """Telling it of 40 rows takes 2 steps: no matter at first, with all the request to gain, and too much later."""
    reader = Member(Proposal([5], [0.99]), hidden_layers=(1,))
    costs = Costs(drafts={"b": 0.4}, feeds={"b": (0.5, 0.05)})
    chain = opened(costs, Member(), BacklogDrafter(reader))
    states = SimpleNamespace(hidden=lambda block, _layer: np.zeros((90, 2), np.float32)[block])
    asked = []
    for rows in (40, 0, 8, 40, 0):
        if rows:
            chain.observe(0, [], HiddenRows(states, 0, rows, 0))
        ask(chain)
        asked.append(len(reader.asked))
    assert asked == [1, 2, 3, 3, 3]


def test_a_member_is_judged_by_its_latest_proposals():
    """A fifth of each: one that promised 0.97 again and again, then nothing, is asked a few times more."""
    second = Member(Proposal([5], [0.99]))
    chain = opened(Costs(drafts={"b": 0.5}), Member(), second)
    for _ in range(40):
        ask(chain)
    second.proposal = Proposal()
    for _ in range(40):
        ask(chain)
    assert len(second.asked) == 40 + 3
