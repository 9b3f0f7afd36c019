"""Drafters evaluated by llama.cpp: what they answer, what they leave alone and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray
from power_llamacpp import extension
from power_llamacpp.config import LlamaCppConfig
from power_llamacpp.gguf_check import check_gguf
from power_llamacpp.session import LlamaCppSession
from power_llamacpp.target import LlamaCppModel

from power_core.draft_context import NEXTN_STATE, DraftBlock, DraftContext, DraftContextHost
from power_core.errors import ArtifactError, BackendError, CapabilityError
from power_core.shapes import ExactnessLevel, ShapeIdentity, ShapeProfile, WidthClass
from power_core.target import RowBatch, SessionOptions
from power_core.testing.draft_reference import BlockReference, LayerReference
from power_core.testing.gguf import tiny_hybrid, tiny_llama
from power_core.testing.gguf_drafts import tiny_dflash, tiny_dflash2, tiny_dspark, tiny_mtp

pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")

CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32 against the reference's float64
BLOCK, LAYERS = 8, (0, 2)
REDUCED = range(3, 203, 2)
WIDTHS = WidthClass(ShapeIdentity("measured elsewhere"), tuple(range(1, 129)))
PROFILE = ShapeProfile(ExactnessLevel.BITWISE, WIDTHS, WIDTHS)
TOKENS = np.random.default_rng(5).integers(3, 320, 60).tolist()


class Lab:
    """Tiny targets and drafters, with F32 caches so that answers can be compared closely."""

    def __init__(self, folder: Path) -> None:
        self.llama = tiny_llama(folder / "llama.gguf", layers=4)
        self.qwen = tiny_hybrid(folder / "qwen.gguf", nextn_layers=1)
        self.v1 = tiny_dflash(folder / "v1.gguf")
        self.reduced = tiny_dflash(folder / "reduced.gguf", draft_vocab=REDUCED)
        self.own = tiny_dflash(folder / "own.gguf", own_matrices=True)
        self.v2 = tiny_dflash2(folder / "v2.gguf")
        self.dspark = tiny_dspark(folder / "dspark.gguf")
        self.dspark_reduced = tiny_dspark(folder / "dsparkr.gguf", draft_vocab=REDUCED)
        self.bonus = tiny_dspark(folder / "bonus.gguf", anchor_first=False)
        self.bare = tiny_dspark(folder / "bare.gguf", anchor_first=False, confidence=False)
        self.mtp = tiny_mtp(folder / "mtp.gguf")
        self.models: dict[Path, LlamaCppModel] = {}
        self.sessions: list[LlamaCppSession] = []

    def session(self, path: Path, **options: Any) -> LlamaCppSession:
        if path not in self.models:
            config = LlamaCppConfig(kv_type="f32")
            self.models[path] = LlamaCppModel(path, check_gguf(path), config, profile=PROFILE)
        layers = (NEXTN_STATE,) if path == self.qwen else LAYERS
        base = SessionOptions(context_size=256, max_sequences=3, hidden_layers=layers, threads=1)
        self.sessions.append(self.models[path].open_session(evolve(base, **options)))
        return self.sessions[-1]

    def close(self) -> None:
        for model in self.models.values():
            model.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture
def session(lab: Lab) -> Iterator[LlamaCppSession]:
    session = lab.session(lab.llama)
    for seq in range(3):
        session.open(seq)
    yield session
    session.shutdown()


def feed(session: LlamaCppSession, seq: int, tokens: list[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits and features of *tokens*, appended to *seq* in one forward; copies."""
    batch = RowBatch(256)
    batch.add_chain(seq, session.length(seq), tokens, len(tokens))
    rows = session.forward(batch, session.profile.decode)
    layers = [layer for layer in (NEXTN_STATE, *LAYERS) if layer in session._context.settings.hidden_layers]
    every = slice(0, len(tokens))
    logits = np.stack([rows.logits(i) for i in range(len(tokens))])
    return logits, np.concatenate([rows.hidden(every, layer) for layer in layers], axis=1)


def block(anchor: int, rows: int = BLOCK) -> list[int]:
    return [anchor] + [0] * (rows - 1)


