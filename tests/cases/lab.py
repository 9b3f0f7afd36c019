"""Requests under scripted drafters on a real session, and what callers see of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from power_core.drafter import Drafter
from power_core.engine import Engine
from power_core.request import GenerationRequest, Result
from power_core.scheduler.drafting import OpenDraft
from power_core.scheduler.loop import StepLoop
from power_core.testing import OracleDrafter, recorded

__all__ = ["COPY", "GREETING", "draft_all", "draft_with", "fields_of", "oracle"]

COPY = "alpha beta gamma\n" * 8
GREETING = "Once upon a time"


def fields_of(result: Result) -> tuple[Any, ...]:
    """All fields that no strategy may change."""
    return result.token_ids, result.text, result.finish_reason, result.usage, result.logprobs


def oracle(engine: Engine, *results: Result, after: Sequence[int] = ()) -> OracleDrafter:
    """Proposes the tokens of *results*, and those of *after* behind their ends."""
    texts = [(*result.prompt_token_ids, *result.token_ids, *after) for result in results]
    return OracleDrafter(recorded(*texts), engine.model.tokenizer.vocab_size)


def draft_all(
    engine: Engine, drafter: Drafter, requests: Sequence[GenerationRequest], draft_max: int = 15
) -> list[Result]:
    """Results of *requests*, decoded together with *drafter* on the idle session of *engine*."""
    loop = StepLoop(
        engine.session,
        engine.model.tokenizer,
        open_strategy=lambda name: OpenDraft(name, drafter.open(engine.model, engine.session)),
        draft_max=draft_max,
    )
    numbers = [loop.submit(request.with_(spec="scripted", draft_max=draft_max)) for request in requests]
    results: dict[int, Result] = {}
    while loop.active:
        results.update({event.request_id: event.result for event in loop.step() if event.result is not None})
    loop.close()
    assert [result.error for result in results.values()] == [None] * len(numbers)
    return [results[number] for number in numbers]


def draft_with(engine: Engine, drafter: Drafter, request: GenerationRequest, draft_max: int = 15) -> Result:
    """The result of *request* decoded with *drafter*."""
    [result] = draft_all(engine, drafter, [request], draft_max)
    return result
