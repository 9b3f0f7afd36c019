"""What a caller asks for and what it gets: requests, events, results."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol, TypeVar

import numpy as np
from attrs import Factory, define, evolve, field, frozen
from numpy.typing import NDArray

from power_core.errors import RequestError
from power_core.types import FinishReason, Origin, TokenId

__all__ = [
    "Counts",
    "Event",
    "GenerationRequest",
    "LogitsProcessor",
    "Result",
    "SamplingSpec",
    "TokenLogprobs",
    "Usage",
]


T = TypeVar("T")

_LARGEST = 2**53 - 1  # integers up to here are exact in JSON, and so in a receipt


class LogitsProcessor(Protocol):
    """
    A user's hook into sampling, called once per emitted token, in order, never for a rejected one.

    May also have ``checkpoint() -> object`` and ``restore(checkpoint) -> None``; a processor with state
    and without them is used as is, and a step that fails in between is then not undone inside it.
    """

    def __call__(self, tokens: Sequence[TokenId], logits: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """
        Change *logits* (float32[vocab], a private copy) in place, or return another array of that shape.

        *tokens* is the prompt and every token emitted so far.
        """


def _within(low: float, high: float = math.inf) -> Any:
    def check(_obj: object, attribute: Any, value: object) -> None:
        # Written so that NaN fails; infinity is never a setting.
        if not isinstance(value, int | float) or not low <= value <= high or value == math.inf:
            expected = f"a number from {low}" + ("" if high == math.inf else f" to {high}")
            raise RequestError(f"{attribute.name} is {value!r}", who="sampling", got=value, expected=expected)

    return check


def _of(kind: type | tuple[type, ...], expected: str) -> Any:
    """A validator that lets instances of *kind* pass; what does not fit is the caller's to mend, not a `TypeError`."""

    def check(_obj: object, attribute: Any, value: object) -> None:
        if not isinstance(value, kind):
            raise RequestError(
                f"{attribute.name} is {value!r:.80}", who="request", where=attribute.name, got=value, expected=expected
            )

    return check


def _count(_obj: object, attribute: Any, value: object) -> None:
    if value is not None and not (isinstance(value, int) and 0 <= value <= _LARGEST):
        expected = f"an integer from 0 to {_LARGEST}, or none at all"
        raise RequestError(f"{attribute.name} is {value!r:.80}", who="request", got=value, expected=expected)


def _seconds(_obj: object, attribute: Any, value: object) -> None:
    # Written so that NaN fails; no deadline is None, not infinity.
    if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
        raise RequestError(
            f"{attribute.name} is {value!r:.80}", who="request", where=attribute.name, got=value,
            expected="seconds, at least 0, or None",
        )  # fmt: skip


def _copy(make: Callable[[Any], T], values: Any, name: str, expected: str, who: str = "request") -> T:
    """An immutable or private copy of *values*; text is no collection here."""
    if not isinstance(values, str | bytes):
        try:
            return make(values)
        except (TypeError, ValueError):
            pass
    raise RequestError(f"{name} is {values!r:.80}", who=who, where=name, got=values, expected=expected)


def _integers(values: Iterable[TokenId]) -> Iterator[TokenId]:
    return map(operator.index, values)  # plain integers: numpy's are no JSON, and slow to hash


def _prompt(values: Sequence[TokenId]) -> tuple[TokenId, ...]:
    return _copy(_ordered_ids, values, "prompt", "a sequence of token ids")


def _ordered_ids(values: Iterable[TokenId]) -> tuple[TokenId, ...]:
    if isinstance(values, Set | Mapping):
        raise TypeError("a prompt has an order")
    return tuple(_integers(values))


def _stop_ids(values: Iterable[TokenId]) -> frozenset[TokenId]:
    return _copy(lambda ids: frozenset(_integers(ids)), values, "stop_ids", "a collection of token ids")


def _stop(values: Iterable[str]) -> tuple[str, ...]:
    return _copy(tuple, values, "stop", "a sequence of non-empty strings")