def logits_of(rows: Any, count: int, first: int = 0) -> NDArray[np.float32]:
    return np.stack([rows.logits(i) for i in range(first, first + count)])


def ready(session: LlamaCppSession, path: Path, features: NDArray[np.float32], seq: int = 0) -> Any:
    """A draft context that holds *features* of *seq* from position 0 on."""
    context = session.open_draft_context(path)
    context.open(seq)
    context.inject(seq, 0, features)
    return context


@pytest.mark.parametrize("name", ["v1", "reduced", "own"])
def test_dflash_logits_are_those_of_the_reference(name: str, lab: Lab, session: LlamaCppSession) -> None:
    """A block of masked rows over injected features; ids outside a reduced vocabulary are -inf."""
    path = getattr(lab, name)
    _, features = feed(session, 0, TOKENS[:20])
    rows = ready(session, path, features).forward([DraftBlock(0, 20, block(TOKENS[20]))])
    reference = BlockReference(path, lab.llama)
    expected = reference.logits(reference.hidden(features, 0, block(TOKENS[20]), 20))
    np.testing.assert_allclose(logits_of(rows, BLOCK), expected, **CLOSE)
    with pytest.raises(CapabilityError, match="nothing beside its logits"):
        rows.extra(0)


def test_dflash2_lattice_is_that_of_the_reference(lab: Lab, session: LlamaCppSession) -> None:
    """Candidates are the largest logits, and each transition has its score; with and without logits read."""
    _, features = feed(session, 0, TOKENS[:20])
    context = ready(session, lab.v2, features)
    reference = BlockReference(lab.v2, lab.llama)
    hidden = reference.hidden(features, 0, block(TOKENS[20]), 20)
    expected = reference.logits(hidden)
    for logits in (True, False):
        rows = context.forward([DraftBlock(0, 20, block(TOKENS[20]))], logits=logits)
        lattice = np.stack([rows.extra(i) for i in range(BLOCK)])
        ids = lattice[:, :4].astype(int).tolist()
        assert [set(row) for row in ids[1:]] == [set(row.argsort()[-4:]) for row in expected[1:]]
        scores = reference.lattice(hidden, expected, TOKENS[20], ids)
        np.testing.assert_allclose(lattice[1:, 4:].reshape(-1, 4, 4), scores, **CLOSE)
        if logits:
            np.testing.assert_allclose(logits_of(rows, BLOCK), expected, **CLOSE)
        else:
            with pytest.raises(BackendError, match="draft row 0 has no logits"):
                rows.logits(0)
        context.truncate(0, 20)


@pytest.mark.parametrize("name", ["dspark", "dspark_reduced", "bonus", "bare"])
def test_dspark_bias_and_confidence_are_those_of_the_reference(name: str, lab: Lab, session: LlamaCppSession) -> None:
    """Rows carry the Markov bias of their own greedy chain, which begins at the anchor's row or behind it."""
    path = getattr(lab, name)
    _, features = feed(session, 0, TOKENS[:20])
    rows = ready(session, path, features).forward([DraftBlock(0, 20, block(TOKENS[20]))])
    reference, first = BlockReference(path, lab.llama), 0 if name.startswith("dspark") else 1
    hidden = reference.hidden(features, 0, block(TOKENS[20]), 20)
    logits, confidences = reference.markov(hidden, reference.logits(hidden), TOKENS[20], first)
    np.testing.assert_allclose(logits_of(rows, BLOCK), logits, **CLOSE)
    if name == "bare":
        with pytest.raises(CapabilityError, match="nothing beside its logits"):
            rows.extra(1)
        return
    found = np.concatenate([rows.extra(i) for i in range(first, BLOCK)])
    np.testing.assert_allclose(found, confidences[first:], **CLOSE)


