"""The policy over a scripted executor: rounds, cuts, widths, and the draft session's contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from power_dspark.artifact import read_header
from power_dspark.config import DsparkConfig
from power_dspark.drafter import DsparkSession
from power_dspark.executor import Chance, Drafted, Round

from power_core.artifacts import TensorFile
from power_core.drafter import DraftRequest, HiddenRows, Proposal
from power_core.errors import ConfigError, DrafterError

CONFIDENCES = [0.9, 0.8, 0.3, 0.7, 0.9, 0.2, 0.6, 0.5]
TOPS = [0.8, 0.5, 0.9, 0.4, 0.9, 0.9, 0.9, 0.9]
GAPS = [0.7, 0.1, 0.8, 0.2, 0.8, 0.8, 0.8, 0.8]


class ScriptedExecutor:
    """Answers with the constants above; keeps the end of each sequence and what it was asked for."""

    max_sequences = 2

    def __init__(self, *, has_head: bool) -> None:
        self.has_head = has_head
        self.ends: dict[int, int | None] = {}
        self.asked: list[tuple[list[Round], int, bool]] = []
        self.is_down = False

    def open(self, seq: int) -> None:
        self.ends[seq] = None

    def close(self, seq: int) -> None:
        del self.ends[seq]

    def end_position(self, seq: int) -> int | None:
        return self.ends[seq]

    def inject(self, seq: int, position: int, features: NDArray[np.float32]) -> None:
        assert self.ends[seq] in (None, position)
        assert features.shape[1] == 128
        self.ends[seq] = position + len(features)

    def truncate(self, seq: int, length: int) -> None:
        self.ends[seq] = length or None

    def draft(self, rounds: Sequence[Round], rows: int, *, chances: bool) -> list[Drafted]:
        assert len(rounds) <= self.max_sequences
        self.asked.append((list(rounds), rows, chances))
        both = [Chance(*pair) for pair in zip(TOPS, GAPS, strict=True)][:rows]
        head = CONFIDENCES[:rows] if self.has_head else None
        return [Drafted([r.anchor + i + 1 for i in range(rows)], head, both if chances else None) for r in rounds]

    def shutdown(self) -> None:
        assert not self.is_down
        self.is_down = True


class Rows:
    """A forward whose hidden states are zeros; remembers the layers that were read."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def hidden(self, i: slice, layer: int) -> NDArray[np.float32]:
        self.layers.append(layer)
        return np.zeros((i.stop - i.start, 64), np.float32)


def kept(position: int, count: int) -> HiddenRows:
    return HiddenRows(Rows(), start=0, count=count, position=position)  # type: ignore[arg-type]  # the one method read


Open = Callable[..., tuple[DsparkSession, ScriptedExecutor]]


@pytest.fixture
def opened(make: Callable[..., TensorFile]) -> Open:
    """``opened(confidence=..., context=..., **config)``: a session over a scripted executor."""

    def call(*, confidence: bool = True, context: int = 1000, **config: Any) -> tuple[DsparkSession, ScriptedExecutor]:
        executor = ScriptedExecutor(has_head=confidence)
        header = read_header(make(confidence=confidence))
        return DsparkSession(DsparkConfig(**config), header, executor, context), executor

    return call


def propose(session: DsparkSession, tokens: Sequence[int], k: int = 8, seq: int = 0) -> Proposal:
    session.begin(seq, tokens)
    return session.propose([DraftRequest(seq, tokens[-1], k)])[0]


def test_features_go_in_at_their_positions_and_the_block_starts_at_the_anchor(opened: Open) -> None:
    """A prompt in two chunks, the first rows from a cache; the anchor's own row is not evaluated yet."""
    session, executor = opened()
    session.begin(0, list(range(10, 20)))
    session.observe(0, [], kept(4, 3))  # positions 0..3 came from a prompt cache
    rows = kept(7, 3)
    session.observe(0, [50], rows)
    assert rows.rows.layers == [0, 2]  # type: ignore[attr-defined]  # of the class above
    assert executor.ends[0] == 10
    session.propose([DraftRequest(0, 50, 3)])
    assert executor.asked[-1][0] == [Round(0, 10, 50)]


def test_confidences_are_the_heads_and_no_softmax_is_asked_for(opened: Open) -> None:
    """With a head and no cut on probabilities the vocabulary rows are only searched for their largest number."""
    session, executor = opened()
    proposal = propose(session, [1, 2], 5)
    assert list(proposal.token_ids) == [3, 4, 5, 6, 7]
    assert proposal.confidences == CONFIDENCES[:5]
    assert executor.asked[-1][2] is False


def test_without_a_head_the_confidence_is_the_softmax_of_the_token(opened: Open) -> None:
    """The chance of each token given that those before it were right, not a product."""
    session, executor = opened(confidence=False)
    assert propose(session, [1, 2], 4).confidences == TOPS[:4]
    assert executor.asked[-1][2] is True


