"""Token limits and the end of the context: as many tokens as asked for, whatever is proposed (cases 7 and 8)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cases.lab import COPY, draft_with, fields_of, oracle
from parity.reference import RawLoop
from power_core.engine import Engine
from power_core.errors import RequestError
from power_core.request import Result
from power_core.testing import ZeroDrafter, recorded
from power_core.types import FinishReason

pytestmark = pytest.mark.model


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9])
def test_exactly_as_many_tokens_as_asked_for(engine: Engine, copied: Result, limit: int) -> None:
    """Every count agrees, and the last block is shortened rather than computed and thrown away."""
    for spec, k in (("suffix", 1), ("prompt-lookup", 3), ("suffix", 8), ("prompt-lookup", 32)):
        result = engine.complete(COPY, max_tokens=limit, spec=spec, draft_max=k, logprobs=0)
        assert result.token_ids == copied.token_ids[:limit]
        assert result.finish_reason is FinishReason.LENGTH
        assert result.usage.completion_tokens == limit == len(result.logprobs or ())
        assert result.counts.drafted <= max(limit - 1, 0)


def test_no_limit_is_the_end_of_the_context(narrow: Engine) -> None:
    """None asks for all there is room for; the loop does not fall over an empty proposal at the end."""
    request = narrow.request("one two one two one two", max_tokens=None)
    off = narrow.complete(request)
    assert len(off.prompt_token_ids) + len(off.token_ids) == 65 or off.finish_reason is FinishReason.STOP
    for k in (1, 8, 32):
        assert fields_of(narrow.complete(request.with_(spec="suffix", draft_max=k))) == fields_of(off)


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (2, 2), (-1, None)])
def test_limits_on_the_command_line(power: Any, narrow: Engine, limit: int, expected: int | None) -> None:
    """`--max-tokens` 0 is an empty answer and -1 none at all; -2 is bad input."""
    prompt = "one two one two one two"
    plain = narrow.complete(prompt, max_tokens=None if limit < 0 else limit)
    result = power("generate", "--raw", prompt, "--max-tokens", limit, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["token_ids"], found["text"]) == (list(plain.token_ids), plain.text)
    assert expected is None or len(found["token_ids"]) == expected
    refused = power("generate", "--raw", prompt, "--max-tokens", -2)
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("length", [48, 60, 63, 64, *(pytest.param(n, marks=pytest.mark.slow) for n in (40, 56, 62))])
def test_drafts_over_the_end_of_the_context(narrow: Engine, raw: RawLoop, length: int) -> None:
    """The last legal token is emitted and none is missing for want of room to draft: ids == off == raw loop."""
    hello = narrow.encode("Hello " * 70)[:length]
    request = narrow.request(hello, max_tokens=100)
    off = narrow.complete(request)
    assert list(off.token_ids) == raw.generate(hello, 65 - length)
    assert off.finish_reason is FinishReason.LENGTH
    following = recorded((*hello, *off.token_ids))
    zero = ZeroDrafter(following, narrow.model.tokenizer.vocab_size)
    for k in (4, 16, 64, 256):
        drafted = [draft_with(narrow, oracle(narrow, off, after=[28] * 300), request, k)]
        if k in (4, 256):
            drafted.append(narrow.complete(request.with_(spec="suffix", draft_max=k)))
            drafted.append(draft_with(narrow, zero, request, k))
        for result in drafted:
            assert fields_of(result) == fields_of(off)
            assert result.counts.target_passes <= off.counts.target_passes


def test_a_prompt_longer_than_the_context(narrow: Engine) -> None:
    """One position too many is one error, the same under every strategy; a short request then works."""
    messages = set()
    for spec in ("off", "suffix", "ngram-mod"):
        with pytest.raises(RequestError, match="65 tokens") as caught:
            narrow.complete([28] * 65, max_tokens=100, spec=spec)
        messages.add(str(caught.value))
        assert len(narrow.complete([28] * 5, max_tokens=2, spec=spec).token_ids) == 2
    assert len(messages) == 1
