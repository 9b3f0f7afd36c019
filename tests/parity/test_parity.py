"""ids(strategy) == ids(off) == ids of an independent one-token loop, on SmolLM2."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from parity.conftest import MAX_TOKENS, STRATEGIES, WIDTHS, assert_same
from parity.prompts import PROMPTS, ParityPrompt
from parity.reference import RawLoop, raw_loop
from power_core.engine import Engine
from power_core.request import GenerationRequest, Result, SamplingSpec
from power_core.scheduler.drafting import OpenDraft
from power_core.scheduler.loop import StepLoop
from power_core.scheduler.widths import make_policy
from power_core.testing import AdversarialDrafter, LiarDrafter, OracleDrafter, RandomDrafter, ZeroDrafter, recorded
from power_core.types import FinishReason

pytestmark = pytest.mark.model
PromptIds = Callable[[ParityPrompt], tuple[int, ...]]
Plain = Callable[[ParityPrompt], Result]
GRID = [(strategy, width) for strategy in STRATEGIES for width in WIDTHS]


@pytest.fixture(scope="module")
def raw(engine: Engine) -> Iterator[RawLoop]:
    loop = raw_loop(engine)
    yield loop
    loop.close()


def spread(index: int, count: int) -> list[tuple[str, int]]:
    """*count* cells of the grid for prompt *index*; over the suite every cell is used."""
    return [GRID[(index * 7 + j * 11) % len(GRID)] for j in range(count)]


def test_the_spread_covers_every_strategy_and_width() -> None:
    """The subset that runs by default leaves no strategy x K out."""
    assert {cell for index in range(len(PROMPTS)) for cell in spread(index, 3)} == set(GRID)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: p.name)
def test_off_equals_the_raw_loop(prompt: ParityPrompt, raw: RawLoop, plain: Plain, prompt_ids: PromptIds) -> None:
    """Plain decoding is what llama.cpp alone gives, one token at a time."""
    assert list(plain(prompt).token_ids) == raw.generate(prompt_ids(prompt), MAX_TOKENS)


@pytest.mark.parametrize(("index", "prompt"), list(enumerate(PROMPTS)), ids=lambda p: getattr(p, "name", ""))
def test_strategies_equal_off(
    index: int, prompt: ParityPrompt, engine: Engine, plain: Plain, prompt_ids: PromptIds
) -> None:
    """A drafter changes the speed of a request, never its tokens."""
    for strategy, width in spread(index, 3):
        result = engine.complete(prompt_ids(prompt), spec=strategy, draft_max=width, max_tokens=MAX_TOKENS)
        assert_same(result, plain(prompt))
        assert result.counts.target_passes <= len(result.token_ids) + result.counts.prefill_passes + 1


# -- width policies -----------------------------------------------------------------------------

POLICY_PROMPTS = tuple(p for p in PROMPTS if p.name in ("prose-science", "copy-items", "chat-python"))


@pytest.fixture(params=["cost-aware", "adaptive"])
def policy(request: pytest.FixtureRequest, engine: Engine) -> Iterator[str]:
    """The engine under another policy than `fixed`."""
    before = engine.loop.policy
    engine.loop.policy = make_policy(request.param, engine.loop.costs)
    yield request.param
    engine.loop.policy = before


@pytest.mark.parametrize("prompt", POLICY_PROMPTS, ids=lambda p: p.name)
def test_policies_equal_off(
    policy: str, prompt: ParityPrompt, engine: Engine, plain: Plain, prompt_ids: PromptIds
) -> None:
    """Lengths that follow the clock, and chains of strategies, change no token either."""
    for strategy in ("suffix", "suffix,prompt-lookup"):
        result = engine.complete(prompt_ids(prompt), spec=strategy, max_tokens=MAX_TOKENS)
        assert_same(result, plain(prompt))
        assert result.receipt["body"]["policy"]["name"] == policy


@pytest.mark.parametrize("policy", ["cost-aware"], indirect=True)
def test_rows_shared_by_expected_gain_equal_solo_runs(
    policy: str, engine: Engine, plain: Plain, prompt_ids: PromptIds
) -> None:
    """Three requests that compete for the rows of a step have the tokens they have alone."""
    requests = [
        GenerationRequest(prompt_ids(prompt), spec="suffix", max_tokens=MAX_TOKENS) for prompt in POLICY_PROMPTS
    ]
    for prompt, result in zip(POLICY_PROMPTS, engine.generate_many(requests), strict=True):
        assert_same(result, plain(prompt))


# -- drafters that are right, wrong or lying on purpose ------------------------------------------

SCRIPTED_PROMPTS = tuple(p for p in PROMPTS if p.name in ("prose-science", "code-class", "unicode-cjk"))
SCRIPTED_TOKENS = 40


def scripted_drafters(reference: Any, vocab_size: int, width: int) -> dict[str, Any]:
    """Each scripted drafter by name, for proposals of *width*."""
    wrong = {f"wrong-at-{j}": AdversarialDrafter(reference, vocab_size, wrong_at=j) for j in range(width)}
    return {
        "oracle": OracleDrafter(reference, vocab_size),
        "zero": ZeroDrafter(reference, vocab_size),
        "random": RandomDrafter(vocab_size, seed=width),
        "liar": LiarDrafter(vocab_size),
        **wrong,
    }


@pytest.mark.parametrize("prompt", SCRIPTED_PROMPTS, ids=lambda p: p.name)
@pytest.mark.parametrize("width", [1, 4, 8, 15])
def test_scripted_drafters_equal_off(
    prompt: ParityPrompt, width: int, engine: Engine, plain: Plain, prompt_ids: PromptIds
) -> None:
    """Whatever is proposed, at whatever position it goes wrong, the target's tokens come out."""
    ids = prompt_ids(prompt)
    expected = plain(prompt).token_ids[:SCRIPTED_TOKENS]
    reference = recorded(ids + plain(prompt).token_ids)
    for name, drafter in scripted_drafters(reference, engine.model.tokenizer.vocab_size, width).items():
        loop = StepLoop(
            engine.session, engine.model.tokenizer, draft_max=width,
            open_strategy=lambda name, drafter=drafter: OpenDraft(name, drafter.open(engine.model, engine.session)),
        )  # fmt: skip
        loop.submit(GenerationRequest(ids, max_tokens=SCRIPTED_TOKENS, spec="scripted"))
        result = run(loop)
        assert result.token_ids == expected, name
        drafter.assert_all_ended()
        if name == "oracle":
            rounds = -(-len(expected) // (width + 1))
            assert result.counts.target_passes - result.counts.prefill_passes <= rounds + 1


def run(loop: StepLoop) -> Result:
    """Step the only request of *loop* to its end."""
    while loop.active:
        for event in loop.step():
            if event.result is not None:
                assert event.result.error is None, event.result.error
                return event.result
    raise AssertionError("no result")


# -- everything that a request can ask for -------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def forbid_at_even_positions(token: int) -> Any:
    """A user's processor: *token* may not stand at an even position of the sequence."""

    def process(tokens: Any, logits: Any) -> None:
        if len(tokens) % 2 == 0:
            logits[token] = -np.inf

    return process


VARIANTS: dict[str, dict[str, Any]] = {
    "seeded": {"sampling": SamplingSpec(temperature=0.9, top_k=50, top_p=0.95, min_p=0.02, seed=7)},
    "hot": {"sampling": SamplingSpec(temperature=1.5, seed=11)},
    "typical": {"sampling": SamplingSpec(temperature=0.7, typical_p=0.9, seed=3)},
    "penalties": {"sampling": SamplingSpec(repeat_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2)},
    "bias": {"sampling": SamplingSpec(logit_bias={28: -100.0, 198: 2.5})},
    "processor": {"sampling": SamplingSpec(processors=(forbid_at_even_positions(198),))},
    "stops": {"stop": ("gamma\nalpha\nb", "return", "the s"), "max_tokens": 96},
    "logprobs": {"sampling": SamplingSpec(logprobs=3)},
    "seeded-logprobs": {"sampling": SamplingSpec(temperature=0.8, seed=5, logprobs=2)},
    "json": {"sampling": SamplingSpec(json_schema=json.dumps(SCHEMA))},
    "seeded-json": {"sampling": SamplingSpec(json_schema=json.dumps(SCHEMA), temperature=1.0, seed=2)},
    "regex": {"sampling": SamplingSpec(regex=r"(yes|no)( (yes|no)){3,20}")},
}
VARIANT_PROMPTS = {p.name: p for p in PROMPTS if p.name in ("copy-words", "code-merge", "chat-rewrite")}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("prompt", list(VARIANT_PROMPTS.values()), ids=lambda p: p.name)
def test_every_kind_of_sampling_equals_off(
    name: str, prompt: ParityPrompt, engine: Engine, prompt_ids: PromptIds
) -> None:
    """Samplers, penalties, stops, log-probabilities and grammars see only what the target chose."""
    request = GenerationRequest(prompt_ids(prompt), **{"max_tokens": 64, **VARIANTS[name]})
    expected = engine.complete(request.with_(spec="off"))
    for strategy, width in (("suffix", 8), ("prompt-lookup", 4), ("ngram-mod", 15)):
        assert_same(engine.complete(request.with_(spec=strategy, draft_max=width)), expected)
    if "json" in name and expected.finish_reason is FinishReason.STOP:
        assert set(json.loads(expected.text)) == {"name", "age"}


def test_four_requests_in_one_batch_equal_their_solo_runs(engine: Engine, prompt_ids: PromptIds) -> None:
    """Strategies, samplers, limits and stops of one request are invisible to those beside it."""
    kinds = [
        ("code-merge", {"spec": "suffix", "draft_max": 7}),
        ("copy-words", {"spec": "prompt-lookup", "draft_max": 4, "stop": ("gamma\nalpha beta gamma\nalpha beta ga",)}),
        ("chat-poem", {"spec": "ngram-mod", "draft_max": 3, **VARIANTS["seeded"], "max_tokens": 50}),
        ("prose-history", {"spec": "off", **VARIANTS["penalties"], "max_tokens": 70}),
        ("unicode-emoji", {"spec": "ngram-map-k4v", "draft_max": 8, **VARIANTS["logprobs"], "max_tokens": 30}),
        ("code-json", {"spec": "ngram-context", "draft_max": 2, **VARIANTS["json"]}),
    ]
    by_name = {p.name: p for p in PROMPTS}
    requests = [GenerationRequest(prompt_ids(by_name[n]), **{"max_tokens": 64, **fields}) for n, fields in kinds]
    alone = [engine.complete(request) for request in requests]
    together = engine.generate_many(requests)
    for result, expected in zip(together, alone, strict=True):
        assert_same(result, expected)
    assert any(width > 8 for result in together for width in result.counts.widths)