def _processors(values: Iterable[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    return _copy(tuple, values, "processors", "a sequence of functions", "sampling")


def _logit_bias(values: Mapping[TokenId, float]) -> dict[TokenId, float]:
    return _copy(dict, values, "logit_bias", "a table of token ids and numbers", "sampling")


@frozen
class SamplingSpec:
    """
    How the next token is chosen from a target row.

    Order, as in llama.cpp: logit bias and penalties, grammar mask, user processors, then, where
    temperature > 0, top-k, typical, top-p, min-p, temperature and one draw. Temperature 0 takes the
    largest processed logit, the lowest id on a tie.

    Args:
        temperature: 0 is greedy.
        top_k: Keep the k largest; 0 keeps all.
        typical_p: Locally typical sampling (Meister et al. 2022); 1 is off.
        top_p: Nucleus (Holtzman et al. 2020); 1 is off.
        min_p: Keep tokens with p >= min_p * max p; 0 is off.
        repeat_penalty: Divides positive and multiplies negative logits of tokens in the window; 1 is off.
        presence_penalty: Subtracted once for each token present in the window.
        frequency_penalty: Subtracted for each occurrence in the window.
        penalty_window: Last tokens of prompt and output that count; -1 all, 0 none.
        logit_bias: Added to the logits of these ids.
        seed: Key of the counter-based draws. None takes a fresh one, which the receipt records.
        logprobs: None for none, else the number of most likely tokens to report beside the chosen one,
            from the raw target logits (before any of the above).
        processors: User hooks.
        json_schema: Constrain the output to this schema, as JSON text or an object.
        regex: Constrain the output to this regular expression.
    """

    temperature: float = field(default=0.0, validator=_within(0))
    top_k: int = field(default=0, validator=_within(0, _LARGEST))
    typical_p: float = field(default=1.0, validator=_within(0, 1))
    top_p: float = field(default=1.0, validator=_within(0, 1))
    min_p: float = field(default=0.0, validator=_within(0, 1))
    repeat_penalty: float = field(default=1.0, validator=_within(1e-6, 1e6))
    presence_penalty: float = field(default=0.0, validator=_within(-100, 100))
    frequency_penalty: float = field(default=0.0, validator=_within(-100, 100))
    penalty_window: int = field(default=64, validator=_within(-1, _LARGEST))
    logit_bias: Mapping[TokenId, float] = field(factory=dict, converter=_logit_bias)
    seed: int | None = None
    logprobs: int | None = None
    processors: tuple[LogitsProcessor, ...] = field(default=(), converter=_processors)
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether a row's own argmax is the answer, so that no logits need to be read."""
        return (
            self.temperature == 0
            and self.repeat_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.logit_bias
            and not self.processors
            and self.json_schema is None
            and self.regex is None
            and self.logprobs is None
        )


@frozen
class GenerationRequest:
    """
    One request.

    Args:
        prompt: Token ids of the prompt, at least one.
        sampling: How tokens are chosen.
        max_tokens: Most tokens to emit; None for no limit but the context; 0 gives an empty answer.
        stop: Stop strings; the text ends before the earliest one to complete.
        stop_ids: Token ids that end the output like an end-of-generation id.
        spec: Strategy name, `off`, or None for the engine's.
        draft_max: Most proposal tokens a round (K), or None for the engine's.
        client_id: Free text of the caller, returned in events and results.
        deadline_s: Seconds within which everything has to happen, waiting and loading included; None for the
            engine's. What was made by then is in the result, which has a `DeadlineError`.
        started_s: When they began to run, in seconds of `time.monotonic`; None for the submission.
        client: Who asks. Turns in a full queue go round the clients, and cached prompts are each client's own.
        endpoint: Where it was asked, for servers: a further part of what cached prompts are filed under.
        prompt_cache_key: Keep the prompt's state, and look for state kept under the same key; None for neither.
            Changes how long the first token takes, and nothing else.
    """

    prompt: Sequence[TokenId] = field(converter=_prompt)
    sampling: SamplingSpec = field(default=SamplingSpec(), validator=_of(SamplingSpec, "a SamplingSpec"))
    max_tokens: int | None = field(default=None, validator=_count)
    stop: tuple[str, ...] = field(default=(), converter=_stop)
    stop_ids: frozenset[TokenId] = field(default=frozenset(), converter=_stop_ids)
    spec: str | None = field(default=None, validator=_of((str, type(None)), "a strategy's name, 'off' or None"))
    draft_max: int | None = field(default=None, validator=_count)
    client_id: str | None = None
    deadline_s: float | None = field(default=None, validator=_seconds)
    started_s: float | None = field(default=None, validator=_seconds)
    client: str = field(default="", validator=_of(str, "a text"))
    endpoint: str = field(default="", validator=_of(str, "a text"))
    prompt_cache_key: str | None = field(default=None, validator=_of((str, type(None)), "a text or None"))

    def with_(self, **changes: Any) -> GenerationRequest:
        """A copy with *changes*."""
        return evolve(self, **changes)


@frozen
class TokenLogprobs:
    """
    Natural logarithms of probabilities under the raw target row.

    Args:
        token_id: The emitted token.
        logprob: Its own.
        top: The most likely (id, logprob), largest first.
    """

    token_id: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


@frozen
class Usage:
    """Token counts as in OpenAI's API: rejected proposals are in neither."""

    prompt_tokens: int
    completion_tokens: int


@define
class Counts:
    """
    What one request cost. Mutable while the request runs, part of its receipt afterwards.

    Attributes:
        rounds: Steps that took part in choosing a token.
        target_passes: Forwards this request had rows in, prefill included.
        prefill_passes: Those of them that held only prompt rows without choosing a token.
        proposals: Rounds with a proposal.
        drafted: Proposed tokens that reached the target.
        accepted: Those the target chose too.
        dropped: Proposed tokens not verified: outside the vocabulary, beyond a limit, or not worth a row.
        emitted: Tokens emitted.
        replays: Rollbacks deeper than the resident window, paid by evaluating accepted rows again.
        rebuilds: Restores that had to evaluate the sequence again from its tokens.
        reused: Prompt tokens whose state came from the prompt cache.
        guard: Proposal cap after a replay, or None where none happened.
        widths: Rows computed for this request's forwards (all members) -> how often.
    """

    rounds: int = 0
    target_passes: int = 0
    prefill_passes: int = 0
    proposals: int = 0
    drafted: int = 0
    accepted: int = 0
    dropped: int = 0
    emitted: int = 0
    replays: int = 0
    rebuilds: int = 0
    reused: int = 0
    guard: int | None = None
    widths: dict[int, int] = Factory(dict)


@frozen
class Event:
    """
    One emitted token, or the end of a request.

    Joined texts of a request's events are its final text. Exactly one event has origin `end`; it
    comes last, carries the held-back rest of the text and the result.

    Args:
        request_id: Number the engine gave the request.
        text: Text released by this token; empty while bytes or a possible stop string are held back.
        token_id: The token, or None at the end.
        origin: Where the token came from.
        index: Position in the output, 0-based; the number of tokens at the end.
        logprobs: Where the request asked for them.
        result: Only at the end.
    """

    request_id: int
    text: str
    token_id: TokenId | None
    origin: Origin
    index: int
    logprobs: TokenLogprobs | None = None
    result: Result | None = None


@frozen
class Result:
    """
    A finished request.

    Args:
        text: The whole text, ended before a stop string.
        token_ids: Every emitted id, an end-of-generation id included.
        prompt_token_ids: The prompt.
        finish_reason: Why it ended.
        usage: Token counts.
        origins: Origin of each token, in order.
        logprobs: One entry a token where asked for, else None.
        counts: What it cost.
        receipt: The receipt document (see `power_core.evidence`).
        error: The cause where finish_reason is `error`.
    """

    request_id: int
    text: str
    token_ids: tuple[TokenId, ...]
    prompt_token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason
    usage: Usage
    origins: tuple[Origin, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    counts: Counts
    receipt: Mapping[str, Any] = Factory(dict)
    error: BaseException | None = None
    client_id: str | None = None

    def with_receipt(self, receipt: Mapping[str, Any]) -> Result:
        """A copy that carries *receipt*."""
        return evolve(self, receipt=receipt)
