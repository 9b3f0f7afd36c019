"""Samplers, processors and logprobs see emitted tokens only, each once, whatever was proposed (R2)."""

import json
from collections import Counter

import numpy as np
import pytest

from power_core.request import GenerationRequest, SamplingSpec
from power_core.testing import (
    OracleDrafter,
    PatternDrafter,
    RandomDrafter,
    ScriptedTarget,
    ScriptedTokenizer,
    plain_decode,
    recorded,
)
from power_core.types import FinishReason

VOCAB = 24
PROMPT = (3, 1, 4, 1, 5)
SPECS = {
    "greedy": SamplingSpec(),
    "temperature": SamplingSpec(temperature=1.0, seed=7),
    "top-k": SamplingSpec(temperature=1.5, top_k=5, seed=1),
    "top-p": SamplingSpec(temperature=0.8, top_p=0.8, seed=-3),
    "min-p": SamplingSpec(temperature=1.0, min_p=0.2, seed=2**70),
    "typical": SamplingSpec(temperature=1.0, typical_p=0.6, seed=4),
    "repeat": SamplingSpec(repeat_penalty=1.7, penalty_window=6),
    "presence": SamplingSpec(presence_penalty=1.5, penalty_window=-1),
    "frequency": SamplingSpec(frequency_penalty=0.9, penalty_window=3, temperature=0.7, seed=11),
    "bias": SamplingSpec(logit_bias={2: -100.0, 9: 1.5}),
    "all": SamplingSpec(
        temperature=0.9, top_k=12, top_p=0.95, min_p=0.01, typical_p=0.98, repeat_penalty=1.2, presence_penalty=0.1,
        frequency_penalty=0.2, logit_bias={1: 0.5}, seed=3, logprobs=3,
    ),
}  # fmt: skip


def strategies_for(target, text):
    """Drafters that know the sampled *text*, and two that do not."""
    right = recorded((*PROMPT, *text))
    return {
        "oracle": OracleDrafter(right, VOCAB),
        "mixed": PatternDrafter(right, VOCAB, ["RRRW", "", "R", "RRRRRRRR", "WWWW"]),
        "greedy": OracleDrafter(target.greedy, VOCAB),
        "random": RandomDrafter(VOCAB),
    }


@pytest.mark.parametrize("capacity", [None, 1])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("sampling", SPECS.values(), ids=SPECS)
def test_seeded_stream_is_the_same_with_and_without_speculation(make_lab, sampling, k, capacity):
    """Every sampler gives the ids that choosing token by token from scratch gives."""
    target = ScriptedTarget(VOCAB, rollback_capacity=capacity)
    request = GenerationRequest(PROMPT, max_tokens=40, sampling=sampling)
    lab = make_lab(target, strategies_for(target, plain_decode(target, request).token_ids), draft_max=k)
    for spec in (*lab.strategies, "off"):
        [result] = lab.run(request.with_(spec=spec))
        lab.check_same(request, result)
        assert spec != "oracle" or result.counts.accepted == result.counts.drafted > 0


