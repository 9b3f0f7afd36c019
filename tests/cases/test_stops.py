"""Stop strings around blocks: found early, nothing kept past them, nothing shown too soon or out of order (case 5)."""

from __future__ import annotations

import pytest

from cases.lab import COPY, draft_with, fields_of, oracle
from power_core.engine import Engine
from power_core.request import GenerationRequest, Result
from power_core.types import FinishReason, Origin

pytestmark = pytest.mark.model
ALPHABET = "Here is the English alphabet: ABC"


@pytest.fixture(scope="module")
def letters(engine: Engine) -> Result:
    """Plain tokens after the start of the alphabet."""
    return engine.complete(ALPHABET, max_tokens=24)


def streamed(engine: Engine, request: GenerationRequest) -> Result:
    """The result, after checking its stream: text is only ever added, and none of it is taken back."""
    events = list(engine.generate(request))
    result = events[-1].result
    assert result is not None
    shown = ""
    for event in events:
        shown += event.text
        assert result.text.startswith(shown)
    assert shown == result.text
    assert [e.origin for e in events[:-1]] == list(result.origins)
    assert events[-1].origin is Origin.END
    assert tuple(event.token_id for event in events[:-1]) == result.token_ids
    return result


def check(engine: Engine, request: GenerationRequest, plain: Result) -> Result:
    """The request under off, real strategies and an oracle of the text without stops; one answer for all."""
    off = streamed(engine, request)
    for spec, k in (("suffix", 15), ("prompt-lookup", 4)):
        assert fields_of(streamed(engine, request.with_(spec=spec, draft_max=k))) == fields_of(off)
    for k in (1, 4, 15):
        assert fields_of(draft_with(engine, oracle(engine, plain), request, k)) == fields_of(off)
    assert off.logprobs is not None
    assert len(off.logprobs) == len(off.token_ids) == off.usage.completion_tokens
    return off


@pytest.mark.parametrize(("first", "last"), [(0, 5), (3, 4), (6, 13), (10, 30)])
def test_a_stop_anywhere_in_the_text(engine: Engine, letters: Result, first: int, last: int) -> None:
    """Stops cut from the plain answer, within tokens and across them; ids end at the token that completes the stop."""
    stop = letters.text[first:last]
    off = check(engine, engine.request(ALPHABET, max_tokens=24, stop=[stop], logprobs=1), letters)
    assert off.text == letters.text[: letters.text.index(stop)]
    assert off.finish_reason is FinishReason.STOP
    assert letters.token_ids[: len(off.token_ids)] == off.token_ids
    pieces = [engine.model.tokenizer.token_bytes(token) for token in off.token_ids]
    assert stop.encode() in b"".join(pieces)
    assert stop.encode() not in b"".join(pieces[:-1])


def test_a_stop_that_spans_tokens_of_a_copy(engine: Engine, copied: Result) -> None:
    """Whole blocks are accepted here, and the stop lies inside of one."""
    off = check(engine, engine.request(COPY, max_tokens=48, stop=["gamma\nalpha"], logprobs=1), copied)
    assert off.text == "alpha beta "
    assert off.finish_reason is FinishReason.STOP


def test_a_near_miss_is_released_in_order(engine: Engine, copied: Result) -> None:
    """Text held back for a stop that then does not come is shown, before what follows it."""
    request = engine.request(COPY, max_tokens=20, stop=["beta gammb", "gamma\nalpha betb"], logprobs=1)
    off = check(engine, request, copied)
    assert off.finish_reason is FinishReason.LENGTH
    assert copied.text.startswith(off.text)
    assert off.text.count("beta gamma\nalpha") > 3


@pytest.mark.parametrize("stops", [["gamma", "beta"], ["beta", "gamma"], ["beta gamma", "beta", "a b"]], ids=str)
def test_the_first_stop_to_come_wins(engine: Engine, copied: Result, stops: list[str]) -> None:
    """Whatever place it has in the list."""
    off = check(engine, engine.request(COPY, max_tokens=20, stop=stops, logprobs=1), copied)
    earliest = min(copied.text.index(stop) + len(stop) for stop in stops)
    assert (
        off.text == copied.text[: min(copied.text.index(s) for s in stops if copied.text.index(s) + len(s) == earliest)]
    )
