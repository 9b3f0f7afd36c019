"""The draft KV ring against a cache that forgets nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from power_torch.drafting import BackboneShape, BackboneWeights, BlockBackbone, ConvWeights, KvRing, LayerWeights

from power_core.errors import ShapeError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, FEATURES = 32, 4, 2, 8, 48, 64


def random_weights(*, layers: int = 2, windows: tuple[int | None, ...] | None = None, conv: bool = False):
    """Weights of a small backbone, the same ones every time."""
    source = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source) / shape[-1] ** 0.5

    def gain(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=source)

    def convolution() -> ConvWeights:
        return ConvWeights(matrix(2, 2, HIDDEN), matrix(2 * 2 * (HIDDEN // 8), HIDDEN))

    def layer() -> LayerWeights:
        return LayerWeights(
            attn_norm=gain(HIDDEN),
            q=matrix(HEADS * HEAD_DIM, HIDDEN),
            k=matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            v=matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            o=matrix(HIDDEN, HEADS * HEAD_DIM),
            q_norm=gain(HEAD_DIM) * 3,  # sharp attention: the context must matter
            k_norm=gain(HEAD_DIM) * 3,
            ffn_norm=gain(HIDDEN),
            gate=matrix(FFN, HIDDEN),
            up=matrix(FFN, HIDDEN),
            down=matrix(HIDDEN, FFN),
            attn_conv=convolution() if conv else None,
            ffn_conv=convolution() if conv else None,
        )

    shape = BackboneShape(
        HIDDEN, layers, HEADS, KV_HEADS, HEAD_DIM, 1e-6, 1e4, HEAD_DIM, windows or (None,) * layers, 8 if conv else 0
    )
    return BackboneWeights(
        shape, matrix(HIDDEN, FEATURES), gain(HIDDEN), gain(HIDDEN), tuple(layer() for _ in range(layers))
    )


def random_backbone(cap: int, *, max_sequences: int = 1, **options) -> BlockBackbone:
    """A backbone over a ring of *cap* rows."""
    weights = random_weights(**options)
    ring = KvRing(
        layers=weights.shape.layers, kv_heads=KV_HEADS, head_dim=HEAD_DIM, cap=cap, max_sequences=max_sequences
    )
    return BlockBackbone(weights, ring)


def random_rows(count: int, width: int = FEATURES, *, seed: int = 0) -> torch.Tensor:
    """*count* random rows."""
    return torch.randn((count, width), generator=torch.Generator().manual_seed(seed))


BLOCK = random_rows(8, HIDDEN, seed=1)[None]


def drafts(cap: int, features: torch.Tensor, cuts: list[int], *, start: int = 0, **options) -> list[torch.Tensor]:
    """What a backbone over *cap* rows answers after each piece of *features*."""
    backbone = random_backbone(cap, **options)
    backbone.ring.open(0)
    answers, done = [], 0
    for cut in cuts:
        backbone.fold(0, start + done, features[done:cut])
        answers.append(backbone.forward([0], [start + cut], BLOCK))
        done = cut
    return answers


@pytest.mark.parametrize("conv", [False, True])
def test_a_ring_equals_the_full_cache_bit_for_bit_while_the_context_fits(conv):
    """A cache with room for 2000 rows and a ring of 128 give the same bits up to 128 rows."""
    features = random_rows(128)
    cuts = [1, 5, 64, 65, 100, 128]
    ring, full = drafts(128, features, cuts, conv=conv), drafts(2000, features, cuts, conv=conv)
    assert all(map(torch.equal, ring, full))


@pytest.mark.parametrize("cap", [17, 64, 100])
def test_beyond_its_size_a_ring_equals_the_full_cache_masked_to_the_window_bit_for_bit(cap):
    """Position `committed - cap` is the first visible one; size and order of the ring leave no trace."""
    features = random_rows(700, seed=2)
    cuts = [*range(7, 130, 7), 140, 151, 200, 300, 301, 500, 699]
    ring, full = random_backbone(cap), random_backbone(2000)
    full.ring.cap = cap  # the same window over a cache that forgets nothing
    done = 0
    for backbone in (ring, full):
        backbone.ring.open(0)
    for cut in cuts:
        for position in range(done, cut, 16):  # the same pieces for both: a row's bits may depend on its company
            for backbone in (ring, full):
                backbone.fold(0, position, features[position : min(position + 16, cut)])
        done = cut
        assert torch.equal(ring.forward([0], [cut], BLOCK), full.forward([0], [cut], BLOCK)), cut


def test_a_window_of_the_layers_hides_what_is_farther_than_it():
    """With windows of 32 in both layers rows below position - 32 are never read."""
    features = random_rows(100, seed=3)
    other = features.clone()
    other[:50] = random_rows(50, seed=4)
    same, seen = ({"windows": (w, w)} for w in (32, 64))
    assert torch.equal(drafts(128, features, [100], **same)[0], drafts(128, other, [100], **same)[0])
    assert not torch.equal(drafts(128, features, [100], **seen)[0], drafts(128, other, [100], **seen)[0])


@pytest.mark.parametrize("rejected", [1, 16, 64])
def test_a_rollback_after_the_ring_has_wrapped_is_exact(rejected):
    """Rows that overwrote older slots are taken back, and the older rows are still what they were."""
    features = random_rows(400, seed=5)
    backbone = random_backbone(100)
    backbone.ring.open(0)
    backbone.fold(0, 0, features[:300])
    before = backbone.forward([0], [300], BLOCK)
    backbone.fold(0, 300, features[300 : 300 + rejected])
    backbone.ring.rollback(0, 300)
    assert torch.equal(backbone.forward([0], [300], BLOCK), before)
    backbone.fold(0, 300, features[300:])
    assert torch.equal(backbone.forward([0], [400], BLOCK), drafts(100, features, [300, 400])[-1])


def test_a_rollback_deeper_than_the_spare_chunk_shows_no_overwritten_row():
    """What was lost is masked: the answer is that of a cache without the lost rows."""
    features = random_rows(400, seed=6)
    backbone = random_backbone(64)  # 128 slots
    backbone.ring.open(0)
    backbone.fold(0, 0, features[:300])
    backbone.fold(0, 300, features[300:400])
    backbone.ring.rollback(0, 300)
    expected = drafts(64, features[272:300], [28], start=272)[0]  # 400 - 128 = 272 is the oldest row still there
    torch.testing.assert_close(backbone.forward([0], [300], BLOCK), expected, rtol=0, atol=1e-5)


def test_sequences_do_not_see_each_other():
    """A batch of two answers as each alone, and a closed sequence leaves nothing to its successor."""
    one, two = random_rows(70, seed=7), random_rows(33, seed=8)
    backbone = random_backbone(64, max_sequences=3)
    for seq, features in ((2, one), (0, two)):
        backbone.ring.open(seq)
        backbone.fold(seq, 0, features)
    both = backbone.forward([2, 0], [70, 33], BLOCK.expand(2, -1, -1))
    alone = [drafts(64, one, [70])[0][0], drafts(64, two, [33])[0][0]]
    torch.testing.assert_close(both, torch.stack(alone), rtol=0, atol=1e-5)
    backbone.ring.close(2)
    backbone.ring.open(2)
    assert backbone.ring.end(2) is None
    torch.testing.assert_close(backbone.forward([2], [5], BLOCK), random_answer_without_context(5), rtol=0, atol=1e-5)


def random_answer_without_context(position: int) -> torch.Tensor:
    backbone = random_backbone(64)
    backbone.ring.open(0)
    return backbone.forward([0], [position], BLOCK)


def test_the_first_row_may_be_at_any_position_and_gaps_are_refused():
    """After a prompt cache the first feature is not at 0; later ones follow without a gap."""
    backbone = random_backbone(64)
    backbone.ring.open(0)
    backbone.fold(0, 40, random_rows(3))
    assert backbone.ring.end(0) == 43
    with pytest.raises(ShapeError, match="rows begin at 50"):
        backbone.fold(0, 50, random_rows(1))
    with pytest.raises(ShapeError, match="features are"):
        backbone.fold(0, 43, random_rows(1, FEATURES - 1))
    assert backbone.ring.end(0) == 43
    backbone.ring.rollback(0, 40)
    assert backbone.ring.end(0) is None


def test_the_ring_says_what_it_takes():
    """Bytes follow `cap`, rounded up to chunks with one to spare and a trash slot, not the context."""
    ring = KvRing(layers=3, kv_heads=KV_HEADS, head_dim=HEAD_DIM, cap=100)
    assert ring.nbytes == 2 * 3 * KV_HEADS * (192 + 1) * HEAD_DIM * 4


def test_a_round_is_one_graph_whatever_the_batch(monkeypatch):
    """Compiled, the forward is traced whole and once: a smaller batch is padded to the same shape."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    weights = random_weights(conv=True)
    ring = KvRing(layers=2, kv_heads=KV_HEADS, head_dim=HEAD_DIM, cap=64, max_sequences=2)
    plain, compiled = BlockBackbone(weights, ring), BlockBackbone(weights, ring, compiled=True)
    for seq in range(2):
        ring.open(seq)
        plain.fold(seq, 0, random_rows(20 + seq, seed=seq))
    for seqs in ([0, 1], [1], [0]):
        asked = (seqs, [20 + seq for seq in seqs], BLOCK.expand(len(seqs), -1, -1))
        torch.testing.assert_close(compiled.forward(*asked), plain.forward(*asked), rtol=0, atol=1e-4)
    assert len(graphs) == 1