@pytest.mark.parametrize(
    ("confidence", "config", "length"),
    [
        (True, {"draft_margin": 0.5}, 2),  # the head's 0.3
        (True, {"draft_p_min": 0.45}, 3),  # the softmax's 0.4
        (True, {"draft_margin": 0.25, "draft_p_min": 0.6}, 1),
        (True, {"draft_margin": 0.95}, 0),
        (True, {}, 8),
        (False, {"draft_margin": 0.15}, 1),  # the gap's 0.1
        (False, {"draft_p_min": 0.45}, 3),
    ],
)
def test_the_chain_ends_before_the_first_token_a_cut_refuses(
    opened: Open, confidence: bool, config: dict[str, float], length: int
) -> None:
    """The margin reads the confidence head, or the gap to the second token where there is none."""
    session, _ = opened(confidence=confidence, **config)
    assert len(propose(session, [1, 2]).token_ids) == length


@pytest.mark.parametrize(("full_block", "k", "rows"), [(True, 3, 8), (False, 3, 3), (False, 20, 8), (True, 20, 8)])
def test_rows_follow_the_block_or_the_asked_width(opened: Open, full_block: bool, k: int, rows: int) -> None:
    """K bounds the proposal, the trained block bounds K, and `full_block` decides the rows."""
    session, executor = opened(full_block=full_block)
    assert len(propose(session, [1, 2], k).token_ids) == min(k, 8)
    assert executor.asked[-1][1] == rows


def test_a_batch_has_blocks_of_one_size_and_fits_the_executor(opened: Open) -> None:
    """Three requests of other widths, two at a time, each answered in its place and cut to its own width."""
    session, executor = opened(full_block=False)
    for seq in range(3):
        session.begin(seq, [100 * seq])
    proposals = session.propose([DraftRequest(seq, 100 * seq, k) for seq, k in ((2, 4), (0, 1), (1, 2))])
    assert [list(p.token_ids) for p in proposals] == [[201, 202, 203, 204], [1], [101, 102]]
    assert [(len(rounds), rows) for rounds, rows, _ in executor.asked] == [(2, 4), (1, 4)]


def test_no_block_reaches_beyond_the_context(opened: Open) -> None:
    """Where the whole block does not fit the asked rows are denoised; where they do not either, nothing is."""
    session, executor = opened(context=12)
    assert len(propose(session, list(range(10)), 3).token_ids) == 3
    assert executor.asked[-1][1] == 3
    assert list(propose(session, list(range(12)), 3, seq=1).token_ids) == []
    assert len(executor.asked) == 1


def test_restore_forgets_tokens_and_features_since_the_checkpoint(opened: Open) -> None:
    """The state is what it was; the same checkpoint can be restored again."""
    session, executor = opened()
    session.begin(0, [1, 2, 3])
    session.observe(0, [4], kept(0, 3))
    mark = session.checkpoint(0)
    for _ in range(2):
        session.observe(0, [5, 6], kept(3, 2))
        assert executor.ends[0] == 5
        session.restore(0, mark)
        assert executor.ends[0] == 3
    session.propose([DraftRequest(0, 4, 2)])
    assert executor.asked[-1][0] == [Round(0, 3, 4)]


def test_a_sequence_id_begins_anew(opened: Open) -> None:
    """Nothing of an ended request is left for the next one with its id."""
    session, executor = opened()
    session.begin(0, [1, 2, 3])
    session.observe(0, [4], kept(0, 3))
    session.end(0)
    session.begin(0, [9])
    assert executor.ends == {0: None}
    session.propose([DraftRequest(0, 9, 2)])
    assert executor.asked[-1][0] == [Round(0, 0, 9)]


def test_misuse_is_named(opened: Open) -> None:
    """Each broken rule of the protocol is a `DrafterError` and changes nothing."""
    session, executor = opened()
    session.begin(0, [1, 2])
    session.observe(0, [], kept(0, 3))  # one row too many
    for call in (
        lambda: session.begin(0, [1]),
        lambda: session.begin(1, []),
        lambda: session.propose([DraftRequest(0, 7, 2)]),
        lambda: session.propose([DraftRequest(0, 2, 2)]),  # the features end after the anchor
        lambda: session.propose([DraftRequest(5, 7, 2)]),
        lambda: session.restore(0, "no checkpoint"),
        lambda: session.end(3),
    ):
        with pytest.raises(DrafterError):
            call()
    assert not executor.asked
    session.close()
    session.close()
    assert executor.is_down
    with pytest.raises(DrafterError):
        session.begin(2, [1])


@pytest.mark.parametrize(
    "bad",
    [
        {"executor": "gpu"}, {"draft_margin": 1.5}, {"draft_margin": float("nan")}, {"draft_p_min": True},
        {"ring": -1}, {"ring": 2.0}, {"device": "tpu"}, {"dtype": "f16"}, {"full_block": 1}, {"compiled": None},
    ],
)  # fmt: skip
def test_options_are_checked_when_they_are_set(bad: dict[str, Any]) -> None:
    """A bad value names its key."""
    with pytest.raises(ConfigError, match=next(iter(bad))):
        DsparkConfig(**bad)
