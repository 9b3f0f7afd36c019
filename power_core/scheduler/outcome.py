"""What callers see of a step: events of committed tokens, the closing event, the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from attrs import evolve

from power_core.errors import BackendError, PowerError
from power_core.request import Event, Result, TokenLogprobs, Usage
from power_core.scheduler.sequence import Member, Sequence
from power_core.types import FinishReason, Origin

__all__ = ["ReceiptFactory", "closing_event", "token_events", "wrapped"]

ReceiptFactory = Callable[[Sequence, Result], Mapping[str, Any]]


def token_events(member: Member) -> list[Event]:
    """Events of the tokens that a committed *member* chose, in order."""
    sequence = member.sequence
    first = len(sequence.origins)
    entries: Seq[TokenLogprobs | None] = sequence.sampler.logprobs()[first:] or [None] * len(member.chosen)
    return [
        Event(sequence.request_id, text, token, _origin(member, offset), first + offset, entry)
        for offset, (token, text, entry) in enumerate(zip(member.chosen, member.texts, entries, strict=True))
    ]


def closing_event(
    sequence: Sequence, reason: FinishReason, error: BaseException | None, receipt: ReceiptFactory | None
) -> Event:
    """The last event of a request: the rest of its text, and its result."""
    sequence.clock.finished = time.perf_counter()
    rest = sequence.decoder.flush()
    result = _result(sequence, reason, rest, error)
    if receipt is not None and error is None:
        try:
            result = result.with_receipt(receipt(sequence, result))
        except Exception as exc:  # noqa: BLE001 - the end must come: a result without a receipt is an error
            result = evolve(result, finish_reason=FinishReason.ERROR, error=wrapped(exc))
    return Event(sequence.request_id, rest, None, Origin.END, len(sequence.origins), None, result)


def wrapped(error: BaseException) -> PowerError:
    """*error* as one of Power's own."""
    if isinstance(error, PowerError):
        return error
    wrapper = BackendError(f"{type(error).__name__}: {error}", who="request", got=error)
    wrapper.__cause__ = error
    return wrapper


def _result(sequence: Sequence, reason: FinishReason, rest: str, error: BaseException | None) -> Result:
    ids = tuple(sequence.tokens[sequence.num_prompt :])
    wanted = sequence.request.sampling.logprobs is not None
    return Result(
        request_id=sequence.request_id,
        text="".join(sequence.texts) + rest,
        token_ids=ids,
        prompt_token_ids=tuple(sequence.request.prompt),
        finish_reason=reason,
        usage=Usage(sequence.num_prompt, len(ids)),
        origins=tuple(sequence.origins),
        logprobs=tuple(sequence.sampler.logprobs()) if wanted else None,
        counts=sequence.counts,
        error=error,
        client_id=sequence.request.client_id,
    )


def _origin(member: Member, offset: int) -> Origin:
    if not member.proposal:
        return Origin.PLAIN
    if offset < member.accepted:
        return Origin.ACCEPTED
    return Origin.BONUS if member.accepted == len(member.proposal) else Origin.CORRECTION
