"""Cutting, checkpoints and failures: afterwards a sequence computes what it would have computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from power_core.errors import BackendError

KINDS = ("llama", "gemma3", "recurrent", "hybrid")
CUTTABLE = ("llama", "gemma3")
Words = Callable[..., list[int]]


@pytest.mark.parametrize("low", [1, 2, 8])
@pytest.mark.parametrize("kind", CUTTABLE)
@pytest.mark.parametrize("kept", [0, 4, 8, 28, 32, 36])
def test_truncated_sequence_continues_like_a_fresh_one(
    bench: Any, random_words: Words, kind: str, low: int, kept: int
) -> None:
    """Dropping any suffix leaves the state of a sequence that never had it, around a window of 32 too."""
    session = bench.session(kind, low=low)
    session.open(0)
    tokens, other = random_words(1, 40), random_words(2, 4)
    for start in range(0, 40, 4):
        bench.feed(session, 0, tokens[start : start + 4])
    assert session.can_truncate(0, kept)
    session.truncate(0, kept)
    assert session.length(0) == kept
    assert np.array_equal(bench.feed(session, 0, other), bench.fresh(kind, tokens[:kept] + other, 4, low=low))


@pytest.mark.parametrize("low", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 4, 36])
def test_checkpoint_can_be_restored_again_and_again(
    bench: Any, random_words: Words, kind: str, low: int, length: int
) -> None:
    """Every restore gives the checkpoint's state back, whatever was evaluated since."""
    session = bench.session(kind, low=low)
    session.open(0)
    tokens = random_words(1, length)
    for start in range(0, length, 4):
        bench.feed(session, 0, tokens[start : start + 4])
    checkpoint = session.checkpoint(0, 8)
    for seed in (3, 4, 5):
        other = random_words(seed, 4)
        got = bench.feed(session, 0, other)
        assert np.array_equal(got, bench.fresh(kind, tokens + other, 4, low=low))
        assert session.can_restore(0, checkpoint)
        session.restore(0, checkpoint)
        assert session.length(0) == length


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_of_replaced_rows_cannot_be_restored(bench: Any, random_words: Words, kind: str) -> None:
    """A checkpoint stands for rows, not for a length: other rows of the same number are not it."""
    session = bench.session(kind)
    session.open(0)
    empty = session.checkpoint(0, 4)
    bench.feed(session, 0, random_words(1, 4))
    checkpoint = session.checkpoint(0, 4)
    session.restore(0, empty)
    bench.feed(session, 0, random_words(2, 8))
    assert not session.can_restore(0, checkpoint)
    with pytest.raises(BackendError, match="cannot be brought back"):
        session.restore(0, checkpoint)
    session.close(0)
    session.open(0)
    assert not session.can_restore(0, checkpoint)


def test_recurrent_depth_is_what_the_last_forward_left(bench: Any, random_words: Words) -> None:
    """The window is min(S, rows - 1) rows of the last forward, for one cut; llama.cpp itself would accept more."""
    session = bench.session("hybrid", rollback_rows=4, max_sequences=2)
    assert session.rollback_capacity == 4
    session.open(0)
    session.open(1)
    bench.feed(session, 0, random_words(1, 8))
    assert [session.can_truncate(0, n) for n in (3, 4, 7, 8)] == [False, True, True, True]
    session.truncate(0, 6)
    assert not session.can_truncate(0, 5)  # a second cut before the next forward
    bench.feed(session, 0, random_words(2, 3))
    assert [session.can_truncate(0, n) for n in (6, 7)] == [False, True]
    bench.feed(session, 1, random_words(3, 2))
    assert not session.can_truncate(0, 8)  # another forward may have moved the state
    with pytest.raises(BackendError, match="cannot be cut"):
        session.truncate(0, 8)
    assert session.length(0) == 9


def test_recurrent_cut_inside_the_window_is_exact(
    bench: Any, one_class: Callable[[str], None], random_words: Words
) -> None:
    """A cut by resident states continues like a fresh sequence."""
    one_class("hybrid")
    tokens, other = random_words(1, 12), random_words(2, 4)
    for dropped in (1, 2, 3, 4):
        session = bench.session("hybrid", rollback_rows=4)
        session.open(0)
        bench.feed(session, 0, tokens[:4])
        bench.feed(session, 0, tokens[4:])
        session.truncate(0, 12 - dropped)
        got = bench.feed(session, 0, other)
        assert np.array_equal(got, bench.fresh("hybrid", tokens[: 12 - dropped] + other, 4))


