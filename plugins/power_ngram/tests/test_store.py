"""The shared store: off by default, bounded, fed by ended requests only."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from power_ngram.config import NgramModConfig, SuffixConfig
from power_ngram.drafter import Config, open_history
from power_ngram.pool import PoolStrategy
from power_ngram.session import HistorySession
from power_ngram.suffix import SuffixStore

from power_core.drafter import DraftRequest, Proposal

Propose = Callable[[HistorySession, int, int, int], Proposal]
ANSWER = [50, 51, 52, 53, 54, 55, 56, 57, 58, 59]
SHARED: tuple[Config, ...] = (
    SuffixConfig(shared_store=True, min_confidence=0.0),
    NgramModConfig(shared_store=True, n_match=3),
)
PRIVATE: tuple[Config, ...] = (SuffixConfig(min_confidence=0.0), NgramModConfig(n_match=3))


def answered(config: Config) -> HistorySession:
    """A session in which one request answered ANSWER and ended."""
    session = open_history(config)
    session.begin(0, [1, 2])
    session.observe(0, ANSWER, None)
    session.propose([DraftRequest(0, ANSWER[-1], 4)])
    session.end(0)
    return session


@pytest.mark.parametrize("config", SHARED, ids=lambda config: config.strategy)
def test_an_ended_answer_helps_a_later_request(config: Config, propose: Propose) -> None:
    """With the store on, a later request continues what an earlier one answered."""
    session = answered(config)
    session.begin(1, [7, 8, *ANSWER[:5]])
    assert list(propose(session, 1, ANSWER[4], 5).token_ids) == ANSWER[5:]


@pytest.mark.parametrize("config", PRIVATE, ids=lambda config: config.strategy)
def test_off_nothing_is_visible(config: Config, propose: Propose) -> None:
    """With the store off, the same request gets nothing from the one before."""
    session = answered(config)
    session.begin(1, [7, 8, *ANSWER[:5]])
    assert list(propose(session, 1, ANSWER[4], 5).token_ids) == []


@pytest.mark.parametrize("config", SHARED, ids=lambda config: config.strategy)
def test_open_and_restored_tokens_stay_out(config: Config, propose: Propose) -> None:
    """Neither a request that still runs nor tokens that were restored away reach another request."""
    session = open_history(config)
    session.begin(0, [1, 2])
    checkpoint = session.checkpoint(0)
    session.observe(0, ANSWER, None)
    session.begin(1, [7, 8, *ANSWER[:5]])
    assert list(propose(session, 1, ANSWER[4], 5).token_ids) == []
    session.restore(0, checkpoint)
    session.end(0)
    assert list(propose(session, 1, ANSWER[4], 5).token_ids) == []


@pytest.mark.parametrize("config", SHARED, ids=lambda config: config.strategy)
def test_restore_holds_beside_the_store(config: Config, propose: Propose) -> None:
    """A request's own restored step never happened, store or not."""
    session = answered(config)
    session.begin(1, [7, 8, *ANSWER[:5]])
    before = propose(session, 1, ANSWER[4], 5)
    checkpoint = session.checkpoint(1)
    session.observe(1, [70, 71], None)
    session.restore(1, checkpoint)
    assert propose(session, 1, ANSWER[4], 5) == before


def test_prompts_stay_out_of_the_suffix_store(propose: Propose) -> None:
    """Only what a request answered is shared, not what it was asked."""
    session = open_history(SuffixConfig(shared_store=True, min_confidence=0.0))
    session.begin(0, ANSWER)
    session.observe(0, [70, 71, 72], None)
    session.end(0)
    session.begin(1, [7, 8, *ANSWER[:5]])
    assert list(propose(session, 1, ANSWER[4], 5).token_ids) == []


def test_the_own_history_wins_a_tie(propose: Propose) -> None:
    """What the request itself repeated comes before what another one answered."""
    session = answered(SuffixConfig(shared_store=True, min_confidence=0.0))
    session.begin(1, [*ANSWER[:3], 90, 91, 92, *ANSWER[:3]])
    assert list(propose(session, 1, ANSWER[2], 3).token_ids) == [90, 91, 92]


def test_the_suffix_store_is_bounded_and_drops_the_oldest() -> None:
    """It never holds more than `store_tokens`, keeps the latest answers and forgets the first ones."""
    store = SuffixStore(SuffixConfig(shared_store=True, store_tokens=200))
    for start in range(0, 5000, 50):
        store.add(range(start, start + 50))
        assert len(store) <= 200
        assert store.best(range(start, start + 9), 3).tokens == [start + 9, start + 10, start + 11]
    assert store.best(range(9), 3).tokens == []


def test_an_answer_longer_than_the_store_keeps_its_end() -> None:
    """Of an answer that does not fit, the last tokens are kept."""
    store = SuffixStore(SuffixConfig(shared_store=True, store_tokens=100))
    store.add(range(1000))
    assert len(store) <= 100
    assert store.best(range(980, 990), 2).tokens == [990, 991]
    assert store.best(range(10), 2).tokens == []


def test_no_match_spans_two_answers() -> None:
    """The end of one answer is not continued by the beginning of the next."""
    store = SuffixStore(SuffixConfig(shared_store=True, min_confidence=0.0))
    store.add([1, 2, 3, 4])
    store.add([5, 6, 7, 8])
    assert store.best([1, 2, 3], 6).tokens == [4]
    assert store.best([3, 4], 6).tokens == []


def test_the_pool_is_bounded() -> None:
    """Own pool and store have `pool_size` slots, however much is hashed into them."""
    strategy = PoolStrategy(NgramModConfig(shared_store=True, pool_size=64, n_match=2))
    draw = random.Random(5)
    for _ in range(3):
        index = strategy.index([draw.randrange(1000) for _ in range(2000)], 2000)
        index.advance()
        strategy.retire(index, 2000)
        assert strategy.store is not None
        assert len(strategy.store) <= 64
