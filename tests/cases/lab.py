"""Requests under scripted drafters on a real session, and what callers see of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from power_core.drafter import Drafter
from power_core.engine import Engine
from power_core.request import GenerationRequest, Result, SamplingSpec
from power_core.scheduler.drafting import OpenDraft
from power_core.scheduler.loop import StepLoop
from power_core.testing import OracleDrafter, recorded
from power_core.types import TokenId

__all__ = [
    "COPY", "GREETING", "STORY", "asked_after", "check_kept", "draft_all", "draft_with", "fields_of", "oracle",
    "plain_fields",
]  # fmt: skip

COPY = "alpha beta gamma\n" * 8
GREETING = "Once upon a time"
STORY = "The lighthouse keeper wrote in his log every evening. "


def fields_of(result: Result) -> tuple[Any, ...]:
    """All fields that no strategy may change."""
    return result.token_ids, result.text, result.finish_reason, result.usage, result.logprobs


def asked_after(
    text: Sequence[TokenId], ends: Sequence[Sequence[TokenId]], *, spec: str | None = None
) -> list[GenerationRequest]:
    """Requests for what follows *text* and each of *ends*, every second one seeded; they keep their prompts."""
    seeded = SamplingSpec(temperature=0.7, seed=3, logprobs=2)
    return [
        GenerationRequest(
            (*text, *end), max_tokens=14, spec=spec, prompt_cache_key="k",
            sampling=seeded if n % 2 else SamplingSpec(logprobs=1),
        )
        for n, end in enumerate(ends)
    ]  # fmt: skip


def plain_fields(engine: Engine, asked: Sequence[GenerationRequest]) -> list[tuple[Any, ...]]:
    """The fields of *asked* by plain decoding, which keeps nothing."""
    return [fields_of(engine.complete(request.with_(prompt_cache_key=None, spec="off"))) for request in asked]


def check_kept(engine: Engine, asked: Sequence[GenerationRequest], plain: Sequence[tuple[Any, ...]]) -> list[Result]:
    """
    Requests that keep their prompts have the fields of *plain*: with the cache off, cold and warm, evicted, together.

    Returns:
        The warm results: each prompt had been kept before.
    """
    cache = engine.cache
    assert cache is not None
    cache.clear()
    assert [fields_of(engine.complete(request.with_(prompt_cache_key=None))) for request in asked] == plain
    assert [fields_of(engine.complete(request)) for request in asked] == plain
    warm = [engine.complete(request) for request in asked]
    assert [fields_of(result) for result in warm] == plain
    for request, expected in zip(asked, plain, strict=True):
        cache.clear()
        evicted = engine.complete(request)
        assert (fields_of(evicted), evicted.counts.reused) == (expected, 0)
    assert [fields_of(result) for result in engine.generate_many(asked)] == plain
    return warm


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
