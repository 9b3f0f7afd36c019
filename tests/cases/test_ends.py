"""An end inside an accepted block ends the answer there, as in plain decoding (case 3)."""

from __future__ import annotations

import pytest

from cases.lab import GREETING, draft_with, fields_of, oracle
from parity.conftest import STRATEGIES
from power_core.engine import Engine
from power_core.request import Result
from power_core.target import ChatMessage
from power_core.types import FinishReason

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tale(engine: Engine) -> Result:
    """40 plain tokens."""
    return engine.complete(GREETING, max_tokens=40)


@pytest.mark.parametrize("k", [2, 4, 8])
def test_a_stop_id_at_every_place_of_a_block(engine: Engine, tale: Result, k: int) -> None:
    """Accepted tokens behind the end are not emitted, counted or shown, whichever place of the block it has."""
    for p in range(3, 21):
        end = tale.token_ids[p]
        expected = tale.token_ids[: tale.token_ids.index(end) + 1]
        request = engine.request(GREETING, max_tokens=40, stop_ids=[end])
        drafter = oracle(engine, tale)
        result = draft_with(engine, drafter, request, k)
        assert (result.token_ids, result.finish_reason) == (expected, FinishReason.STOP)
        assert result.usage.completion_tokens == len(expected) == result.counts.emitted
        assert tale.text.startswith(result.text)
        [ended] = drafter.sessions[0].ended
        assert ended.committed == expected
        if p in (3, 20):
            assert fields_of(result) == fields_of(engine.complete(request))


def test_the_turn_after_an_end_in_a_block(engine: Engine, tale: Result) -> None:
    """What was accepted behind the end is not in the cache either: the next turn is that of plain decoding."""
    request = engine.request(GREETING, max_tokens=40, stop_ids=[tale.token_ids[6]])
    first = draft_with(engine, oracle(engine, tale), request, 8)
    turn = engine.request(
        [*first.prompt_token_ids, *first.token_ids, *engine.encode("\nThe end. Once upon")], max_tokens=8
    )
    plain = engine.complete(turn)
    for spec in ("suffix", "prompt-lookup"):
        assert fields_of(engine.complete(turn.with_(spec=spec))) == fields_of(plain)


def test_every_end_of_generation_id_of_the_file_ends(engine: Engine) -> None:
    """Not only the end-of-sequence id: each one forced by a bias is emitted, has no text and is the last."""
    ends = engine.model.tokenizer.end_ids
    assert {0, 2} <= ends
    for end in ends:
        result = engine.complete("alpha beta alpha beta alpha", max_tokens=8, spec="suffix", logit_bias={end: 1e4})
        assert (result.token_ids, result.text) == ((end,), "")
        assert (result.finish_reason, result.usage.completion_tokens) == (FinishReason.STOP, 1)


def test_a_history_of_turns_is_not_copied_past_the_end(engine: Engine) -> None:
    """
    With real turns in the prompt a drafter proposes the end and the next turn behind it.

    What comes out ends where plain decoding ends, and nothing after the first end id is emitted.
    """
    turns = [ChatMessage("user", "Say hi."), ChatMessage("assistant", "Hi!")] * 3
    request = engine.request([*turns, ChatMessage("user", "Say hi.")], max_tokens=24)
    off = engine.complete(request)
    assert off.finish_reason is FinishReason.STOP
    tokenizer = engine.model.tokenizer
    next_turn = tokenizer.encode("\n<|im_start|>user\nSay hi.<|im_end|>\n", parse_special=True)
    drafted = [engine.complete(request.with_(spec=spec, draft_max=8)) for spec in STRATEGIES]
    drafted += [draft_with(engine, oracle(engine, off, after=next_turn), request, k) for k in (2, 4, 8, 15)]
    assert drafted[-1].counts.drafted > drafted[-1].counts.accepted >= len(off.token_ids) - 2  # it went past the end
    for result in drafted:
        assert fields_of(result) == fields_of(off)
        assert [token in tokenizer.end_ids for token in result.token_ids].index(True) == len(result.token_ids) - 1