@pytest.mark.parametrize("own", [True, False], ids=["inside the target", "a file of its own"])
def test_prediction_layer_is_that_of_the_reference(own: bool, lab: Lab) -> None:
    """Pairs of a token and the state before it, then steps that feed the layer's own states back."""
    session = lab.session(lab.qwen)
    session.open(0)
    _, states = feed(session, 0, TOKENS[:20])
    context = session.open_draft_context(None if own else lab.mtp)
    context.open(0)
    reference = LayerReference(lab.qwen if own else lab.mtp)
    tokens, hidden = list(TOKENS[1:20]), states[:19].copy()
    rows = context.forward([DraftBlock(0, 0, tokens, hidden, outputs=1)])
    for step in range(4):
        logits, expected = reference.run(tokens, hidden)
        last = 18 if step == 0 else 0
        np.testing.assert_allclose(rows.extra(last), expected[-1], **CLOSE)
        np.testing.assert_allclose(rows.logits(last), logits[-1], **CLOSE)
        choice, state = int(rows.logits(last).argmax()), rows.extra(last).copy()
        tokens, hidden = [*tokens, choice], np.concatenate([hidden, state[np.newaxis]])
        rows = context.forward([DraftBlock(0, 19 + step, [choice], state[np.newaxis])])
    session.shutdown()


@pytest.mark.parametrize("name", ["v1", "v2", "dspark"])
@pytest.mark.parametrize("seqs", [(0, 1, 2), (2, 0), (0, 2)])
def test_sequences_in_one_forward_are_those_of_each_alone(
    name: str, seqs: tuple[int, ...], lab: Lab, session: LlamaCppSession
) -> None:
    """Whatever blocks are beside it, and of whatever size: each block's answers are its own."""
    context = session.open_draft_context(getattr(lab, name))
    blocks = []
    for number, seq in enumerate(seqs):
        _, features = feed(session, seq, TOKENS[seq : 12 + 5 * seq])
        context.open(seq)
        context.inject(seq, 0, features)
        blocks.append(DraftBlock(seq, len(features), block(TOKENS[40 + seq], BLOCK - (number == 1))))
    alone = []
    for one in blocks:
        rows = context.forward([one])
        alone.append(logits_of(rows, len(one.tokens)))
        context.truncate(one.seq, one.position)
    rows, at = context.forward(blocks), 0
    for one, expected in zip(blocks, alone, strict=True):
        np.testing.assert_allclose(logits_of(rows, len(one.tokens), at), expected, **CLOSE)
        at += len(one.tokens)


def test_blocks_of_equal_size_share_a_decode(lab: Lab, session: LlamaCppSession) -> None:
    """Neighbouring sequences are drafted for in one native call, or batching would gain nothing."""
    context = session.open_draft_context(lab.v2)
    for seq in range(3):
        context.open(seq)
    calls: list[int] = []
    decode = context._native.decode
    context._native.decode = lambda rows: calls.append(rows) or decode(rows)
    context.forward([DraftBlock(seq, 0, block(5 + seq)) for seq in range(3)])
    assert calls == [3 * BLOCK]


def test_rollback_and_injection_leave_what_a_straight_run_leaves(lab: Lab, session: LlamaCppSession) -> None:
    """Draft, drop the draft, inject, cut back, inject other features: as if the last ones had come first."""
    _, features = feed(session, 0, TOKENS[:30])
    context = ready(session, lab.dspark, features[:20])
    context.forward([DraftBlock(0, 20, block(TOKENS[20]))])
    assert context.end_position(0) == 28
    context.truncate(0, 20)
    context.inject(0, 20, -features[20:28])
    context.truncate(0, 22)
    context.truncate(0, 20)
    context.inject(0, 20, features[20:])
    rows = context.forward([DraftBlock(0, 30, block(TOKENS[30]))])
    found = logits_of(rows, BLOCK).copy()
    straight = ready(session, lab.dspark, features).forward([DraftBlock(0, 30, block(TOKENS[30]))])
    np.testing.assert_allclose(found, logits_of(straight, BLOCK), **CLOSE)


