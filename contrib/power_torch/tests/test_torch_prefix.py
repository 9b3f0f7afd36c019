"""Copies of a sequence's rows: what is loaded computes, bit for bit, what was evaluated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from power_core.errors import BackendError
from power_core.prefix import PrefixSource

KINDS = [("llama", "fp32"), ("llama", "bf16"), ("gemma3", "fp32")]


@pytest.fixture
def filled(model: Any, open_session: Any, feed: Any) -> Any:
    """Opens a session whose sequence 0 holds some tokens, evaluated as a prompt, and its store."""

    def fill(kind: str, dtype: str, tokens: list[int], **options: Any) -> Any:
        session = open_session(model(kind, dtype=dtype), max_sequences=3, **options)
        session.open(0)
        feed(session, 0, tokens, prompt=True)
        return session, session.prefix_store()

    return fill


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_a_loaded_copy_goes_on_as_the_original(kind: str, dtype: str, filled: Any, feed: Any, words: Any) -> None:
    """Whole, in part and into another session, past the window of gemma3 and across a span of the cache."""
    tokens, more = words(1, 125), words(2, 9)
    session, store = filled(kind, dtype, tokens)
    snapshot = store.save(0)
    other, there = filled(kind, dtype, words(3, 40))
    for opened, seq, loader, length in ((session, 2, store, 125), (other, 1, there, 125), (session, 1, store, 77)):
        opened.open(seq)
        loader.load(seq, snapshot, length)
        assert opened.length(seq) == length
        session.truncate(0, length)
        expected = feed(session, 0, more)
        assert np.array_equal(feed(opened, seq, more), expected)


def test_a_copy_is_its_own(filled: Any, feed: Any, words: Any) -> None:
    """Neither what its sequence does later, nor what is done after a load, changes it; bytes are counted."""
    session, store = filled("llama", "fp32", words(1, 20))
    snapshot = store.save(0)
    kept = snapshot.payload.copy()
    session.close(0)
    for seq in (0, 1):
        session.open(seq)
        store.load(seq, snapshot, 20)
        session.truncate(seq, 4)
        feed(session, seq, words(4, 16))
    assert np.array_equal(snapshot.payload, kept)
    assert (snapshot.nbytes, snapshot.length, snapshot.can_cut) == (2 * 2 * 2 * 20 * 16 * 4, 20, True)
    assert isinstance(session, PrefixSource)


def test_a_loaded_sequence_is_rolled_back_like_any_other(filled: Any, feed: Any, words: Any) -> None:
    """A checkpoint after a load is restored; one from before it is not mistaken for it."""
    tokens, more = words(1, 24), words(2, 4)
    session, store = filled("llama", "fp32", tokens)
    snapshot, stale = store.save(0), session.checkpoint(0, 4)
    session.close(0)
    session.open(0)
    store.load(0, snapshot, 24)
    assert not session.can_restore(0, stale)
    point = session.checkpoint(0, 4)
    first = feed(session, 0, more)
    session.restore(0, point)
    assert np.array_equal(feed(session, 0, more), first)


def test_bytes_come_back_as_the_same_copy(filled: Any, feed: Any, words: Any) -> None:
    """And what is no copy, is cut short, or is another model's, is refused before a row is written."""
    session, store = filled("llama", "fp32", words(1, 20))
    data = store.to_bytes(store.save(0))
    session.open(1)
    store.load(1, store.from_bytes(data), 20)
    more = words(2, 4)
    assert np.array_equal(feed(session, 1, more), feed(session, 0, more))
    foreign, other = filled("gemma3", "fp32", words(1, 20))
    foreign.open(2)
    for bad in (b"", data[:8], data[:-4], data + b"\0\0\0\0", b"?" + data[1:], other.to_bytes(other.save(0))):
        with pytest.raises(BackendError, match="holds no state of this model"):
            store.from_bytes(bad)
    with pytest.raises(BackendError, match="do not fit this model"):
        other.load(2, store.save(0), 20)
    assert foreign.length(2) == 0


def test_a_copy_is_loaded_into_an_empty_sequence_only(filled: Any, words: Any) -> None:
    """An empty sequence has no copy, a longer one than was copied none either, and nothing is overwritten."""
    session, store = filled("llama", "fp32", words(1, 20))
    snapshot = store.save(0)
    session.open(1)
    assert store.save(1) is None
    for seq, length, found in ((0, 20, "holds 20 positions"), (1, 21, "no copy of a state"), (1, 0, "no copy")):
        with pytest.raises(BackendError, match=found):
            store.load(seq, snapshot, length)
    assert (session.length(0), session.length(1)) == (20, 0)
    small, there = filled("llama", "fp32", words(1, 4), context_size=16)
    small.open(1)
    with pytest.raises(BackendError, match="do not fit this model and context"):
        there.load(1, snapshot, 20)
