"""Strategies against plain decoding: run both, find the first token that differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import click
from attrs import evolve, frozen

from power_core.capabilities import OFF
from power_core.cli.decode import run_request
from power_core.cli.progress import open_engine
from power_core.types import FinishReason, TokenId

if TYPE_CHECKING:
    from power_core.engine import Engine
    from power_core.request import GenerationRequest, Result
    from power_core.runtime import Runtime
    from power_core.target import TargetModel

__all__ = ["Comparison", "Difference", "compare"]


@frozen
class Difference:
    """
    Where two runs part.

    Args:
        index: Position in the output.
        off: Id plain decoding emitted there, None where it had ended.
        off_text: Its spelling in the vocabulary.
        strategy: Id the strategy emitted there, None where it had ended.
        strategy_text: Its spelling.
        top2_logit_gap: Between the two largest logits of the plain row. A narrow gap points at numerics, a
            wide one at the logic; either is a failure.
    """

    index: int
    off: TokenId | None
    off_text: str | None
    strategy: TokenId | None
    strategy_text: str | None
    top2_logit_gap: float | None


@frozen
class Comparison:
    """
    One prompt under one strategy.

    Args:
        prompt: Index of the prompt.
        identical: Whether ids, text and finish reason are all the same.
        level: Exactness level of the session.
        tokens: Tokens plain decoding emitted.
        passes: Target passes of the strategy.
        plain_passes: Target passes of plain decoding.
        drafted: Proposed tokens that reached the target.
        accepted: Those it chose too.
        first_difference: Where the ids part, if they do.
    """

    prompt: int
    strategy: str
    identical: bool
    level: str
    tokens: int
    passes: int
    plain_passes: int
    drafted: int
    accepted: int
    first_difference: Difference | None


def compare(
    runtime: Runtime, make_requests: Callable[[TargetModel], Sequence[GenerationRequest]], strategies: Sequence[str]
) -> list[Comparison]:
    """
    Run every request plainly once and with each strategy.

    Args:
        runtime: Opens one engine at a time, so that one model's memory is enough.
        make_requests: Makes the requests with the model's tokenizer, and refuses what cannot be served.
        strategies: Registered names.

    Returns:
        Comparisons by strategy, then by request.
    """
    requests: list[GenerationRequest] = []
    plain: list[Result] = []
    comparisons = []
    for strategy in strategies:
        check = None if plain else lambda model: requests.extend(make_requests(model))
        with open_engine(runtime, strategy, check=check) as engine:
            if not plain:
                plain = [_run(engine, request.with_(spec=OFF)) for request in requests]
            for index, (request, expected) in enumerate(zip(requests, plain, strict=True)):
                result = _run(engine, request.with_(spec=strategy))
                comparisons.append(_compared(engine, index, strategy, request, expected, result))
    return comparisons


def _run(engine: Engine, request: GenerationRequest) -> Result:
    result = run_request(engine, request, lambda _event: None, progress=True)
    if result.finish_reason is FinishReason.CANCELLED:
        raise click.Abort
    return result


def _compared(
    engine: Engine, index: int, strategy: str, request: GenerationRequest, plain: Result, result: Result
) -> Comparison:
    return Comparison(
        prompt=index,
        strategy=strategy,
        identical=_outcome(plain) == _outcome(result),
        level=engine.profile.level.value,
        tokens=len(plain.token_ids),
        passes=result.counts.target_passes,
        plain_passes=plain.counts.target_passes,
        drafted=result.counts.drafted,
        accepted=result.counts.accepted,
        first_difference=_first_difference(engine, request, plain.token_ids, result.token_ids),
    )


def _outcome(result: Result) -> tuple[object, ...]:
    return result.token_ids, result.text, result.finish_reason


def _first_difference(
    engine: Engine, request: GenerationRequest, plain: Sequence[TokenId], other: Sequence[TokenId]
) -> Difference | None:
    for index, (off, got) in enumerate(zip_longest(plain, other)):
        if off != got:
            names = [None if token is None else engine.model.tokenizer.token_name(token) for token in (off, got)]
            gap = None if off is None else _top2_gap(engine, request, index)
            return Difference(index, off, names[0], got, names[1], gap)
    return None


def _top2_gap(engine: Engine, request: GenerationRequest, index: int) -> float | None:
    """Gap at *index* of plain decoding, run again with log-probabilities: their differences are those of the logits."""
    sampling = evolve(request.sampling, logprobs=2)
    result = _run(engine, request.with_(spec=OFF, sampling=sampling, max_tokens=index + 1))
    if result.logprobs is None or len(result.logprobs) <= index:
        return None
    (_, first), (_, second) = result.logprobs[index].top[:2]
    return first - second
