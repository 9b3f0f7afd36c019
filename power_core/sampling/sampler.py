"""The sampler of one request: a transaction participant that turns target rows into tokens."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.errors import RequestError, TransactionError
from power_core.grammar import GrammarConstraint
from power_core.request import LogitsProcessor, SamplingSpec, TokenLogprobs
from power_core.sampling.draws import reduce_seed, uniform
from power_core.sampling.filters import check_row, draw
from power_core.sampling.logprobs import token_logprobs
from power_core.sampling.penalties import PenaltyWindow
from power_core.target import Rows, Tokenizer
from power_core.types import TokenId

__all__ = ["MAX_LOGPROBS", "Sampler"]

MAX_LOGPROBS = 1024  # each emitted token holds that many pairs until the request ends
_LARGEST_BIAS = 1e30  # further out, sums of float32 logits overflow
Row = NDArray[np.float32]


@frozen
class _Checkpoint:
    length: int
    grammar: object
    processors: tuple[object, ...]


class Sampler:
    """
    Chooses tokens for one request. All state is a function of the tokens chosen so far.

    `sample` is called for emitted tokens only, in order; a draw depends on the seed and the emitted
    index, so what a drafter proposed cannot show. Plain greedy reads no logits. Everything else copies
    the row at most once.

    Args:
        spec: How to choose.
        prompt: Token ids of the prompt.
        tokenizer: The target's, for the vocabulary size and for grammars.
        seed: 64-bit key of the draws, from `resolve_seed`.

    Attributes:
        history: Prompt and every token sampled so far; others only read it.
        num_prompt: Tokens of the prompt.

    Raises:
        RequestError: The spec does not fit the vocabulary, or its grammar does not compile.
    """

    def __init__(self, spec: SamplingSpec, *, prompt: Sequence[TokenId], tokenizer: Tokenizer, seed: int) -> None:
        _check_settings(spec)
        self.history: list[TokenId] = list(prompt)
        self.num_prompt = len(self.history)
        self._spec = spec
        self._seed = reduce_seed(seed)
        self._is_plain_greedy = spec.is_plain_greedy
        self._bias = _bias_arrays(spec, tokenizer.vocab_size)
        self._penalties = PenaltyWindow(spec, self.history) if PenaltyWindow.is_needed(spec) else None
        self._grammar = GrammarConstraint.of(spec, tokenizer)
        self._undoable: tuple[Any, ...] = tuple(p for p in spec.processors if _has_state(p))
        self._logprobs: list[TokenLogprobs] = []

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing more, so that the request ends here."""
        return self._grammar is not None and self._grammar.is_complete

    def sample(self, rows: Rows, i: int) -> TokenId:
        """
        Choose the next token from row *i* and append it to the history.

        Raises:
            RequestError: No token is left to choose, or a logits processor failed or returned nonsense.
            BackendError: The row holds NaN or +inf.
        """
        if self._is_plain_greedy:
            token = rows.greedy(i)
        else:
            row = rows.logits(i)
            token = self._choose(self._edit(row))
            if self._spec.logprobs is not None:
                self._logprobs.append(token_logprobs(row, token, self._spec.logprobs))
            if self._grammar is not None:
                self._grammar.advance(token)
        self.history.append(token)
        if self._penalties is not None:
            self._penalties.push()
        return token

    def logprobs(self) -> list[TokenLogprobs]:
        """One entry for each sampled token, empty if not asked for. The live list, to be read only."""
        return self._logprobs

    def checkpoint(self) -> object:
        """Retain the state: lengths, and what the grammar and the processors retain."""
        return _Checkpoint(
            len(self.history),
            self._grammar.checkpoint() if self._grammar is not None else None,
            tuple(processor.checkpoint() for processor in self._undoable),
        )

    def commit(self, n: int) -> None:
        """The last *n* tokens stay. Nothing to do: a checkpoint holds no copy."""

    def restore(self, checkpoint: object) -> None:
        """Forget everything sampled since *checkpoint*, which may be restored again."""
        if not isinstance(checkpoint, _Checkpoint) or checkpoint.length > len(self.history):
            raise TransactionError("not a checkpoint of this state", who="sampler", got=checkpoint)
        while len(self.history) > checkpoint.length:
            if self._penalties is not None:
                self._penalties.pop()
            self.history.pop()
        del self._logprobs[checkpoint.length - self.num_prompt :]
        if self._grammar is not None:
            self._grammar.restore(checkpoint.grammar)
        for processor, state in zip(self._undoable, checkpoint.processors, strict=True):
            processor.restore(state)

    def _edit(self, row: Row) -> Row:
        """Bias, penalties, grammar and processors, on a copy where there are any."""
        processors = self._spec.processors
        if self._bias is None and self._penalties is None and self._grammar is None and not processors:
            return row
        row = row.copy()
        if self._bias is not None:
            ids, values = self._bias
            row[ids] += values
        if self._penalties is not None:
            self._penalties.apply(row)
        if self._grammar is not None:
            self._grammar.mask(row)
        if processors:
            tokens = tuple(self.history)  # a processor may keep or change what it is given
            for processor in processors:
                row = _process(processor, tokens, row)
        return row

    def _choose(self, row: Row) -> TokenId:
        if self._spec.temperature == 0:
            check_row(row, "greedy")
            return int(row.argmax())  # numpy takes the first of equals: the lowest id
        return draw(row, self._spec, uniform(self._seed, len(self.history) - self.num_prompt))