def test_recurrent_without_resident_states_has_no_window(bench: Any, random_words: Words) -> None:
    """mamba keeps none whatever is asked for: the capacity that counts is the one llama.cpp granted."""
    session = bench.session("recurrent", rollback_rows=4)
    assert session.rollback_capacity == 0
    session.open(0)
    bench.feed(session, 0, random_words(1, 8))
    assert not session.can_truncate(0, 7)
    assert session.can_truncate(0, 0)


def test_padded_recurrent_sequences_keep_a_window_only_alone(bench: Any) -> None:
    """Padding moves the states of companions, so a capacity that would not last is not claimed."""
    assert bench.session("hybrid", low=2, rollback_rows=4).rollback_capacity == 4
    assert bench.session("hybrid", low=2, rollback_rows=4, max_sequences=2).rollback_capacity == 0


@pytest.mark.parametrize("sequences", [1, 2])
def test_small_window_cache_is_cut_only_where_nothing_was_evicted(
    bench: Any, one_class: Callable[[str], None], random_words: Words, sequences: int
) -> None:
    """After wrapping, the last forward's rows can be cut and far ones cannot."""
    one_class("gemma3")
    session = bench.session("gemma3", swa_full=False, max_sequences=sequences)
    for seq in range(sequences):
        session.open(seq)
    tokens = random_words(1, 400)
    for start in range(0, 400, 4):
        bench.feed_all(session, dict.fromkeys(range(sequences), tokens[start : start + 4]))
    assert not session.can_truncate(0, 100)
    with pytest.raises(BackendError, match="cannot be cut"):
        session.truncate(0, 100)
    session.truncate(0, 396)
    other = random_words(2, 4)
    assert np.array_equal(bench.feed(session, 0, other), bench.fresh("gemma3", tokens[:396] + other, 4))


def failing(real: Callable[..., int], code: int, at: int) -> Callable[..., int]:
    """llama_decode that does its work and then reports *code*, from its call number *at* on."""
    calls = []

    def decode(context: object, batch: object) -> int:
        calls.append(real(context, batch))
        return code if len(calls) > at else calls[-1]

    return decode


