"""Bias, filters and users' processors hold for proposed tokens too (case 12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cases.lab import COPY, draft_all, draft_with, fields_of, oracle
from parity.reference import RawLoop
from power_core.engine import Engine
from power_core.request import Result

pytestmark = pytest.mark.model
STRATEGIES = ("suffix", "prompt-lookup", "ngram-mod")


def test_a_forbidden_token_never_comes(engine: Engine, copied: Result) -> None:
    """Every draft proposes it; a bias of -100 holds at every position of a block."""
    [beta] = engine.encode(" beta")
    assert beta in copied.token_ids
    request = engine.request(COPY, max_tokens=32, logit_bias={beta: -100})
    off = engine.complete(request)
    assert beta not in off.token_ids
    drafted = [engine.complete(request.with_(spec=spec, draft_max=8)) for spec in STRATEGIES]
    drafted.append(draft_with(engine, oracle(engine, copied), request, 8))
    assert [fields_of(result) for result in drafted] == [fields_of(off)] * len(drafted)
    assert all(result.counts.drafted for result in drafted)


def test_a_forced_token_is_all_there_is(engine: Engine) -> None:
    """A bias of +100 for a rare token leaves nothing else, also once drafts propose it."""
    [rare] = engine.encode("嗜")[:1]
    for spec in ("off", *STRATEGIES):
        result = engine.complete(COPY, max_tokens=16, spec=spec, logit_bias={rare: 100})
        assert set(result.token_ids) == {rare}


class NotAtEven:
    """Forbids a token at even positions, and writes down what it was shown."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, tokens: Sequence[int], logits: Any) -> None:
        self.seen.append(tuple(tokens))
        if len(tokens) % 2 == 0:
            logits[self.token] = -np.inf


def test_a_processor_sees_every_emitted_token_once(engine: Engine, copied: Result) -> None:
    """Called once per emitted token, with the true prefix, and never for what was rejected."""
    [beta] = engine.encode(" beta")
    answers = []
    for spec in ("off", *STRATEGIES, "oracle"):
        hook = NotAtEven(beta)
        request = engine.request(COPY, max_tokens=32, processors=[hook], draft_max=8)
        if spec == "oracle":
            result = draft_with(engine, oracle(engine, copied), request, 8)
        else:
            result = engine.complete(request.with_(spec=spec))
        text = (*result.prompt_token_ids, *result.token_ids)
        assert hook.seen == [text[:n] for n in range(len(result.prompt_token_ids), len(text))]
        positions = [n for n in range(len(result.prompt_token_ids), len(text)) if text[n] == beta]
        assert all(n % 2 for n in positions)
        answers.append(fields_of(result))
    assert answers == [answers[0]] * len(answers)


def test_min_p_holds_at_every_position(engine: Engine, raw: RawLoop) -> None:
    """
    200 seeds at temperature 1: each emitted token has at least a fifth of the largest raw probability.

    The drafter proposes the greedy text, so that many tokens are accepted ones. The probabilities are
    those of the raw loop.
    """
    prompt = engine.encode("My favourite animal is the")
    greedy = engine.complete(prompt, max_tokens=4)
    requests = [engine.request(prompt, max_tokens=3, temperature=1.0, min_p=0.2, seed=seed) for seed in range(200)]
    drafted = draft_all(engine, oracle(engine, greedy), requests, 3)
    plain = engine.generate_many([request.with_(spec="off") for request in requests[:24]])
    assert [fields_of(result) for result in drafted[:24]] == [fields_of(result) for result in plain]
    assert sum(result.counts.accepted for result in drafted) > 10
    legal: dict[tuple[int, ...], Any] = {}
    for number, result in enumerate(drafted):
        for n in range(3 if number < 24 else 2):
            before = result.token_ids[:n]
            if before not in legal:
                row = raw.logits([*prompt, *before])
                legal[before] = row >= row.max() + np.log(0.2) - 1e-6
            assert legal[before][result.token_ids[n]]
    assert len({result.token_ids for result in drafted}) > 5
