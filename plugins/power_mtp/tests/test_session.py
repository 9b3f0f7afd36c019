"""The policy: which rows a head is given, and what becomes of its logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from power_mtp.choice import choose
from power_mtp.config import MtpConfig
from power_mtp.executor import HeadBlock
from power_mtp.session import MtpSession
from power_mtp.testing import ReferenceHead, random_tensors, tiny_shape

from power_core.drafter import DraftRequest, HiddenRows, Proposal
from power_core.errors import ConfigError, DrafterError

SHAPE = tiny_shape(target_layers=(1, 0), fuses=True, has_output=True, is_reduced=True, draft_vocab=120)
TENSORS = random_tensors(SHAPE)
RNG = np.random.default_rng(3)
EMBEDDING = RNG.standard_normal((320, 64)).astype(np.float32)
CONTEXT = 256
TEXT = RNG.integers(0, 320, 400).tolist()


class FakeRows:
    """Rows of one forward whose hidden states are a function of position and layer."""

    def __init__(self, position: int, pad: int) -> None:
        self._first = position - pad

    def hidden(self, i: slice, layer: int) -> Any:
        return np.stack([state(self._first + row, layer) for row in range(i.start, i.stop)])


def state(position: int, layer: int) -> Any:
    return np.random.default_rng([position, layer]).standard_normal(64).astype(np.float32)


def rows_at(position: int, count: int, pad: int = 2) -> HiddenRows:
    """Kept rows in a forward that has *pad* rows of another sequence before them."""
    return HiddenRows(FakeRows(position, pad), pad, count, position)  # type: ignore[arg-type]  # only `hidden` is read


def head() -> ReferenceHead:
    return ReferenceHead(SHAPE, TENSORS, EMBEDDING)


def session_of(executor: ReferenceHead, **options: Any) -> MtpSession:
    return MtpSession(executor, SHAPE.target_layers, MtpConfig(**options), context_size=CONTEXT)


def expected(tokens: list[int], first: int, steps: int) -> list[int]:
    """The draft of a head that is given every row at once; features exist from position *first* on."""
    fresh = head()
    fresh.open(0)
    features = np.stack(
        [np.concatenate([state(p, layer) for layer in SHAPE.target_layers]) for p in range(first, len(tokens) - 1)]
    )
    logits = fresh.start([HeadBlock(0, first + 1, tokens[first + 1 :], features)])[0]
    ids: list[int] = []
    while True:
        ids.append(int(TENSORS["d2t"][int(np.argmax(logits))]))
        if len(ids) == steps:
            return ids
        logits = fresh.step([0], [ids[-1]])[0]


def prefilled(session: MtpSession, length: int, *, seq: int = 0, first: int = 0, chunk: int = 50) -> list[int]:
    """Begin *seq* with a prompt, show its rows in chunks, commit the first token: the tokens so far."""
    session.begin(seq, TEXT[:length])
    for position in range(first, length, chunk):
        count = min(chunk, length - position)
        ends = position + count == length
        session.observe(seq, TEXT[length : length + 1] if ends else [], rows_at(position, count))
    return TEXT[: length + 1]


def ask(session: MtpSession, tokens: list[int], k: int = 5, seq: int = 0) -> Proposal:
    session.checkpoint(seq)
    return session.propose([DraftRequest(seq, tokens[-1], k)])[0]


@pytest.mark.parametrize("first", [0, 3, 120])
@pytest.mark.parametrize("chunk", [1, 7, 64, 130])
def test_prompt_chunks_do_not_matter(chunk: int, first: int) -> None:
    """However the prompt came, and wherever a cached prefix ended, the draft is that of all rows at once."""
    session = session_of(head())
    tokens = prefilled(session, 130, first=first, chunk=chunk)
    assert ask(session, tokens).token_ids == expected(tokens, first, 5)


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9), st.booleans()), min_size=1, max_size=6))
def test_rounds_keep_the_context_of_committed_rows(steps: list[tuple[int, int, bool]]) -> None:
    """After any rounds of drafting, accepting and undoing, a draft depends on the committed tokens alone."""
    session = session_of(head())
    tokens = prefilled(session, 20)
    for k, accepted, undone in steps:
        mark = session.checkpoint(0)
        if k:
            assert session.propose([DraftRequest(0, tokens[-1], k)])[0].token_ids == expected(tokens, 0, k)
        new = TEXT[len(tokens) : len(tokens) + accepted + 1]
        session.observe(0, new, rows_at(len(tokens) - 1, accepted + 1))
        if undone:
            session.restore(0, mark)
            assert ask(session, tokens, 3).token_ids == expected(tokens, 0, 3)
            session.restore(0, mark)
        else:
            tokens = tokens + new
    assert ask(session, tokens).token_ids == expected(tokens, 0, 5)


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_a_draft_ends_with_the_token_that_makes_it_too_unlikely(part: float) -> None:
    """It is the beginning of the draft that would not stop; the head computes no further row."""
    executor = head()
    session = session_of(executor)
    tokens = prefilled(session, 40)
    mark = session.checkpoint(0)
    (whole,) = session.propose([DraftRequest(0, tokens[-1], 6)])
    session.restore(0, mark)
    chances = np.cumprod(whole.confidences or ())
    stop_below = float(chances[0] + part * (chances[3] - chances[0])) * (1 + 1e-9)
    count = 1 + sum(chance >= stop_below for chance in chances)
    executor.calls.clear()
    stopped = session.propose([DraftRequest(0, tokens[-1], 6, stop_below)])[0]
    assert stopped.token_ids == whole.token_ids[:count]
    assert stopped.confidences == (whole.confidences or [])[:count]
    assert sum(name == "step" for name, _ in executor.calls) == count - 1


def test_an_undone_prompt_chunk_leaves_nothing_behind() -> None:
    """A step of prefill that was restored, its rows already evaluated, comes again."""
    session = session_of(head())
    session.begin(0, TEXT[:150])
    session.observe(0, [], rows_at(0, 10))
    mark = session.checkpoint(0)
    session.observe(0, [], rows_at(10, 100))
    session.restore(0, mark)
    session.observe(0, TEXT[150:151], rows_at(10, 140))
    assert ask(session, TEXT[:151]).token_ids == expected(TEXT[:151], 0, 5)


def test_rows_behind_the_anchor_give_no_proposal() -> None:
    """Where the target has not evaluated the row before the anchor, there is nothing to draft from."""
    executor = head()
    session = session_of(executor)
    session.begin(0, TEXT[:10])
    assert ask(session, TEXT[:10]) == Proposal([], [])
    session.observe(0, [], rows_at(0, 5))
    assert ask(session, TEXT[:10]) == Proposal([], [])
    assert all(name == "extend" for name, _ in executor.calls)


@pytest.mark.parametrize(("length", "drafted"), [(250, 6), (254, 2), (255, 1), (256, 0)])
def test_no_row_is_put_beyond_the_context(length: int, drafted: int) -> None:
    """The anchor's row is at *length*; drafts get shorter near the end, and the last position gives one token."""
    executor = head()
    session = session_of(executor)
    proposal = ask(session, prefilled(session, length), 9)
    assert len(proposal.token_ids) == drafted
    assert max(executor.positions(0)) < CONTEXT


