"""
`ngram-mod`: a pool that maps the hash of the last n tokens to the next one, followed as a chain.

The idea is llama.cpp's ngram-mod (pull request 19164). Here the hash rolls, so that a token costs the
same whatever n is, and a pool belongs to one request unless the shared store is on.
"""

from __future__ import annotations

from collections.abc import Sequence

from power_core.drafter import Proposal
from power_core.types import TokenId
from power_ngram.config import NgramModConfig
from power_ngram.history import HistoryIndex, Strategy

__all__ = ["PoolIndex", "PoolStrategy"]

_MODULUS = (1 << 61) - 1  # a Mersenne prime: products of two residues stay cheap
_BASE = 6_700_417_003_451_927


class PoolIndex(HistoryIndex):
    """
    The pool of one request.

    A slot is written when the token after its n-gram is known, and keeps the latest one. Two n-grams
    can share a slot; the price is a wrong proposal.

    Args:
        history: The request's tokens.
        config: The strategy's options.
        store: Pool of ended requests, asked where the own one has nothing; None without a shared store.
    """

    def __init__(self, history: Sequence[TokenId], config: NgramModConfig, store: dict[int, TokenId] | None) -> None:
        super().__init__(history)
        self.pool: dict[int, TokenId] = {}
        self._config = config
        self._store = store
        self._hash = 0  # of the last n_match tokens covered
        self._leaving = pow(_BASE, config.n_match, _MODULUS)

    def _extend(self, start: int, stop: int) -> None:
        history, n, slots, pool = self.history, self._config.n_match, self._config.pool_size, self.pool
        value = self._hash
        for position in range(start, stop):
            token = history[position]
            if position < n:
                value = (value * _BASE + token + 1) % _MODULUS  # + 1: id 0 counts too
            else:
                pool[value % slots] = token
                value = self._roll(value, history[position - n], token)
        self._hash = value

    def _roll(self, value: int, leaving: TokenId, entering: TokenId) -> int:
        return (value * _BASE - (leaving + 1) * self._leaving + entering + 1) % _MODULUS

    def draft(self, max_tokens: int) -> Proposal:
        n, slots = self._config.n_match, self._config.pool_size
        if len(self.history) < n:
            return Proposal()
        chain = list(self.history[-n:])
        value = self._hash
        limit = min(max_tokens, self._config.n_max)
        for position in range(limit):
            token = self.pool.get(value % slots)
            if token is None and self._store is not None:
                token = self._store.get(value % slots)
            if token is None:
                break
            value = self._roll(value, chain[position], token)
            chain.append(token)
        drafted = chain[n:]
        return Proposal(drafted) if len(drafted) >= min(self._config.n_min, limit) else Proposal()


class PoolStrategy(Strategy):
    """
    `ngram-mod`.

    The shared store is one more pool of the same size. A request's slots enter it when the request
    ends; a later n-gram in the same slot replaces the earlier one, so that it cannot grow.
    """

    def __init__(self, config: NgramModConfig) -> None:
        self._config = config
        self.store: dict[int, TokenId] | None = {} if config.shared_store else None

    def index(self, history: Sequence[TokenId], num_prompt: int) -> HistoryIndex:  # noqa: ARG002 - one pool for all
        return PoolIndex(history, self._config, self.store)

    def retire(self, index: HistoryIndex, num_prompt: int) -> None:  # noqa: ARG002 - the prompt is shared too
        if self.store is not None and isinstance(index, PoolIndex):
            self.store.update(index.pool)
