"""Forwards: the same numbers as llama.cpp driven by hand, inside the width class, or refused before native code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from power_llamacpp.config import LlamaCppConfig
from power_llamacpp.context import NativeModel
from power_llamacpp.gguf_check import check_gguf
from power_llamacpp.native import library
from power_llamacpp.session import LlamaCppSession

from power_core.errors import BackendError, ConfigError
from power_core.shapes import ExactnessLevel, ShapeIdentity, ShapeProfile, WidthClass
from power_core.target import RowBatch, SessionOptions
from power_core.testing import one_class as scripted_one_class

KINDS = ("llama", "gemma3", "recurrent", "hybrid")
Words = Callable[..., list[int]]


def by_hand(model: NativeModel, prompt: list[int], steps: int) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Greedy ids and the last row of a one-token loop on llama-cpp-python alone, sharing nothing with the session."""
    lib = library()
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 512, 128, 128
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type, params.kv_unified, params.swa_full = 0, False, True
    context = lib.llama_init_from_model(model.handle, params)
    ids, todo = [], list(prompt)
    for position in range(len(prompt) + steps):
        token = ctypes.c_int32(todo.pop(0) if todo else ids[-1])
        assert lib.llama_decode(context, lib.llama_batch_get_one(ctypes.pointer(token), 1)) == 0
        row = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(model.vocab_size,)).copy()
        if position >= len(prompt) - 1:
            ids.append(int(row.argmax()))
    lib.llama_free(context)
    return ids[:steps], row


def through_session(session: LlamaCppSession, prompt: list[int], steps: int) -> tuple[list[int], Any]:
    session.open(0)
    batch, ids, todo = RowBatch(1), [], list(prompt)
    for position in range(len(prompt) + steps):
        batch.clear()
        batch.add_chain(0, position, [todo.pop(0) if todo else ids[-1]], 1)
        rows = session.forward(batch, session.profile.decode)
        assert rows.width == 1
        if position >= len(prompt) - 1:
            ids.append(rows.greedy(0))
    return ids[:steps], rows.logits(0).copy()


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_loop_equals_llama_cpp_by_hand(bench: Any, random_words: Words, kind: str) -> None:
    """Ids and logits of plain decoding are bit for bit those of a loop on the raw binding."""
    prompt = random_words(1, 10)
    ids, row = through_session(bench.session(kind), prompt, 40)
    expected_ids, expected_row = by_hand(bench.model(kind), prompt, 40)
    assert ids == expected_ids
    assert np.array_equal(row, expected_row)


@pytest.mark.model
def test_one_token_loop_of_a_real_model_equals_llama_cpp_by_hand(smollm2: Path) -> None:
    """The same on SmolLM2."""
    model = NativeModel(smollm2)
    profile = scripted_one_class()(SessionOptions(max_rows=4))
    session = LlamaCppSession(
        model,
        SessionOptions(context_size=256, threads=1),
        profile=profile,
        config=LlamaCppConfig(),
        info=check_gguf(smollm2),
    )
    ids, row = through_session(session, [504, 3575, 282, 4649, 314], 12)
    expected_ids, expected_row = by_hand(model, [504, 3575, 282, 4649, 314], 12)
    assert ids == expected_ids
    assert np.array_equal(row, expected_row)
    model.close()


