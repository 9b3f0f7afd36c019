"""Copies of a sequence's state: what is loaded computes, bit for bit, what was evaluated."""

import numpy as np
import pytest

from power_core.errors import BackendError
from power_core.prefix import PrefixSource
from power_core.types import Capability

CUTTABLE = ["llama", "gemma3"]
WHOLE = ["recurrent", "hybrid"]


def filled(bench, kind, tokens, **options):
    """A session whose sequence 0 holds *tokens*, and its store."""
    session = bench.session(kind, max_sequences=3, rollback_rows=3, **options)
    session.open(0)
    for start in range(0, len(tokens), bench.width):
        bench.feed(session, 0, tokens[start : start + bench.width])
    return session, session.prefix_store()


@pytest.mark.parametrize("kind", [*CUTTABLE, *WHOLE, "llama+lora", "hybrid+lora"])
def test_a_loaded_copy_goes_on_as_the_original(bench, random_words, kind):
    """Into another sequence beside others, and into another session; the original goes on undisturbed."""
    tokens, more = random_words(1, 12), random_words(2, 8)
    session, store = filled(bench, kind, tokens)
    snapshot = store.save(0)
    session.open(2)
    store.load(2, snapshot, 12)
    other, there = filled(bench, kind, random_words(3, 8))
    other.open(1)
    there.load(1, snapshot, 12)
    expected = bench.feed(session, 0, more[:4]), bench.feed(session, 0, more[4:])
    for opened, seq in ((session, 2), (other, 1)):
        assert opened.length(seq) == 12
        got = bench.feed(opened, seq, more[:4]), bench.feed(opened, seq, more[4:])
        assert all(np.array_equal(one, two) for one, two in zip(got, expected, strict=True))


@pytest.mark.parametrize("kind", CUTTABLE)
def test_attention_is_loaded_in_part(bench, random_words, kind):
    """The first 8 of 12 tokens, then others: as if those alone had been evaluated."""
    tokens, more = random_words(1, 12), random_words(4, 4)
    session, store = filled(bench, kind, tokens)
    session.open(1)
    store.load(1, store.save(0), 8)
    assert np.array_equal(bench.feed(session, 1, more), bench.fresh(kind, tokens[:8] + more, 4))


@pytest.mark.parametrize("kind", WHOLE)
def test_recurrent_state_is_loaded_whole_or_not_at_all(bench, random_words, kind):
    session, store = filled(bench, kind, random_words(1, 12))
    session.open(1)
    with pytest.raises(BackendError, match="cannot be loaded as one of 8"):
        store.load(1, store.save(0), 8)
    assert session.length(1) == 0


@pytest.mark.parametrize("kind", CUTTABLE + WHOLE)
def test_a_loaded_sequence_is_rolled_back_like_any_other(bench, random_words, kind):
    """A checkpoint after a load is restored; one from before it is not mistaken for it."""
    tokens, more = random_words(1, 12), random_words(2, 4)
    session, store = filled(bench, kind, tokens)
    snapshot = store.save(0)
    stale = session.checkpoint(0, 4)
    session.close(0)
    session.open(0)
    store.load(0, snapshot, 12)
    assert not session.can_restore(0, stale)
    point = session.checkpoint(0, 4)
    first = bench.feed(session, 0, more)
    session.restore(0, point)
    assert np.array_equal(bench.feed(session, 0, more), first)


def test_a_window_is_copied_only_while_it_holds_everything(bench, random_words):
    """Beyond it a copy would leave out rows, and what is evaluated after it would lie in other cells."""
    window = bench.model("gemma3").window
    session, store = filled(bench, "gemma3", random_words(1, window + 4))
    assert store.save(0) is None
    session.truncate(0, window)
    assert store.save(0).length == window


def test_memory_that_forgets_offers_no_copies(bench):
    """It fails closed: where cells are reused, a copy cannot be proved."""
    assert Capability.PREFIX_REUSE not in bench.session("gemma3", swa_full=False).capabilities
    assert all(isinstance(bench.session(kind), PrefixSource) for kind in CUTTABLE + WHOLE)


@pytest.mark.parametrize("kind", CUTTABLE + WHOLE)
def test_bytes_come_back_as_the_same_copy(bench, random_words, kind):
    """And what is no copy, or one of another kind of memory, is refused before llama.cpp sees it."""
    tokens, more = random_words(1, 12), random_words(2, 4)
    session, store = filled(bench, kind, tokens)
    data = store.to_bytes(store.save(0))
    session.open(1)
    store.load(1, store.from_bytes(data), 12)
    assert np.array_equal(bench.feed(session, 1, more), bench.feed(session, 0, more))
    for bad in (b"", data[:8], b"?" + data[1:], data[:12] + bytes([data[12] ^ 1]) + data[13:]):
        with pytest.raises(BackendError, match="holds no state"):
            store.from_bytes(bad)


@pytest.mark.parametrize("kind", ["llama", "recurrent"])
def test_a_refused_copy_leaves_the_sequence_empty_and_usable(bench, random_words, kind):
    tokens = random_words(1, 8)
    session, store = filled(bench, kind, tokens)
    whole = store.save(0)
    broken = store.from_bytes(store.to_bytes(whole)[: -whole.nbytes // 2])
    session.open(1)
    with pytest.raises(BackendError, match="would not load"):
        store.load(1, broken, 8)
    assert session.length(1) == 0
    assert np.array_equal(bench.feed(session, 1, tokens[:4]), bench.fresh(kind, tokens[:4], 4))
