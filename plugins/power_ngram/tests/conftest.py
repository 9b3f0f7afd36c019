"""Fixtures: each strategy with options small enough for tiny texts, and a one-sequence shorthand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from power_ngram.config import NgramContextConfig, NgramMapConfig, NgramModConfig, PromptLookupConfig, SuffixConfig
from power_ngram.drafter import Config, open_history
from power_ngram.session import HistorySession

from power_core.drafter import DraftRequest, Proposal

SMALL: tuple[Config, ...] = (
    PromptLookupConfig(n_max=3, n_min=1),
    NgramContextConfig(n_max=3, n_min=1),
    NgramModConfig(n_match=2),
    NgramMapConfig(key_size=2, value_size=3),
    SuffixConfig(min_confidence=0.0),
)
DEFAULT: tuple[Config, ...] = tuple(type(config)() for config in SMALL)


@pytest.fixture(scope="module", params=SMALL, ids=lambda config: config.strategy)
def small(request: pytest.FixtureRequest) -> Config:
    return request.param  # type: ignore[no-any-return]  # pytest's params are untyped


@pytest.fixture(scope="module", params=DEFAULT, ids=lambda config: config.strategy)
def default(request: pytest.FixtureRequest) -> Config:
    return request.param  # type: ignore[no-any-return]  # pytest's params are untyped


@pytest.fixture
def propose() -> Callable[[HistorySession, int, int, int], Proposal]:
    """``propose(session, seq, anchor, max_tokens)``: the proposal of one sequence."""

    def call(session: HistorySession, seq: int, anchor: int, max_tokens: int) -> Proposal:
        return session.propose([DraftRequest(seq, anchor, max_tokens)])[0]

    return call


@pytest.fixture
def draft() -> Callable[[Config, Sequence[int], int], Proposal]:
    """``draft(config, tokens, max_tokens)``: the proposal of a new session after the prompt *tokens*."""

    def call(config: Config, tokens: Sequence[int], max_tokens: int) -> Proposal:
        session = open_history(config)
        session.begin(0, tokens)
        return session.propose([DraftRequest(0, tokens[-1], max_tokens)])[0]

    return call
