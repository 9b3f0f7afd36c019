"""Log-probabilities of proposed tokens are those of the raw target row, one entry a token (case 14)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cases.lab import COPY, draft_with, fields_of, oracle
from parity.reference import RawLoop
from power_core.engine import Engine
from power_core.request import GenerationRequest, Result
from power_core.testing import AdversarialDrafter, recorded

pytestmark = pytest.mark.model
CAPITAL = "The capital of France is"
TOP = 3


def check_entries(raw: RawLoop, result: Result) -> None:
    """Each entry against the log-softmax of the raw loop, which evaluates one token at a time."""
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    assert any(entry.logprob < -1e-3 for entry in result.logprobs)
    row = raw.logits(result.prompt_token_ids)
    for n, entry in enumerate(result.logprobs):
        exact = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
        assert abs(entry.logprob - exact[entry.token_id]) < 1e-3
        best = np.argsort(-exact, kind="stable")[:TOP]
        assert [token for token, _ in entry.top] == best.tolist()
        assert np.abs([value - exact[token] for token, value in entry.top]).max() < 1e-3
        row = raw.decode([entry.token_id], len(result.prompt_token_ids) + n)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("prompt", [CAPITAL, COPY], ids=["capital", "copy"])
def test_entries_are_the_raw_rows(engine: Engine, raw: RawLoop, prompt: str, sampling: dict[str, Any]) -> None:
    """The same under every drafter, right or wrong, and in the stream as in the result."""
    request = engine.request(prompt, max_tokens=16, logprobs=TOP, **sampling)
    off = engine.complete(request)
    check_entries(raw, off)
    ids = recorded((*off.prompt_token_ids, *off.token_ids))
    wrong = AdversarialDrafter(ids, engine.model.tokenizer.vocab_size, wrong_at=2)
    for drafter in (oracle(engine, off), wrong):
        assert fields_of(draft_with(engine, drafter, request, 4)) == fields_of(off)
    for spec in ("suffix", "ngram-map-k4v"):
        check_stream(engine, request.with_(spec=spec), off)


def check_stream(engine: Engine, request: GenerationRequest, off: Result) -> None:
    events = list(engine.generate(request))
    assert tuple(event.logprobs for event in events[:-1]) == off.logprobs
    result = events[-1].result
    assert result is not None
    assert fields_of(result) == fields_of(off)


def test_the_command_line_reports_them(power: Any) -> None:
    """`--logprobs N --json` has an entry a token; a number out of range is refused by name."""
    args = ("generate", "--raw", CAPITAL, "--max-tokens", 5, "--logprobs")
    found = json.loads(power(*args, 2, "--json").stdout)
    assert len(found["logprobs"]) == len(found["token_ids"]) == 5
    refused = power(*args, -1, "--json")
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "logprobs" in refused.stderr