@pytest.mark.parametrize("low", [1, 2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_batch_companions_change_nothing(
    bench: Any, one_class: Callable[[str], None], random_words: Words, kind: str, low: int
) -> None:
    """Rows of a sequence are the same with two other sequences, of other lengths, in each forward."""
    if low == 1:
        one_class(kind)
    session = bench.session(kind, low=low, max_sequences=3)
    for seq in (2, 0, 1):
        session.open(seq)
    tokens = random_words(1, 16)
    for start in range(0, 16, 4):
        chains = {2: random_words(start, 7), 0: tokens[start : start + 4], 1: random_words(start + 1, 1)}
        got = bench.feed_all(session, chains)[0]
        assert np.array_equal(got, bench.fresh(kind, tokens[: start + 4], 4, low=low))


@pytest.mark.parametrize(("kind", "low", "rows", "width"), [
    ("llama", 1, 3, 3), ("llama", 2, 1, 2), ("llama", 8, 3, 8), ("llama", 8, 9, 9),
    ("recurrent", 1, 1, 1), ("recurrent", 2, 1, 2), ("hybrid", 8, 3, 9), ("hybrid", 8, 1, 8), ("hybrid", 8, 5, 10),
])  # fmt: skip
def test_width_counts_pad_rows_and_they_leave_no_trace(
    bench: Any, random_words: Words, kind: str, low: int, rows: int, width: int
) -> None:
    """A step is computed at a width of its class; afterwards the sequence holds the step's own rows only."""
    session = bench.session(kind, low=low, max_sequences=2)
    session.open(1)
    batch = RowBatch(16)
    batch.add_chain(1, 0, random_words(1, rows), rows)
    assert session.forward(batch, session.profile.decode).width == width
    assert session.length(1) == rows
    native = session._context
    held = [native.last_position(seq) for seq in range(native.settings.max_sequences)]
    assert sorted(held)[-1] == rows - 1
    assert held.count(-1) == len(held) - 1


def test_outputs_are_widened_into_the_decode_class(bench: Any, random_words: Words) -> None:
    """The output matrix sees as many rows as the class wants, also where a chunk reads its last row only."""
    session = bench.session("llama", low=8)
    session.open(0)
    batch = RowBatch(32)
    batch.add_chain(0, 0, random_words(1, 20), 1)
    rows = session.forward(batch, session.profile.prefill)
    assert int(np.count_nonzero(session._context.batch.outputs[:20])) == 8
    assert rows.greedy(19) == int(bench.fresh("llama", random_words(1, 20), 1, low=8)[0].argmax())
    with pytest.raises(BackendError, match="row 18 has no output"):
        rows.greedy(18)


@pytest.mark.parametrize("length", [40, 63, 64, 65])
def test_context_holds_exactly_the_positions_asked_for(bench: Any, random_words: Words, length: int) -> None:
    """llama.cpp rounds 64 positions up to 256; the session does not."""
    session = bench.session("llama", context=64)
    session.open(0)
    assert session.context_size == 64
    batch = RowBatch(128)
    batch.add_chain(0, 0, random_words(1, length), 1)
    if length > 64:
        with pytest.raises(BackendError, match=f"would hold {length} positions"):
            session.forward(batch, session.profile.prefill)
        assert session.length(0) == 0
    else:
        session.forward(batch, session.profile.prefill)
        assert session.length(0) == length


def refused(session: LlamaCppSession, batch: RowBatch, message: str) -> None:
    with pytest.raises(BackendError, match=message) as caught:
        session.forward(batch, session.profile.decode)
    assert caught.value.plugin == "llamacpp"
    assert "\n" not in str(caught.value)


def chain(session_length: int, tokens: list[int], seq: int = 0) -> RowBatch:
    batch = RowBatch(64)
    batch.add_chain(seq, session_length, tokens, len(tokens))
    return batch


@pytest.mark.parametrize("token", [-1, 320, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(bench: Any, token: int) -> None:
    """llama.cpp never sees an id it would read out of bounds with."""
    session = bench.session("llama")
    session.open(0)
    refused(session, chain(0, [5, token]), f"token id {token} is not in the vocabulary")


def test_rows_that_do_not_fit_are_refused_before_native_code(
    bench: Any, random_words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gaps, trees, doubled or closed sequences, wide steps and empty batches raise; nothing is evaluated."""
    session = bench.session("llama", max_sequences=2)
    session.open(0)
    monkeypatch.setattr(bench.model("llama")._lib, "llama_decode", lambda *_: pytest.fail("evaluated"))
    refused(session, RowBatch(4), "no rows")
    refused(session, chain(1, [5]), "continues at position 1")
    refused(session, chain(0, [5], seq=1), "sequence 1 is not open")
    refused(session, chain(0, random_words(1, 25)), "do not fit the width class")
    tree = chain(0, [5, 6, 7])
    tree.parents[2] = 0
    refused(session, tree, "tree")
    gap = chain(0, [5, 6])
    gap.positions[1] = 2
    refused(session, gap, "does not continue its parent")
    double = chain(0, [5])
    double.add_chain(0, 0, [6], 1)
    refused(session, double, "two chains")
    assert session.length(0) == 0


def test_more_outputs_than_reserved_are_refused(bench: Any, random_words: Words) -> None:
    """llama.cpp asserts on them."""
    session = bench.session("llama", max_rows=4)
    session.open(0)
    with pytest.raises(BackendError, match="64 outputs are asked for"):
        session.forward(chain(0, random_words(1, 64)), session.profile.prefill)


def test_rows_are_views_that_end_with_the_next_forward(bench: Any) -> None:
    """No vocabulary row is copied, none can be written to, and none is read after its memory was reused."""
    session = bench.session("llama")
    session.open(0)
    rows = session.forward(chain(0, [5, 6]), session.profile.decode)
    assert rows.logits(0).base is not None
    assert not rows.logits(0).flags.writeable
    session.truncate(0, 1)
    assert rows.greedy(0) == int(rows.logits(0).argmax())
    session.forward(chain(1, [7]), session.profile.decode)
    with pytest.raises(BackendError, match="these rows are gone"):
        rows.greedy(0)


def test_closed_session_is_an_error_not_a_crash(bench: Any) -> None:
    """Every call after shutdown says what happened; shutdown and close may be repeated."""
    session = bench.session("llama")
    session.open(0)
    rows = session.forward(chain(0, [5]), session.profile.decode)
    checkpoint = session.checkpoint(0, 1)
    session.shutdown()
    session.shutdown()
    session.close(0)
    calls: list[Callable[[], object]] = [
        lambda: session.open(0), lambda: session.length(0), lambda: session.truncate(0, 0),
        lambda: session.can_truncate(0, 0), lambda: session.checkpoint(0, 1),
        lambda: session.restore(0, checkpoint), lambda: session.forward(chain(1, [5]), session.profile.decode),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(BackendError, match="the session is closed"):
            call()
    with pytest.raises(BackendError, match="these rows are gone"):
        rows.logits(0)


def test_weights_are_freed_after_their_contexts(bench: Any, tmp_path: Path) -> None:
    """Closing a model closes sessions over it first; their rows and calls are errors afterwards."""
    path = bench.model("llama").path
    model = NativeModel(path)
    profile = scripted_one_class()(SessionOptions())
    session = LlamaCppSession(
        model, SessionOptions(context_size=64), profile=profile, config=LlamaCppConfig(), info=check_gguf(path)
    )
    session.open(0)
    rows = session.forward(chain(0, [5]), session.profile.decode)
    model.close()
    model.close()
    with pytest.raises(BackendError, match="these rows are gone"):
        rows.greedy(0)
    with pytest.raises(BackendError, match="the session is closed"):
        session.length(0)
    session.shutdown()


def test_damaged_weights_are_an_error_not_token_zero(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp reports success for NaN; ids and logits of such rows are refused, ties go to the lowest id."""
    session = bench.session("llama")
    session.open(0)
    rows = session.forward(chain(0, [5, 6]), session.profile.decode)
    logits = np.zeros((2, 320), np.float32)
    monkeypatch.setattr(rows, "_logits", logits)
    logits[0, [7, 9]] = 3
    assert rows.greedy(0) == 7
    for value in (np.nan, np.inf):
        logits[1, 200] = value
        for read in (rows.greedy, rows.logits):
            with pytest.raises(BackendError, match="largest logit of row 1 is"):
                read(1)
    logits[1] = -np.inf
    logits[1, 3] = 0
    assert rows.greedy(1) == 3


def test_context_beyond_the_training_length_is_refused(bench: Any) -> None:
    """The file's own limit holds; the default is the smaller of it and 4096."""
    with pytest.raises(ConfigError, match="context_size is 2049"):
        bench.session("llama", context=2049)
    assert bench.session("llama", context=None).context_size == 2048


def test_prompt_and_decode_classes_may_differ(bench: Any, random_words: Words) -> None:
    """A prompt chunk of a class without small widths is padded, and single rows after it are not."""
    wide = WidthClass(ShapeIdentity("wide"), tuple(range(8, 65)))
    narrow = WidthClass(ShapeIdentity("narrow"), tuple(range(1, 8)))
    session = LlamaCppSession(
        bench.model("llama"), SessionOptions(context_size=64, max_rows=7),
        profile=ShapeProfile(ExactnessLevel.BITWISE, narrow, wide), config=LlamaCppConfig(),
        info=check_gguf(bench.model("llama").path),
    )  # fmt: skip
    session.open(0)
    assert session.forward(chain(0, random_words(1, 5)), wide).width == 8
    assert session.forward(chain(5, [5]), narrow).width == 1
    assert session.length(0) == 6
    session.shutdown()