class Recorder:
    """A processor with state: forbids token 2 at even output positions and keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, tokens, logits):
        self.calls.append(tuple(tokens))
        if (len(tokens) - len(PROMPT)) % 2 == 0:
            logits[2] = -np.inf

    def checkpoint(self):
        return len(self.calls)

    def restore(self, checkpoint):
        del self.calls[checkpoint:]


@pytest.mark.parametrize("capacity", [None, 0])
def test_a_processor_is_called_once_per_token_with_the_true_prefix(make_lab, capacity):
    """One call an emitted token, in order, with prompt and output so far; never for a rejected token (case 12)."""
    target = ScriptedTarget(VOCAB, logits=lambda tokens: np.eye(VOCAB)[2], rollback_capacity=capacity)
    recorder = Recorder()
    request = GenerationRequest(PROMPT, max_tokens=20, sampling=SamplingSpec(processors=(recorder,)))
    text = plain_decode(target, request).token_ids
    assert set(text[::2]) == {0}
    assert set(text[1::2]) == {2}
    lab = make_lab(target, strategies_for(target, text), draft_max=6)
    for spec in (*lab.strategies, "off"):
        recorder.calls.clear()
        [result] = lab.run(request.with_(spec=spec))
        assert result.token_ids == text
        assert recorder.calls == [(*PROMPT, *text[:i]) for i in range(20)]


def test_logprobs_belong_to_their_tokens(make_lab):
    """One entry a token from the raw row, chosen token included, cut with the ids at a stop (cases 5, 14)."""
    target = ScriptedTarget(VOCAB)
    sampling = SamplingSpec(temperature=0.8, seed=9, logprobs=2, repeat_penalty=1.3)
    request = GenerationRequest(PROMPT, max_tokens=30, sampling=sampling)
    text = plain_decode(target, request)
    stopped = request.with_(stop=(text.text[12:15],))
    lab = make_lab(target, strategies_for(target, text.token_ids), draft_max=8)
    for spec in (*lab.strategies, "off"):
        for wanted in (request, stopped):
            [result] = lab.run(wanted.with_(spec=spec))
            lab.check_same(wanted, result)
            assert len(result.logprobs) == len(result.token_ids)
            for i, entry in enumerate(result.logprobs):
                row = target.logits((*PROMPT, *result.token_ids[:i])).astype(np.float64)
                expected = row - np.log(np.exp(row).sum())
                assert entry.token_id == result.token_ids[i]
                assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
                assert [token for token, _ in entry.top[:2]] == list(np.argsort(-row)[:2])
    assert [event.logprobs for event in lab.events if event.token_id is not None][-1] is not None


@pytest.mark.parametrize("spec", ["off", "greedy", "random"])
def test_sampled_tokens_are_distributed_as_the_target_says(make_lab, spec):
    """Over 3,000 seeds the first two tokens occur as often as their probability says: chi-squared below 99.9 %."""
    target = ScriptedTarget(4, spread=1.0, seed=1)
    drafters = {"greedy": OracleDrafter(target.greedy, 4), "random": RandomDrafter(4)}
    lab = make_lab(target, drafters, parallel=8, draft_max=2, max_rows=32)
    requests = [
        GenerationRequest((0, 1), max_tokens=2, spec=spec, sampling=SamplingSpec(temperature=1.0, seed=seed))
        for seed in range(3_000)
    ]
    parts = (requests[start : start + 1_000] for start in range(0, 3_000, 1_000))  # a queue's worth at a time
    seen = Counter(result.token_ids for part in parts for result in lab.run(*part))
    first = _softmax(target.logits((0, 1)))
    chi_squared = 0.0
    for a in range(4):
        second = _softmax(target.logits((0, 1, a)))
        for b in range(4):
            expected = 3_000 * first[a] * second[b]
            chi_squared += (seen[a, b] - expected) ** 2 / expected
    assert chi_squared < 37.7  # 15 degrees of freedom


def _softmax(row):
    weights = np.exp(row.astype(np.float64))
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_not_moved_by_rejected_tokens(make_lab, temperature):
    """With a schema, ids equal `off`, the answer parses, and the grammar's end ends the request (case 13)."""
    characters = [bytes([byte]) for byte in range(32, 127)]
    tokenizer = ScriptedTokenizer([*characters, b"</s>"], end_ids={95}, special_ids={95}, eos_id=95)
    target = ScriptedTarget(tokenizer=tokenizer, seed=3, rollback_capacity=2)
    schema = {
        "type": "object", "properties": {"ok": {"type": "boolean"}, "age": {"type": "integer", "maximum": 99}},
        "required": ["ok", "age"], "additionalProperties": False,
    }  # fmt: skip
    sampling = SamplingSpec(json_schema=schema, temperature=temperature, seed=5)
    request = GenerationRequest(tuple(tokenizer.encode("say ")), max_tokens=200, sampling=sampling)
    plain = make_lab(target)
    [off] = plain.run(request)
    assert off.finish_reason is FinishReason.STOP
    assert set(json.loads(off.text)) == {"ok", "age"}
    right = recorded((*request.prompt, *off.token_ids))
    drafters = {
        "oracle": OracleDrafter(right, 96),
        "mixed": PatternDrafter(right, 96, ["RRRW", "", "R", "WWWW"]),
        "random": RandomDrafter(96),
    }
    lab = make_lab(target, drafters, draft_max=5)
    for spec in drafters:
        [result] = lab.run(request.with_(spec=spec))
        assert (result.token_ids, result.text, result.finish_reason) == (off.token_ids, off.text, off.finish_reason)