def test_a_draft_may_begin_behind_a_cached_prompt(lab: Lab, session: LlamaCppSession) -> None:
    """Features that start above position 0 are put where they belong; emptied, a sequence may begin anywhere."""
    _, features = feed(session, 0, TOKENS[:40])
    context = session.open_draft_context(lab.v1)
    context.open(0)
    assert context.end_position(0) is None
    context.inject(0, 25, features[25:])
    rows = context.forward([DraftBlock(0, 40, block(7))])
    reference = BlockReference(lab.v1, lab.llama)
    expected = reference.logits(reference.hidden(features[25:], 25, block(7), 40))
    np.testing.assert_allclose(logits_of(rows, BLOCK), expected, **CLOSE)
    context.truncate(0, 10)
    assert context.end_position(0) is None
    context.inject(0, 3, features[3:5])
    assert context.end_position(0) == 5


def test_long_injections_and_pairs_are_split(lab: Lab, session: LlamaCppSession) -> None:
    """More rows than a native batch holds go in by parts, and give what single rows give."""
    features = np.random.default_rng(1).standard_normal((200, 128), np.float32)
    rows = ready(session, lab.v1, features).forward([DraftBlock(0, 200, block(9))])
    reference = BlockReference(lab.v1, lab.llama)
    expected = reference.logits(reference.hidden(features, 0, block(9), 200))
    np.testing.assert_allclose(logits_of(rows, BLOCK), expected, **CLOSE)
    tokens = (TOKENS * 4)[:200]
    layer = session.open_draft_context(lab.mtp)
    layer.open(1)
    layer.open(2)
    states = features[:, :64]
    given = layer.forward(
        [DraftBlock(2, 0, tokens[:5], states[:5], outputs=0), DraftBlock(1, 0, tokens, states, outputs=2)]
    )
    logits, beside = LayerReference(lab.mtp).run(tokens, states.astype(np.float64))
    np.testing.assert_allclose(logits_of(given, 2, 203), logits[-2:], **CLOSE)
    np.testing.assert_allclose(np.stack([given.extra(5 + i) for i in range(200)]), beside, **CLOSE)


def test_positions_of_a_multi_dimensional_rope(lab: Lab, session: LlamaCppSession, tmp_path: Path) -> None:
    """A drafter for such a target has text positions in its first section: the same numbers as a plain rope."""
    path = tiny_dflash(tmp_path / "m.gguf", overrides={"dflash.rope.dimension_sections": [8, 0, 0, 0]})
    _, features = feed(session, 0, TOKENS[:20])
    rows = ready(session, path, features).forward([DraftBlock(0, 20, block(TOKENS[20]))])
    reference = BlockReference(lab.v1, lab.llama)  # the same weights
    expected = reference.logits(reference.hidden(features, 0, block(TOKENS[20]), 20))
    np.testing.assert_allclose(logits_of(rows, BLOCK), expected, **CLOSE)


@pytest.mark.parametrize("name", ["v1", "v2", "dspark", "mtp"])
def test_target_is_left_alone(name: str, lab: Lab) -> None:
    """The target's logits are the same bits with a draft context that works between its forwards."""
    plain, beside = lab.session(lab.llama, hidden_layers=()), lab.session(lab.llama)
    plain.open(0)
    beside.open(0)
    context = beside.open_draft_context(getattr(lab, name))
    context.open(0)
    for start in range(0, 40, 4):
        tokens = TOKENS[start : start + 4]
        expected, found = [], []
        batch = RowBatch(8)
        batch.add_chain(0, start, tokens, 4)
        expected = logits_of(plain.forward(batch, WIDTHS), 4)
        rows = beside.forward(batch, WIDTHS)
        features = np.concatenate([rows.hidden(slice(0, 4), layer) for layer in LAYERS], axis=1)
        if name == "mtp":
            context.forward([DraftBlock(0, start, tokens, features[:, :64])])
        else:
            context.inject(0, start, features)
            context.forward([DraftBlock(0, start + 4, block(5))])
            context.truncate(0, start + 4)
        found = logits_of(rows, 4)  # rows outlive what the drafter does
        assert np.array_equal(expected, found)
    plain.shutdown()
    beside.shutdown()


