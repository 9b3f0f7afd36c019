"""Strategy chains: the proposal that promises most, each round."""

from itertools import count

import pytest

from power_core.drafter import DraftRequest
from power_core.errors import ConfigError, DrafterError
from power_core.scheduler.chains import ChainDrafter, chain_names
from power_core.scheduler.costs import CostModel
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
    assert chain_names("suffix,dspark") == ("suffix", "dspark")
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
