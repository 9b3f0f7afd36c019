"""Plain decoding, written down as simply as it can be: the answer every strategy is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.request import GenerationRequest, SamplingSpec
from power_core.sampling import draw, reduce_seed, uniform
from power_core.target import RowBatch, SessionOptions, TargetModel, TargetSession, Tokenizer
from power_core.types import FinishReason, TokenId

__all__ = ["Choose", "PlainText", "plain_choice", "plain_decode"]

Choose = Callable[[Sequence[TokenId], NDArray[np.float32]], TokenId]
"""(tokens so far, logits float32[vocab]) -> the next token."""


@frozen
class PlainText:
    """What plain decoding gives: the fields a strategy must not change."""

    token_ids: tuple[TokenId, ...]
    text: str
    finish_reason: FinishReason


def plain_choice(request: GenerationRequest) -> Choose:
    """
    The sampler that *request* asks for, worked out from scratch at each token.

    Raises:
        ValueError: It has no seed, or a grammar, which this does not cover.
    """
    spec, start = request.sampling, len(request.prompt)
    if spec.json_schema is not None or spec.regex is not None or (spec.temperature > 0 and spec.seed is None):
        raise ValueError("plain choice covers no grammar and no unseeded draw")

    def choose(tokens: Sequence[TokenId], logits: NDArray[np.float32]) -> TokenId:
        row = logits.copy()
        for token, bias in spec.logit_bias.items():
            row[token] += np.float32(bias)
        _penalise(row, tokens, spec)
        for processor in spec.processors:
            returned = processor(tokens, row)
            row = row if returned is None else returned
        if spec.temperature == 0:
            return int(np.argmax(row))  # the lowest id on a tie
        return draw(row, spec, uniform(reduce_seed(spec.seed or 0), len(tokens) - start))

    return choose


def _penalise(row: NDArray[np.float32], tokens: Sequence[TokenId], spec: SamplingSpec) -> None:
    size = len(tokens) if spec.penalty_window < 0 else min(spec.penalty_window, len(tokens))
    for token, count in Counter(tokens[len(tokens) - size :]).items():
        logit = float(row[token])
        logit = logit / spec.repeat_penalty if logit > 0 else logit * spec.repeat_penalty
        row[token] = logit - (count * spec.frequency_penalty + spec.presence_penalty)


def plain_decode(
    model: TargetModel,
    request: GenerationRequest,
    *,
    options: SessionOptions | None = None,
    choose: Choose | None = None,
) -> PlainText:
    """
    Decode *request* with one token a forward and none of the engine.

    Prompt tokens are evaluated in the session's prefill class, generated ones in its decode class.

    Args:
        model: The target; a session of its own is opened and shut down.
        request: What to decode; its strategy does not matter.
        options: For the session.
        choose: Called once a token, in order, instead of the request's sampler (`plain_choice`).

    >>> from power_core.testing.numerics import next_table
    >>> from power_core.testing.targets import ScriptedTarget
    >>> cycle = ScriptedTarget(3, logits=next_table([1, 2, 0]))
    >>> plain_decode(cycle, GenerationRequest([0], max_tokens=4)).text
    'bcab'
    """
    session = model.open_session(options or SessionOptions())
    try:
        session.open(0)
        return _decode(session, model.tokenizer, request, choose or plain_choice(request))
    finally:
        session.shutdown()


def _decode(session: TargetSession, tokenizer: Tokenizer, request: GenerationRequest, choose: Choose) -> PlainText:
    tokens, start = list(request.prompt), len(request.prompt)
    ends = tokenizer.end_ids | request.stop_ids
    batch = RowBatch(1)
    data, cut = b"", None
    reason = FinishReason.LENGTH
    while not _is_full(session, request, len(tokens)):
        logits = _advance(session, batch, tokens, start)
        tokens.append(choose(tuple(tokens), logits))
        if tokens[-1] in ends:
            reason = FinishReason.STOP
            break
        data += tokenizer.token_bytes(tokens[-1])
        cut = _stop_index(data, request.stop)
        if cut is not None:
            reason = FinishReason.STOP
            break
    return PlainText(tuple(tokens[start:]), data[:cut].decode(errors="replace"), reason)


def _is_full(session: TargetSession, request: GenerationRequest, count: int) -> bool:
    if request.max_tokens is not None and count - len(request.prompt) >= request.max_tokens:
        return True
    return count > session.context_size  # the last token is emitted, but there is no position to evaluate it at


def _advance(session: TargetSession, batch: RowBatch, tokens: Sequence[TokenId], start: int) -> NDArray[np.float32]:
    """Evaluate what is pending, one row a forward; logits after the last of *tokens*. The prompt ends at *start*."""
    profile = session.profile
    for at in range(session.length(0), len(tokens)):
        batch.clear()
        batch.add_chain(0, at, tokens[at : at + 1], outputs=1)
        rows = session.forward(batch, profile.prefill if at < start else profile.decode)
    return rows.logits(0)


def _stop_index(data: bytes, stops: Sequence[str]) -> int | None:
    """Where the stop string that is complete first begins in *data*, the longest of several that end together."""
    found = [(at + len(stop.encode()), at) for stop in stops if (at := data.find(stop.encode())) >= 0]
    return min(found)[1] if found else None
