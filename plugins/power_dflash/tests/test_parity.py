"""Native and torch executors, GGUF and safetensors: one drafter, one answer."""

from __future__ import annotations

import numpy as np
import pytest
from power_dflash.header import DFLASH2, DFLASH_V1

from power_core.drafter import DraftRequest, HiddenRows
from power_core.errors import CapabilityError
from power_core.target import RowBatch, SessionOptions

pytest.importorskip("power_torch", reason="pip install power-torch")
torch = pytest.importorskip("torch", reason="pip install torch")
torch.set_num_threads(1)

KINDS = (DFLASH_V1, DFLASH2)
PROMPTS = ([*range(5, 45)], [*range(100, 117)])
STEPS = 6


def proposals_of(drafter, model, *, restart=False):
    """What *drafter* proposes along plain decoding of two prompts together, restored once a step where asked."""
    layers = drafter.requirements().hidden_layers
    session = model.open_session(SessionOptions(context_size=256, max_sequences=2, hidden_layers=layers))
    draft = drafter.open(model, session)
    batch, anchors, answers = RowBatch(128), [], []
    try:
        for seq, prompt in enumerate(PROMPTS):
            session.open(seq)
            draft.begin(seq, prompt)
            anchors.append(step(session, draft, batch, seq, 0, prompt))
        for _ in range(STEPS):
            requests = [DraftRequest(seq, anchor, 7) for seq, anchor in enumerate(anchors)]
            marks = [draft.checkpoint(seq) for seq in range(2)]
            answers.append(draft.propose(requests))
            if restart:
                draft.observe(0, [1, 2], HiddenRows(session_rows(session, batch), 0, 1, session.length(0)))
                for seq, mark in enumerate(marks):
                    draft.restore(seq, mark)
                assert [p.token_ids for p in draft.propose(requests)] == [p.token_ids for p in answers[-1]]
            anchors = [step(session, draft, batch, seq, session.length(seq), [anchors[seq]]) for seq in range(2)]
    finally:
        draft.close()
        session.shutdown()
    return answers


def step(session, draft, batch, seq, position, tokens):
    """Evaluate *tokens* of one sequence, tell the draft, and return the target's choice."""
    batch.clear()
    batch.add_chain(seq, position, tokens, 1)
    rows = session.forward(batch, session.profile.prefill if position == 0 else session.profile.decode)
    chosen = rows.greedy(len(tokens) - 1)
    draft.observe(seq, [chosen], HiddenRows(rows, 0, len(tokens), position))
    return chosen


def session_rows(session, batch):
    """Hidden rows that no step committed: one of ones for every block."""
    del session, batch
    return type(
        "Ones", (), {"hidden": lambda self, block, layer: np.ones((block.stop - block.start, 64), np.float32)}
    )()


def same(first, second):
    """Whether two runs propose the same tokens; confidences agree to what half-precision K/V allow."""
    for one, two in zip(first, second, strict=True):
        for left, right in zip(one, two, strict=True):
            assert list(left.token_ids) == list(right.token_ids)
            np.testing.assert_allclose(left.confidences, right.confidences, atol=5e-3)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_native_and_torch_propose_the_same_from_either_container(
    kind, make_gguf, published, target, admitted, drafter_of, tmp_path
):
    """A float file drafts alike in llama.cpp and in torch, batched over two sequences, and through restores."""
    gguf = make_gguf(kind)
    artifact = admitted(gguf, target)
    native = proposals_of(drafter_of(artifact, executor="native"), target)
    assert len({tuple(p.token_ids) for answer in native for p in answer}) > 3  # the drafts follow the text
    assert same(native, proposals_of(drafter_of(artifact, executor="torch", dtype="fp32"), target, restart=True))
    twin = admitted(published(gguf, tmp_path / "st"), target)
    assert same(native, proposals_of(drafter_of(twin, dtype="fp32"), target))
    assert same(native, proposals_of(drafter_of(artifact, dtype="fp32"), target, restart=True))


@pytest.mark.parametrize("changes", [{"draft_vocab": [*range(3, 300, 2)]}, {"own_matrices": True}])
def test_a_reduced_vocabulary_and_own_matrices_draft_alike(changes, make_gguf, target, admitted, drafter_of):
    """`d2t` maps output rows to ids in both executors; a file with matrices of its own takes none of the target's."""
    artifact = admitted(make_gguf(DFLASH_V1, **changes), target)
    native = proposals_of(drafter_of(artifact, executor="native"), target)
    assert same(native, proposals_of(drafter_of(artifact, executor="torch", dtype="fp32"), target))
    tokens = {token for answer in native for p in answer for token in p.token_ids}
    assert tokens <= set(changes.get("draft_vocab", range(320)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_proposes_what_the_full_cache_proposes_while_the_context_fits(
    kind, make_gguf, target, admitted, drafter_of
):
    """Beyond that it forgets, and says how few bytes it takes."""
    artifact = admitted(make_gguf(kind), target)
    full, ring, small = (
        proposals_of(drafter_of(artifact, executor="torch", ring=cap, dtype="fp32"), target) for cap in (0, 64, 8)
    )
    assert [[(p.token_ids, p.confidences) for p in answer] for answer in full] == [
        [(p.token_ids, p.confidences) for p in answer] for answer in ring
    ]
    assert full != small


@pytest.mark.parametrize("kind", KINDS)
def test_sliding_windows_are_the_same_in_both_executors(kind, make_gguf, target, admitted, drafter_of):
    """A layer with a window sees the last positions only, natively and in torch."""
    windows = {"dflash.attention.sliding_window": 12, "dflash.attention.sliding_window_pattern": [True, False]}
    artifact = admitted(make_gguf(kind, overrides=windows), target)
    native = proposals_of(drafter_of(artifact, executor="native"), target)
    assert same(native, proposals_of(drafter_of(artifact, executor="torch", dtype="fp32"), target))


def test_a_safetensors_file_cannot_be_drafted_with_natively(
    make_gguf, published, target, admitted, drafter_of, tmp_path
):
    """The error says what would help."""
    artifact = admitted(published(make_gguf(DFLASH_V1), tmp_path / "st"), target)
    with pytest.raises(CapabilityError, match=r"cannot be drafted with natively.*convert it to GGUF"):
        proposals_of(drafter_of(artifact, executor="native"), target)