def bad_calls(context: DraftContext) -> dict[str, Callable[[], object]]:
    """Calls llama.cpp would abort on, read past an end for, or answer with nonsense; sequence 0 holds 0 .. 9."""
    good = np.zeros((2, 128), np.float32)

    def draft(tokens: list[int], position: int = 10, seq: int = 0, **more: Any) -> Callable[[], object]:
        return lambda: context.forward([DraftBlock(seq, position, tokens, **more)])

    return {
        "no rows": draft([]),
        "longer than its block": draft(block(5, 9)),
        "negative id": draft([-1]),
        "id outside": draft([5, 320]),
        "gap": draft([5], position=11),
        "overlap": draft([5], position=9),
        "negative position": draft([5], position=-1, seq=1),
        "past the context": draft([5] * 8, position=260, seq=1),
        "unknown sequence": draft([5], seq=2),
        "states for a block": draft([5], hidden=np.zeros((1, 64), np.float32)),
        "part of the outputs": draft(block(5), outputs=1),
        "outputs outside": draft([5], outputs=2),
        "no blocks": lambda: context.forward([]),
        "two blocks of a sequence": lambda: context.forward([DraftBlock(0, 10, [5]), DraftBlock(0, 11, [5])]),
        "one bad block of two": lambda: context.forward([DraftBlock(0, 10, [5]), DraftBlock(1, 0, [999])]),
        "narrow features": lambda: context.inject(0, 10, good[:, :64]),
        "wide features": lambda: context.inject(0, 10, np.zeros((2, 129), np.float32)),
        "flat features": lambda: context.inject(0, 10, good[0]),
        "float64 features": lambda: context.inject(0, 10, good.astype(np.float64)),
        "nan features": lambda: context.inject(0, 10, np.full((1, 128), np.nan, np.float32)),
        "infinite features": lambda: context.inject(0, 10, np.full((1, 128), np.inf, np.float32)),
        "injected gap": lambda: context.inject(0, 12, good),
        "injected overlap": lambda: context.inject(0, 3, good),
        "injected past the context": lambda: context.inject(1, 263, good),
        "negative cut": lambda: context.truncate(0, -1),
        "no such sequence": lambda: context.open(3),
        "unopened cut": lambda: context.truncate(2, 0),
        "unopened end": lambda: context.end_position(2),
    }


@pytest.mark.parametrize("name", ["v1", "v2", "dspark", "bonus"])
def test_bad_calls_are_refused_before_anything_is_evaluated(name: str, lab: Lab, session: LlamaCppSession) -> None:
    """Each is one line, and leaves the sequence as it was."""
    _, features = feed(session, 0, TOKENS[:10])
    context = ready(session, getattr(lab, name), features)
    context.open(1)
    before = logits_of(context.forward([DraftBlock(0, 10, block(5))]), BLOCK).copy()
    context.truncate(0, 10)
    context._native.decode = lambda rows: pytest.fail("reached native code")
    for what, call in bad_calls(context).items():
        with pytest.raises(BackendError) as caught:
            pytest.fail(f"{what}: {call()}")
        assert "\n" not in str(caught.value)
    del context._native.decode
    assert context.end_position(0) == 10
    assert context.end_position(1) is None
    assert np.array_equal(before, logits_of(context.forward([DraftBlock(0, 10, block(5))]), BLOCK))


def test_bad_pairs_are_refused(lab: Lab, session: LlamaCppSession) -> None:
    """A prediction layer's rows come with states of the right shape; it takes no features."""
    context = session.open_draft_context(lab.mtp)
    context.open(0)
    state = np.zeros((2, 64), np.float32)
    for hidden in (None, state[:1], state[:, :32], state.astype(np.float16), np.full((2, 64), np.nan, np.float32)):
        with pytest.raises(BackendError, match="states"):
            context.forward([DraftBlock(0, 0, [5, 6], hidden)])
    with pytest.raises(BackendError, match="takes no features"):
        context.inject(0, 0, np.zeros((2, 128), np.float32))
    with pytest.raises(BackendError, match="3 outputs of 2 rows"):
        context.forward([DraftBlock(0, 0, [5, 6], state, outputs=3)])


