"""The policy of both strategies over an executor that records what it is asked."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from power_dflash.chains import Chain, chain_of_logits, proposed, walk
from power_dflash.config import DFlash2Config, DFlashConfig
from power_dflash.header import DFLASH2, DFLASH_V1, read_header
from power_dflash.session import BlockSession

from power_core.artifacts import open_tensors
from power_core.drafter import DraftRequest, HiddenRows
from power_core.errors import ConfigError, DrafterError

CHAIN = Chain([11, 12, 13, 14, 15, 16, 17], [0.9, 0.8, 0.4, 0.7, 0.6, 0.5, 0.3], [0.8, 0.7, 0.05, 0.5, 0.4, 0.3, 0.1])


class Recorder:
    """An executor without weights: remembers rounds, and where each sequence's features end."""

    def __init__(self):
        self.ends, self.rounds, self.shut = {}, [], 0

    def open(self, seq):
        self.ends[seq] = None

    def close(self, seq):
        del self.ends[seq]

    def end(self, seq):
        return self.ends[seq]

    def extend(self, seq, position, features):
        assert self.ends[seq] in (None, position)
        self.ends[seq] = position + len(features)

    def rollback(self, seq, length):
        self.ends[seq] = length

    def draft(self, rounds):
        self.rounds += rounds
        return [CHAIN for _ in rounds]

    def shutdown(self):
        self.shut += 1


def rows(position, count):
    """Target rows of which every block gives 64 ones."""
    outputs = SimpleNamespace(hidden=lambda block, layer: np.ones((block.stop - block.start, 64), np.float32))
    return HiddenRows(outputs, 0, count, position)


@pytest.fixture
def session_of(make_gguf):
    """A session of a kind with a prompt of ten tokens whose features are there, and its executor."""

    def make(kind=DFLASH_V1, *, context=64, **options):
        header = read_header(open_tensors(make_gguf(kind)), kind)
        config = (DFlashConfig if kind == DFLASH_V1 else DFlash2Config)(**options)
        executor = Recorder()
        session = BlockSession(config, header, executor, context)
        session.begin(0, range(10))
        session.observe(0, [], rows(0, 4))
        session.observe(0, [10], rows(4, 6))
        return session, executor

    return make


def ids(session, k=7, anchor=10):
    return session.propose([DraftRequest(0, anchor, k)])[0].token_ids


@pytest.mark.parametrize("k", [1, 3, 7, 20])
@pytest.mark.parametrize("kind", [DFLASH_V1, DFLASH2])
def test_a_block_is_denoised_whole_and_at_most_k_tokens_are_proposed(kind, k, session_of):
    """A block of 8 rows starts with the anchor at its own position and drafts 7 tokens."""
    session, executor = session_of(kind)
    assert ids(session, k) == CHAIN.token_ids[:k]
    assert [each.tokens for each in executor.rounds] == [[10, *[0] * 7]]
    assert executor.rounds[0].position == 10


def test_short_blocks_hold_as_many_masks_as_tokens_are_asked_for(session_of):
    """With full_block off the block of v1 shrinks to what is wanted."""
    session, executor = session_of(full_block=False)
    assert ids(session, 3) == [11, 12, 13]
    assert executor.rounds[0].tokens == [10, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "count"),
    [({"draft_margin": 0.1}, 2), ({"draft_margin": 0.01}, 7), ({"draft_p_min": 0.65}, 2), ({"draft_p_min": 0.95}, 0)],
)
@pytest.mark.parametrize("kind", [DFLASH_V1, DFLASH2])
def test_cuts_end_the_proposal_and_not_the_draft(kind, options, count, session_of):
    """The first token below a threshold ends what is proposed; the block keeps its shape."""
    session, executor = session_of(kind, **options)
    proposal = session.propose([DraftRequest(0, 10, 7)])[0]
    assert list(proposal.token_ids) == CHAIN.token_ids[:count]
    assert list(proposal.confidences) == CHAIN.chances[:count]
    assert len(executor.rounds[0].tokens) == 8


def test_a_restore_forgets_tokens_and_features_of_the_failed_step(session_of):
    """After a failed step the session is where the checkpoint was, and the step can be taken again."""
    session, executor = session_of()
    mark = session.checkpoint(0)
    for _ in range(2):
        ids(session)
        session.observe(0, [11, 12], rows(10, 2))
        assert executor.ends[0] == 12
        session.restore(0, mark)
        assert executor.ends[0] == 10
    assert ids(session) == CHAIN.token_ids
    assert executor.rounds[-1].position == 10


