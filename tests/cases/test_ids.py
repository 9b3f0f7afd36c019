"""Ids a drafter should never propose: dropped and counted, never given to the library (case 16)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cases.lab import COPY, draft_with
from power_core.drafter import Proposal
from power_core.engine import Engine
from power_core.request import Result
from power_core.target import RowBatch
from power_core.testing import LiarDrafter, ScriptedDrafter, lies_about

pytestmark = pytest.mark.model
VOCAB = 49152
BAD: list[Any] = [VOCAB, VOCAB + 5, -1, 2**31 - 1, 2**31, -(2**63), 2**70, 1.0, float("nan"), "1", None, [1]]


@pytest.fixture
def seen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every id that a forward of the session was given."""
    ids: list[int] = []
    forward = engine.session.forward

    def spied(batch: RowBatch, shape: Any) -> Any:
        ids.extend(batch.tokens[: batch.n].tolist())
        return forward(batch, shape)

    monkeypatch.setattr(engine.session, "forward", spied)
    return ids


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_bad_id_ends_the_proposal_there(engine: Engine, copied: Result, seen: list[int], bad: Any) -> None:
    """The right tokens in front of it are accepted, it and what follows are dropped and counted; ids == off."""
    request = engine.request(COPY, max_tokens=12)
    text = (*copied.prompt_token_ids, *copied.token_ids)

    def propose(tokens: Any, wanted: int, round_: int) -> Proposal:
        right = text[len(tokens) : len(tokens) + 2]
        return Proposal([*right, bad, *text[len(tokens) + 3 : len(tokens) + 5]][:wanted])

    result = draft_with(engine, ScriptedDrafter(propose), request, 8)
    assert result.token_ids == copied.token_ids[:12]
    assert result.counts.accepted == result.counts.drafted > 4
    assert result.counts.dropped >= 3
    assert set(seen) <= set(text)


def test_a_liar_costs_speed_only(engine: Engine, copied: Result, seen: list[int]) -> None:
    """Nothing but lies, far too many ids among them, and numpy's integers in place of Python's."""
    lies = [*lies_about(VOCAB), list(np.array([5, VOCAB]))]
    request = engine.request(COPY, max_tokens=len(lies) + 1)
    result = draft_with(engine, LiarDrafter(VOCAB, lies), request, 8)
    assert result.token_ids == copied.token_ids[: len(lies) + 1]
    assert result.counts.dropped >= len(lies_about(VOCAB))
    assert 0 <= min(seen) <= max(seen) < VOCAB