def test_sequences_are_batched_and_apart() -> None:
    """One forward a step serves every sequence that still drafts; each gets what it would get alone."""
    executor = head()
    session = session_of(executor)
    texts = {seq: prefilled(session, length, seq=seq) for seq, length in ((0, 30), (2, 45), (5, 12))}
    for seq in texts:
        session.checkpoint(seq)
    executor.calls.clear()
    limits = {0: 4, 2: 1, 5: 6}
    proposals = session.propose([DraftRequest(seq, texts[seq][-1], limits[seq]) for seq in texts])
    for proposal, (seq, tokens) in zip(proposals, texts.items(), strict=True):
        assert proposal.token_ids == expected(tokens, 0, limits[seq])
    assert [rows for name, rows in executor.calls if name == "step"] == [2, 2, 2, 1, 1]


def test_a_sequence_id_used_again_starts_empty() -> None:
    """Nothing of an ended request reaches the next one of the same id."""
    executor = head()
    session = session_of(executor)
    ask(session, prefilled(session, 90))
    session.end(0)
    tokens = prefilled(session, 25, chunk=9)
    assert ask(session, tokens).token_ids == expected(tokens, 0, 5)
    assert executor.positions(0) == list(range(1, 26))


def test_margin_and_probability_cuts() -> None:
    """A draft ends before the first token under a threshold; p0 alone and p0 - p1 cut at different places."""
    tokens = TEXT[:31]

    def draft(**options: Any) -> Proposal:
        session = session_of(head(), **options)
        prefilled(session, 30)
        return ask(session, tokens, 7)

    whole = draft()
    chances = list(whole.confidences or ())
    assert len(chances) == 7
    assert all(0 < chance <= 1 for chance in chances)
    for threshold in (0.2, 0.5, 0.9):
        kept = next((i for i, chance in enumerate(chances) if chance < threshold), 7)
        assert draft(draft_p_min=threshold) == evolve(
            whole, token_ids=whole.token_ids[:kept], confidences=chances[:kept]
        )
        assert len(draft(draft_margin=threshold).token_ids) <= kept
    assert draft(draft_margin=1.0).token_ids == []