def test_features_may_begin_behind_a_cached_prompt(make_gguf):
    """Rows that were never evaluated have no features; with none at all a block is drafted from the anchor alone."""
    header = read_header(open_tensors(make_gguf(DFLASH_V1)), DFLASH_V1)
    executor = Recorder()
    session = BlockSession(DFlashConfig(), header, executor, 64)
    session.begin(3, range(10))
    empty = session.checkpoint(3)
    assert session.propose([DraftRequest(3, 9, 2)])[0].token_ids == [11, 12]
    session.observe(3, [10], rows(8, 2))
    assert session.propose([DraftRequest(3, 10, 2)])[0].token_ids == [11, 12]
    assert executor.ends[3] == 10
    session.restore(3, empty)
    assert executor.ends[3] is None


def test_no_block_reaches_beyond_the_context(session_of):
    """Where the masked rows do not fit nothing is proposed, and the others of the batch are."""
    session, executor = session_of(context=17)
    session.begin(1, range(5))
    session.observe(1, [5], rows(0, 5))
    proposals = session.propose([DraftRequest(0, 10, 7), DraftRequest(1, 5, 7)])
    assert [len(each.token_ids) for each in proposals] == [0, 7]
    assert len(executor.rounds) == 1


def test_misuse_is_an_error_that_says_so(session_of):
    """Unknown sequences, missing features and foreign checkpoints are refused, and close is idempotent."""
    session, executor = session_of()
    session.observe(0, [11], None)  # a token without its row
    for call, found in (
        (lambda: ids(session), "features of sequence 0 end at 10, the anchor is at 11"),
        (lambda: session.begin(0, [1]), "sequence 0 cannot begin"),
        (lambda: session.checkpoint(5), "sequence 5 is not open"),
        (lambda: session.restore(0, "mark"), "no checkpoint of sequence 0"),
    ):
        with pytest.raises(DrafterError, match=found):
            call()
    session.end(0)
    assert executor.ends == {}
    session.close()
    session.close()
    assert executor.shut == 1


def test_the_walk_follows_the_chosen_predecessor_whatever_the_order_of_candidates():
    """Scores are read under the candidate chosen before; permuting candidates changes nothing."""
    source = np.random.default_rng(5)
    candidates = np.stack([source.permutation(50)[:6] for _ in range(5)])
    scores = source.standard_normal((5, 6, 6)).astype(np.float32)
    scores[0] = scores[0, 0]
    path = walk(candidates, scores)
    shuffled_ids, shuffled = candidates.copy(), scores.copy()
    before = np.arange(6)
    for i in range(5):
        order = source.permutation(6)
        shuffled_ids[i], shuffled[i] = candidates[i, order], scores[i][before][:, order]
        before = order
    again = walk(shuffled_ids, shuffled)
    assert again.token_ids == path.token_ids
    np.testing.assert_allclose(again.margins, path.margins, rtol=1e-6)
    best = np.sort(scores[0, 0])[::-1]
    assert path.margins[0] == pytest.approx(best[0] - best[1])
    assert path.chances[0] == pytest.approx(np.exp(best[0]) / np.exp(scores[0, 0]).sum(), rel=1e-5)


def test_chances_of_logits_are_those_of_a_softmax_and_ids_are_mapped():
    """Chance and margin come from the row's own softmax; a reduced vocabulary names its ids."""
    row = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    chain = chain_of_logits([row], np.array([7, 9, 4]))
    assert chain.token_ids == [9]
    assert chain.chances == pytest.approx([0.6])
    assert chain.margins == pytest.approx([0.3])
    assert proposed(chain, 4, margin=0.31, p_min=0).token_ids == []


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"executor": "gpu"}, "executor"),
        ({"draft_margin": float("nan")}, "draft_margin"),
        ({"draft_p_min": 1.5}, "draft_p_min"),
        ({"ring": -1}, "ring"),
        ({"device": "tpu"}, "device"),
        ({"dtype": "fp8"}, "dtype"),
        ({"compiled": 1}, "compiled"),
    ],
)
@pytest.mark.parametrize("config", [DFlashConfig, DFlash2Config])
def test_an_option_out_of_range_is_refused_by_name(config, options, found):
    """The error names the option and what it takes."""
    with pytest.raises(ConfigError) as caught:
        config(**options)
    assert caught.value.where == found
    assert "inherits" in attrs.fields(config).draft_margin.metadata
