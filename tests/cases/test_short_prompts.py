"""Tiny prompts: the first proposed token is checked like any other, and an empty prompt harms nobody (case 2)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from power_ngram.config import NgramContextConfig, PromptLookupConfig
from power_ngram.drafter import HistoryDrafter

from cases.lab import draft_with, fields_of, oracle
from parity.reference import RawLoop
from power_core.engine import Engine
from power_core.errors import ConfigError, RequestError
from power_core.testing import AdversarialDrafter, recorded

pytestmark = pytest.mark.model
BOS = 1
WORDS = (0, 2, 17, 28, 198, 260, 504, 7042, 30324, 49151)


@pytest.mark.parametrize("prompt", [(1, 1, 1), (BOS,), (28, 28), *((word,) for word in WORDS)], ids=str)
def test_prompts_shorter_than_any_ngram(engine: Engine, raw: RawLoop, prompt: tuple[int, ...]) -> None:
    """ids == off == the raw loop, for lookups of 1 to 4 tokens, a right first token and a wrong one."""
    request = engine.request(prompt, max_tokens=32 if prompt == (1, 1, 1) else 12)
    off = engine.complete(request)
    assert list(off.token_ids) == raw.generate(prompt, request.max_tokens or 0)
    ids = recorded(prompt + off.token_ids)
    drafters: dict[str, Any] = {
        "oracle": oracle(engine, off),
        "wrong": AdversarialDrafter(ids, engine.model.tokenizer.vocab_size, wrong_at=0),
    }
    for n in (1, 2, 4):
        drafters[f"lookup-{n}"] = HistoryDrafter(PromptLookupConfig(n_max=n, n_min=1))
    drafters["context-3"] = HistoryDrafter(NgramContextConfig(n_max=3, n_min=1))
    for name, drafter in drafters.items():
        result = draft_with(engine, drafter, request, draft_max=1)
        assert fields_of(result) == fields_of(off), name


@pytest.mark.parametrize("draft_max", [0, 1])
def test_widths_of_nothing_and_one(engine: Engine, draft_max: int) -> None:
    """K = 0 proposes nothing, K = 1 single tokens; both are plain decoding."""
    request = engine.request("ha ha ha ha ha ha ha", max_tokens=12)
    off = engine.complete(request)
    for spec in ("suffix", "prompt-lookup", "ngram-mod", "ngram-map-k4v", "ngram-context"):
        result = engine.complete(request.with_(spec=spec, draft_max=draft_max))
        assert fields_of(result) == fields_of(off)
        assert result.counts.drafted <= draft_max * result.counts.rounds


@pytest.mark.parametrize("bounds", [{"n_min": 5, "n_max": 2}, {"n_max": 0}, {"n_min": -1}], ids=str)
def test_bounds_that_leave_no_length(bounds: dict[str, int]) -> None:
    """A smallest length above the largest is refused by name, not met as an index error."""
    with pytest.raises(ConfigError, match="n_m"):
        PromptLookupConfig(**bounds)


def test_an_empty_text_starts_at_bos(engine: Engine, raw: RawLoop, undisturbed: None) -> None:
    """No text is the begin-of-sequence id alone; no ids at all are an error at once."""
    result = engine.complete("", max_tokens=12)
    assert result.prompt_token_ids == (BOS,)
    assert list(result.token_ids) == raw.generate([BOS], 12)
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.complete([], max_tokens=12)


@pytest.mark.parametrize("args", [["--raw", ""], ["--chat", ""], ["--raw", "a"]], ids=str)
def test_the_command_line_takes_an_empty_prompt(power: Any, args: list[str]) -> None:
    """Exit code 0 and an answer, with and without a template."""
    result = power("generate", *args, "--max-tokens", 2, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["usage"]["completion_tokens"] == 2