@pytest.mark.parametrize("code", [1, 2, -1, -3])
@pytest.mark.parametrize("low", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_failed_forward_changes_no_sequence(
    bench: Any, random_words: Words, monkeypatch: pytest.MonkeyPatch, kind: str, low: int, code: int
) -> None:
    """Rows that llama.cpp evaluated before it failed are gone, also those of sequences decoded before."""
    session = bench.session(kind, low=low, max_sequences=2)
    tokens = {0: random_words(1, 8), 1: random_words(2, 4)}
    for seq, ids in tokens.items():
        session.open(seq)
        for start in range(0, len(ids), 4):
            bench.feed(session, seq, ids[start : start + 4])
    lib = bench.model(kind)._lib
    with monkeypatch.context() as patch:
        patch.setattr(lib, "llama_decode", failing(lib.llama_decode, code, at=0 if low == 1 else 1))
        with pytest.raises(BackendError, match=f"llama_decode returned {code}"):
            bench.feed_all(session, {0: random_words(3, 4), 1: random_words(4, 4)})
    assert [session.length(0), session.length(1)] == [8, 4]
    for seq, ids in tokens.items():
        other = random_words(5 + seq, 4)
        assert np.array_equal(bench.feed(session, seq, other), bench.fresh(kind, ids + other, 4, low=low))


def test_refused_removal_is_an_error_and_changes_nothing(
    bench: Any, random_words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's answer to a removal is read: False means that the rows are still there."""
    session = bench.session("llama")
    session.open(0)
    tokens = random_words(1, 8)
    bench.feed(session, 0, tokens[:4])
    bench.feed(session, 0, tokens[4:])
    with monkeypatch.context() as patch:
        patch.setattr(bench.model("llama")._lib, "llama_memory_seq_rm", lambda *_: False)
        with pytest.raises(BackendError, match="would not cut"):
            session.truncate(0, 4)
    assert session.length(0) == 8
    other = random_words(2, 4)
    assert np.array_equal(bench.feed(session, 0, other), bench.fresh("llama", tokens + other, 4))


def test_sequence_that_cannot_be_brought_back_is_empty(
    bench: Any, random_words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where even the undoing fails, the error says so and nothing wrong is left behind."""
    session = bench.session("llama")
    session.open(0)
    bench.feed(session, 0, random_words(1, 4))
    checkpoint = session.checkpoint(0, 4)
    lib = bench.model("llama")._lib
    remove = lib.llama_memory_seq_rm
    with monkeypatch.context() as patch:
        patch.setattr(lib, "llama_decode", failing(lib.llama_decode, -3, at=0))
        patch.setattr(
            lib, "llama_memory_seq_rm", lambda memory, seq, start, end: start == 0 and remove(memory, seq, 0, end)
        )
        with pytest.raises(BackendError, match=r"sequences \[0\] could not be brought back and are empty now"):
            bench.feed(session, 0, random_words(2, 4))
    assert session.length(0) == 0
    assert not session.can_restore(0, checkpoint)
    tokens = random_words(3, 4)
    assert np.array_equal(bench.feed(session, 0, tokens), bench.fresh("llama", tokens, 4))


def test_refused_snapshot_is_an_error_that_empties_the_sequence(
    bench: Any, random_words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that llama.cpp does not take back leaves nothing half-restored."""
    session = bench.session("hybrid")
    session.open(0)
    bench.feed(session, 0, random_words(1, 4))
    checkpoint = session.checkpoint(0, 4)
    bench.feed(session, 0, random_words(2, 4))
    with monkeypatch.context() as patch:
        patch.setattr(bench.model("hybrid")._lib, "llama_state_seq_set_data_ext", lambda *_: 0)
        with pytest.raises(BackendError, match="it is empty now"):
            session.restore(0, checkpoint)
    assert session.length(0) == 0


@pytest.mark.parametrize(("kind", "low", "resident"), [
    ("llama", 4, 0), ("gemma3", 4, 0), ("recurrent", 4, 0), ("hybrid", 4, 0), ("hybrid", 4, 4), ("hybrid", 8, 4),
])  # fmt: skip
def test_random_walk_never_leaves_the_reference(
    bench: Any, random_words: Words, monkeypatch: pytest.MonkeyPatch, kind: str, low: int, resident: int
) -> None:
    """Any order of forwards, cuts, restores, failures and reopenings computes what each sequence alone does."""
    rnd = random.Random(7)
    session = bench.session(kind, low=low, max_sequences=3, rollback_rows=resident)
    held: dict[int, list[int]] = {seq: [] for seq in range(3)}
    kept: list[tuple[int, list[int], object]] = []
    lib = bench.model(kind)._lib
    for seq in held:
        session.open(seq)
    for step in range(60):
        seq, action = rnd.randrange(3), rnd.choice(["forward", "forward", "fail", "cut", "keep", "restore", "reopen"])
        if action in ("forward", "fail"):
            chains = {s: random_words(step * 3 + s, 4) for s in rnd.sample(range(3), rnd.randint(1, 3))}
            if action == "fail":
                with monkeypatch.context() as patch:
                    patch.setattr(lib, "llama_decode", failing(lib.llama_decode, 2, at=rnd.randrange(len(chains))))
                    with pytest.raises(BackendError):
                        bench.feed_all(session, chains)
                continue
            for s, got in bench.feed_all(session, chains).items():
                held[s] += chains[s]
                assert np.array_equal(got, bench.fresh(kind, held[s], 4, low=low)), (step, s)
        elif action == "cut" and session.can_truncate(seq, max(0, len(held[seq]) - 4)):
            session.truncate(seq, max(0, len(held[seq]) - 4))
            del held[seq][-4:]
        elif action == "keep":
            kept.append((seq, list(held[seq]), session.checkpoint(seq, 4)))
        elif action == "restore" and kept:
            seq, tokens, checkpoint = rnd.choice(kept)
            if session.can_restore(seq, checkpoint):
                session.restore(seq, checkpoint)
                held[seq] = list(tokens)
        elif action == "reopen" and rnd.random() < 0.3:
            session.open(seq)
            held[seq] = []
    assert [session.length(seq) for seq in held] == [len(tokens) for tokens in held.values()]