def test_a_failed_decode_is_undone(lab: Lab, session: LlamaCppSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure inside a call of several decodes, every sequence is as before and can be used again."""
    context = session.open_draft_context(lab.v1)
    for seq in (0, 2):
        context.open(seq)
        context.inject(seq, 0, np.ones((4, 128), np.float32))
    decode, calls = context._native.decode, []

    def second_fails(rows: int) -> Any:
        calls.append(rows)
        if len(calls) == 2:
            raise BackendError("no room")
        return decode(rows)

    monkeypatch.setattr(context._native, "decode", second_fails)
    blocks = [DraftBlock(0, 4, block(5)), DraftBlock(2, 4, block(5))]
    with pytest.raises(BackendError, match="no room"):
        context.forward(blocks)
    assert [context.end_position(seq) for seq in (0, 2)] == [4, 4]
    assert [context._native.last_position(seq) for seq in (0, 2)] == [3, 3]
    rows = context.forward(blocks)
    assert np.array_equal(rows.logits(3), rows.logits(3 + BLOCK))


def test_rows_are_gone_with_the_next_call(lab: Lab, session: LlamaCppSession) -> None:
    """Rows read too late are an error, not another call's numbers; a cut does not touch them."""
    context = ready(session, lab.v1, np.ones((4, 128), np.float32))
    rows = context.forward([DraftBlock(0, 4, block(5))])
    context.truncate(0, 4)
    assert rows.logits(1).shape == (320,)
    with pytest.raises(BackendError, match="no draft row 8"):
        rows.logits(8)
    context.inject(0, 4, np.ones((1, 128), np.float32))
    with pytest.raises(BackendError, match="draft rows are gone"):
        rows.logits(1)


def test_draft_contexts_are_freed_before_their_target(lab: Lab) -> None:
    """Closing session or model closes drafters first, whatever the caller forgot; closing twice is no error."""
    path = lab.llama
    model = LlamaCppModel(path, check_gguf(path), LlamaCppConfig(), profile=PROFILE)
    session = model.open_session(SessionOptions(context_size=64, hidden_layers=LAYERS, threads=1))
    assert isinstance(session, DraftContextHost)
    first, second = (session.open_draft_context(lab.v1) for _ in range(2))
    first.shutdown()
    first.shutdown()
    model.close()
    for context in (first, second):
        with pytest.raises(BackendError, match="closed"):
            context.open(0)
        context.shutdown()
    with pytest.raises(BackendError, match="the session is closed"):
        session.open_draft_context(lab.v1)


def test_targets_without_a_layer_of_their_own(lab: Lab, session: LlamaCppSession, tmp_path: Path) -> None:
    """No prediction layer, one that was not asked for, or a damaged one: refused before native code."""
    with pytest.raises(CapabilityError, match="0 prediction layers of architecture 'llama'"):
        session.open_draft_context(None)
    plain = lab.session(lab.qwen, hidden_layers=(0,))
    assert "nextn" not in plain.capabilities
    with pytest.raises(CapabilityError, match="opened without the model's prediction layer"):
        plain.open_draft_context(None)
    plain.shutdown()
    bad = tiny_hybrid(tmp_path / "b.gguf", nextn_layers=1, omit={"blk.4.nextn.eh_proj.weight"})
    model = LlamaCppModel(bad, check_gguf(bad), LlamaCppConfig(), profile=PROFILE)
    with pytest.raises(ArtifactError, match="eh_proj"):
        model.open_session(SessionOptions(hidden_layers=(NEXTN_STATE,), threads=1))
    model.close()


def test_a_build_without_the_functions_lacks_the_capability(
    lab: Lab, session: LlamaCppSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing symbol is one clear error before any native call."""
    monkeypatch.setattr(extension, "_lookup", lambda name: None)
    with pytest.raises(CapabilityError, match="exports no llama_set_embeddings_nextn"):
        session.open_draft_context(lab.v1)
    with pytest.raises(CapabilityError, match="exports no llama_set_embeddings_layer_inp"):
        lab.session(lab.llama)
    monkeypatch.setattr(extension, "_lookup", lambda name: None if "nextn" in name else object())
    assert extension.missing(extension.NEXTN) == ["llama_set_embeddings_nextn", "llama_get_embeddings_nextn"]