@pytest.mark.parametrize("rows", [1, 10, 119, 120, 500])
def test_a_reduced_projection_draws_from_the_first_rows_only(rows: int) -> None:
    """`fr_vocab_size` rows are looked at; with `d2t` these are the most frequent ids."""
    session = session_of(head(), fr_vocab_size=rows)
    proposal = ask(session, prefilled(session, 30), 7)
    assert set(proposal.token_ids) <= set(TENSORS["d2t"][:rows].tolist())
    assert rows > 1 or proposal.confidences == [1.0] * 7


def test_rows_that_hold_no_number_end_the_draft() -> None:
    """NaN and all -inf propose nothing."""
    assert choose(np.full(4, np.nan, np.float32)) is None
    assert choose(np.full(4, -np.inf, np.float32)) is None
    assert choose(np.array([0, np.nan], np.float32)) is None


@pytest.mark.parametrize("misuse", ["anchor", "gap", "unknown", "twice", "checkpoint", "closed"])
def test_misuse_is_one_clear_error(misuse: str) -> None:
    """What breaks the protocol is a `DrafterError`, and a failed call changes nothing."""
    session = session_of(head())
    tokens = prefilled(session, 20)
    calls = {
        "anchor": lambda: session.propose([DraftRequest(0, tokens[-1] ^ 1, 3)]),
        "gap": lambda: session.observe(0, [], rows_at(25, 2)),
        "unknown": lambda: session.checkpoint(7),
        "twice": lambda: session.begin(0, [1]),
        "checkpoint": lambda: session.restore(0, "mine"),
        "closed": lambda: session.begin(3, [1]),
    }
    if misuse == "closed":
        session.close()
        session.close()
    with pytest.raises(DrafterError, match="mtp"):
        calls[misuse]()
    if misuse != "closed":
        assert ask(session, tokens).token_ids == expected(tokens, 0, 5)


@pytest.mark.parametrize(
    "options",
    [
        {"executor": "gpu"}, {"draft_margin": -0.1}, {"draft_margin": float("nan")}, {"draft_p_min": "0.5"},
        {"fr_vocab_size": -1}, {"fr_vocab_size": True}, {"ring": 1.5}, {"draft_margin": float("inf")},
        {"device": "gpu"}, {"device": ""}, {"device": "cuda:x"},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    """Each option says what it takes."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        MtpConfig(**options)