def _process(processor: LogitsProcessor, tokens: tuple[TokenId, ...], row: Row) -> Row:
    """Call one processor and check what it made of *row*."""
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    try:
        returned = processor(tokens, row)
    except Exception as exc:  # user code may raise anything, and only this request fails for it
        raise RequestError(
            f"raised {type(exc).__name__}: {exc}", who="sampling", where=f"logits processor {name!r}", got=exc
        ) from exc
    result: Any = row if returned is None else returned
    is_row = isinstance(result, np.ndarray) and result.dtype == np.float32 and result.shape == row.shape
    if is_row and float(result.max()) < math.inf:  # false for NaN too
        return row if returned is None else np.array(returned)  # the array may be the processor's own
    found = f"{result.dtype}{list(result.shape)}" if isinstance(result, np.ndarray) else type(result).__name__
    raise RequestError(
        f"left NaN or +inf in the {found} logits" if is_row else f"returned {found}",
        who="sampling",
        where=f"logits processor {name!r}",
        got=result,
        expected=f"None or float32{list(row.shape)} without NaN and +inf",
    )


def _has_state(processor: LogitsProcessor) -> bool:
    return all(callable(getattr(processor, name, None)) for name in ("checkpoint", "restore"))


def _check_settings(spec: SamplingSpec) -> None:
    for name in ("top_k", "penalty_window"):
        value = getattr(spec, name)
        if not _is_integer(value):
            raise RequestError(f"{name} is {value!r}", who="sampling", where=name, got=value, expected="an integer")
    for processor in spec.processors:
        if not callable(processor):
            raise RequestError(
                f"{processor!r:.80} is no logits processor",
                who="sampling",
                where="processors",
                got=processor,
                expected="a function of (tokens, logits)",
            )
    count = spec.logprobs
    if count is not None and not (_is_integer(count) and 0 <= count <= MAX_LOGPROBS):
        raise RequestError(
            f"logprobs is {count!r}", who="sampling", where="logprobs", got=count, expected=f"0 to {MAX_LOGPROBS}"
        )


def _is_integer(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type] # what is no integer is what this is here to find
    except TypeError:
        return False
    return True


def _bias_arrays(spec: SamplingSpec, vocab_size: int) -> tuple[NDArray[np.intp], Row] | None:
    """Ids and float32 values of the logit bias, or None where there is none."""
    for token, value in spec.logit_bias.items():
        if not (_is_integer(token) and 0 <= token < vocab_size):
            raise RequestError(
                f"token id {token!r} is not in the vocabulary",
                who="sampling",
                where="logit_bias",
                got=token,
                expected=f"0 to {vocab_size - 1}",
            )
        is_number = isinstance(value, int | float | np.number)
        if not (is_number and (abs(value) <= _LARGEST_BIAS or value == -math.inf)):  # refuses NaN too
            raise RequestError(
                f"the bias of token {token} is {value!r}",
                who="sampling",
                where="logit_bias",
                got=value,
                expected=f"a number up to {_LARGEST_BIAS}, or -inf as a ban",
            )
    if not spec.logit_bias:
        return None
    ids = np.fromiter(spec.logit_bias.keys(), np.intp, len(spec.logit_bias))
    return ids, np.fromiter(spec.logit_bias.values(), np.float32, len(spec.logit_bias))
