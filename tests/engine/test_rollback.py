"""Rollback deeper than the target's window: exact replay once, then the guard (R5, case 18)."""

import numpy as np
import pytest

from power_core.request import GenerationRequest
from power_core.testing import Faults, OracleDrafter, PatternDrafter, ScriptedTarget, ZeroDrafter

VOCAB = 24
PROMPT = (3, 1, 4, 1, 5)
# One round each: three right and a wrong one, none, one right, eight right, eight wrong, none.
CASE_18 = ["RRRW", "", "R", "RRRRRRRR", "WWWWWWWW", ""]


def pattern_lab(make_lab, patterns, *, k, hidden_layers=(), **target_options):
    target = ScriptedTarget(VOCAB, **target_options)
    drafter = PatternDrafter(target.greedy, VOCAB, patterns, hidden_layers=hidden_layers)
    return make_lab(target, {"pattern": drafter}, draft_max=k)


@pytest.mark.parametrize("snapshots", [True, False], ids=["snapshots", "no-snapshots"])
@pytest.mark.parametrize("capacity", range(9))
def test_one_replay_then_the_guard(make_lab, capacity, snapshots):
    """A rejected suffix deeper than S costs one replay; from then on proposals are at most S long."""
    lab = pattern_lab(make_lab, ["RWWWWWWWW"], k=8, rollback_capacity=capacity, snapshots=snapshots)
    request = GenerationRequest(PROMPT, max_tokens=60, spec="pattern")
    [result] = lab.run(request)
    lab.check_same(request, result)
    deep = capacity < 7  # of eight proposed tokens seven are rejected
    assert (result.counts.replays, result.counts.guard) == ((1, capacity) if deep else (0, None))
    assert result.counts.rebuilds == (deep and not snapshots)
    lengths = [len(record.proposal.token_ids) for record in lab.strategies["pattern"].history]
    assert lengths[0] == 8
    assert max(lengths[1:], default=0) <= (capacity if deep else 8)


def test_a_request_that_is_never_rejected_never_pays(make_lab):
    """K > S costs nothing while every proposal is accepted."""
    target = ScriptedTarget(VOCAB, rollback_capacity=1)
    lab = make_lab(target, {"oracle": OracleDrafter(target.greedy, VOCAB)}, draft_max=7)
    request = GenerationRequest(PROMPT, max_tokens=33, spec="oracle")
    [result] = lab.run(request)
    lab.check_same(request, result)
    assert (result.counts.replays, result.counts.guard, result.counts.target_passes) == (0, None, 5)


@pytest.mark.parametrize("k", range(1, 9))
def test_window_as_wide_as_the_draft_needs_no_replay(make_lab, k):
    """K = S: every proposal token has a rollback point."""
    target = ScriptedTarget(VOCAB, rollback_capacity=k)
    lab = make_lab(target, {"zero": ZeroDrafter(target.greedy, VOCAB)}, draft_max=k)
    request = GenerationRequest(PROMPT, max_tokens=40, spec="zero")
    [result] = lab.run(request)
    lab.check_same(request, result)
    assert result.counts.replays == 0


@pytest.mark.parametrize("snapshots", [True, False], ids=["snapshots", "no-snapshots"])
@pytest.mark.parametrize("capacity", [None, 0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("k", [1, 2, 4, 8, 15, 16])
def test_case_18_script(make_lab, k, capacity, snapshots):
    """200 tokens of accepts, rejections and empty rounds: exact, no endless restore, few extra passes (case 18)."""
    lab = pattern_lab(make_lab, CASE_18, k=k, rollback_capacity=capacity, snapshots=snapshots, context_size=300)
    request = GenerationRequest(PROMPT, max_tokens=200, spec="pattern")
    [result] = lab.run(request)
    lab.check_same(request, result)
    rejections = sum(origin == "correction" for origin in result.origins)
    assert result.counts.target_passes <= 200 + 2 * rejections + 5
    assert result.counts.replays <= 1


@pytest.mark.parametrize("capacity", [None, 0, 1, 4])
def test_state_after_each_step_is_that_of_plain_decoding(make_lab, capacity):
    """After every step the target holds a prefix of the text, and its next logits are those of that prefix."""
    lab = pattern_lab(make_lab, CASE_18, k=8, rollback_capacity=capacity)
    request = GenerationRequest(PROMPT, max_tokens=60, spec="pattern")
    text = (*PROMPT, *lab.plain(request)[0])
    lab.submit(request)
    while lab.loop.active:
        lab.step()
        if lab.loop.active:
            held = lab.session.tokens(0)
            assert held == text[: len(held)]
            state = lab.session._sequences[0].states[-1]
            assert np.array_equal(lab.target.numerics.row(state, held), lab.target.logits(held))


@pytest.mark.parametrize("snapshots", [True, False], ids=["snapshots", "no-snapshots"])
@pytest.mark.parametrize("capacity", [None, 0, 1, 4])
@pytest.mark.parametrize("chunk", [1, 2, 256])
def test_hidden_rows_arrive_once_although_rows_are_replayed(make_lab, chunk, capacity, snapshots):
    """A drafter that reads hidden states sees each committed token's row exactly once, replays or not."""
    target = ScriptedTarget(VOCAB, rollback_capacity=capacity, snapshots=snapshots)
    reading = PatternDrafter(target.greedy, VOCAB, CASE_18, hidden_layers=[2])
    lab = make_lab(target, {"reading": reading}, draft_max=8, prefill_chunk=chunk)
    request = GenerationRequest(PROMPT, max_tokens=40, spec="reading")
    [result] = lab.run(request)
    lab.check_same(request, result)
    [ended] = reading.sessions[0].ended
    assert (ended.committed, ended.num_hidden) == (result.token_ids, len(PROMPT) + 40 - 1)


def test_replay_of_many_requests_leaves_the_others_alone(make_lab):
    """One request's replay or rebuild costs the requests beside it nothing but the shared forward."""
    target = ScriptedTarget(VOCAB, rollback_capacity=1, snapshots=False)
    right = target.greedy
    drafters = {"deep": PatternDrafter(right, VOCAB, ["RWWW"]), "oracle": OracleDrafter(right, VOCAB)}
    lab = make_lab(target, drafters, parallel=3, draft_max=4)
    prompts = [(1, 2, 3), (4, 5), (6, 7, 8, 9)]
    requests = [
        GenerationRequest(prompt, max_tokens=25, spec=spec)
        for prompt, spec in zip(prompts, ["deep", "oracle", "off"], strict=True)
    ]
    for request, result in zip(requests, lab.run(*requests), strict=True):
        lab.check_same(request, result)
        assert result.counts.replays == (request.spec == "deep")


def test_a_window_of_zero_drafts_once(make_lab):
    """S = 0 drafts once, replays, and then decodes plainly: the guard is 0."""
    target = ScriptedTarget(VOCAB, rollback_capacity=0, faults=Faults())
    zero = ZeroDrafter(target.greedy, VOCAB)
    lab = make_lab(target, {"zero": zero}, draft_max=4)
    request = GenerationRequest(PROMPT, max_tokens=20, spec="zero")
    lab.check_same(request, *lab.run(request))
    assert len(zero.history) == 1
    assert target.faults.calls["restore"] == 1
