"""Whatever a drafter proposes, the tokens are those of plain decoding (cases 1, 2, 16d)."""

import pytest

from power_core.errors import DrafterError, RequestError
from power_core.request import GenerationRequest
from power_core.testing import (
    AdversarialDrafter,
    LiarDrafter,
    OracleDrafter,
    PatternDrafter,
    RandomDrafter,
    ScriptedDrafter,
    ScriptedTarget,
    ZeroDrafter,
    lies_about,
    one_class,
    padded_class,
    two_classes,
)
from power_core.types import FinishReason, Origin

VOCAB = 24
PROMPT = (3, 1, 4, 1, 5)
WINDOWS = {"free": (None, True), "4": (4, True), "1": (1, True), "0": (0, True), "2-lossy": (2, False)}
PROFILES = {"one": one_class(), "padded": padded_class(), "two": two_classes(8), "narrow-prefill": one_class(3)}


def drafters_for(target, k):
    """Every scripted drafter that fits a width of *k*, by name."""
    right, vocab = target.greedy, target.identity.vocab_size
    made = {
        "oracle": OracleDrafter(right, vocab),
        "zero": ZeroDrafter(right, vocab),
        "random": RandomDrafter(vocab, seed=k),
        "liar": LiarDrafter(vocab),
        "mixed": PatternDrafter(right, vocab, ["RRRW", "", "R", "RRRRRRRR", "WWWWWWWW"]),
    }
    return made | {f"wrong-at-{j}": AdversarialDrafter(right, vocab, wrong_at=j) for j in range(k)}


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
@pytest.mark.parametrize(("capacity", "snapshots"), WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7, 8, 15])
def test_every_drafter_at_every_width_and_window(make_lab, k, capacity, snapshots, profile):
    """Ids, text and finish reason equal plain decoding for each drafter, width, memory and width class."""
    target = ScriptedTarget(VOCAB, rollback_capacity=capacity, snapshots=snapshots, profile=profile)
    lab = make_lab(target, drafters_for(target, k), draft_max=k)
    for spec in lab.strategies:
        request = GenerationRequest(PROMPT, max_tokens=30, spec=spec)
        [result] = lab.run(request)
        lab.check_same(request, result)


def test_oracle_needs_one_pass_a_block(make_lab):
    """An always right drafter of width 7 brings 8 tokens a pass, so speculation does take place."""
    target = ScriptedTarget(VOCAB)
    lab = make_lab(target, {"oracle": OracleDrafter(target.greedy, VOCAB)}, draft_max=7)
    [result] = lab.run(GenerationRequest(PROMPT, max_tokens=33, spec="oracle"))
    # The prompt's pass chooses the first token; then 32 tokens at 8 a pass.
    assert (result.counts.target_passes, result.counts.accepted) == (1 + 4, 28)
    assert result.origins[1:9] == (Origin.ACCEPTED,) * 7 + (Origin.BONUS,)


@pytest.mark.parametrize("prompt", [(1, 1, 1), (0,), (23,), (5, 6)], ids=str)
def test_tiny_prompts(make_lab, prompt):
    """The first proposed token is compared with the target's own choice, even after one prompt token (case 2)."""
    target = ScriptedTarget(VOCAB, seed=2)
    drafters = {"oracle": OracleDrafter(target.greedy, VOCAB), "wrong": ZeroDrafter(target.greedy, VOCAB)}
    lab = make_lab(target, drafters, draft_max=1)
    for spec in (*drafters, "off"):
        request = GenerationRequest(prompt, max_tokens=32, spec=spec)
        lab.check_same(request, *lab.run(request))


def test_empty_prompt_is_refused_and_the_next_request_served(make_lab):
    """An empty prompt is one clear error at submission; the engine goes on (case 2)."""
    lab = make_lab(ScriptedTarget(VOCAB))
    with pytest.raises(RequestError, match="the prompt is empty"):
        lab.submit(GenerationRequest(()))
    request = GenerationRequest(PROMPT, max_tokens=8)
    lab.check_same(request, *lab.run(request))


@pytest.mark.parametrize("draft_max", [0, 1])
def test_draft_max_of_a_request(make_lab, draft_max):
    """A request's own width holds: 0 drafts nothing, 1 drafts single tokens."""
    target = ScriptedTarget(VOCAB)
    lab = make_lab(target, {"oracle": OracleDrafter(target.greedy, VOCAB)}, draft_max=8)
    request = GenerationRequest(PROMPT, max_tokens=9, spec="oracle", draft_max=draft_max)
    [result] = lab.run(request)
    lab.check_same(request, result)
    assert result.counts.drafted == 4 * draft_max


@pytest.mark.parametrize("lie", lies_about(VOCAB), ids=lambda lie: str(lie[:2]))
def test_each_lie_after_a_right_token_costs_only_speed(make_lab, lie):
    """What is no token id ends the proposal there and is counted; the target never sees it (case 16d)."""
    target = ScriptedTarget(VOCAB)

    def propose(tokens, wanted, round_):
        right = OracleDrafter(target.greedy, VOCAB).proposal(tokens, 1, round_)
        return type(right)([*right.token_ids, *lie])

    lab = make_lab(target, {"liar": ScriptedDrafter(propose)}, draft_max=4)
    request = GenerationRequest(PROMPT, max_tokens=20, spec="liar")
    [result] = lab.run(request)
    lab.check_same(request, result)
    assert result.counts.dropped > 0
    assert result.counts.accepted > 0


@pytest.mark.parametrize("answer", [None, 7, [[1, 2]], "abc"], ids=str)
def test_an_answer_that_is_no_proposal_fails_its_request_alone(make_lab, answer):
    """A drafter that returns nonsense ends its own request with an error that names it."""
    target = ScriptedTarget(VOCAB)
    lab = make_lab(target, {"broken": ScriptedDrafter(lambda *_: answer)}, parallel=2)
    request = GenerationRequest(PROMPT, max_tokens=12)
    broken, healthy = lab.run(request.with_(spec="broken"), request)
    assert broken.finish_reason is FinishReason.ERROR
    assert isinstance(broken.error, DrafterError)
    assert "broken" in str(broken.error)
    lab.check_same(request, healthy)


def test_hidden_rows_reach_a_drafter_that_asks_for_them(make_lab):
    """Every committed token's row arrives exactly once, prompt included, and can be read when it does."""
    target = ScriptedTarget(VOCAB)
    reading = OracleDrafter(target.greedy, VOCAB, hidden_layers=[1, 3])
    lab = make_lab(target, {"reading": reading}, draft_max=3, prefill_chunk=2)
    request = GenerationRequest(PROMPT, max_tokens=20, spec="reading")
    lab.check_same(request, *lab.run(request))
    assert reading.faults.calls["observe"] > 0
    # The last token was never evaluated; every one before it was.
    assert target.faults.calls["rows.hidden"] == 2 * (len(PROMPT) + 20 - 1)
