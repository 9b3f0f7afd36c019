"""What the session promises for every strategy: rollback, isolation, limits, clear misuse errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from power_ngram.drafter import Config, open_history
from power_ngram.session import HistorySession

from power_core.drafter import DraftRequest, Proposal
from power_core.errors import DrafterError

Draft = Callable[[Config, Sequence[int], int], Proposal]
Propose = Callable[[HistorySession, int, int, int], Proposal]
texts = st.lists(st.integers(0, 2), min_size=1, max_size=24)
steps = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.booleans()), max_size=12)


@given(prompt=texts, steps=steps)
def test_a_restored_step_never_happened(small: Config, prompt: list[int], steps: list[tuple[list[int], bool]]) -> None:
    """Steps that are restored leave later proposals as if they had not been taken."""
    tried, clean = open_history(small), open_history(small)
    for session in (tried, clean):
        session.begin(0, prompt)
    last = prompt[-1]
    for committed, undone in steps:
        request = [DraftRequest(0, last, 5)]
        checkpoint = tried.checkpoint(0)
        assert tried.propose(request) == clean.propose(request)
        tried.observe(0, committed, None)
        if undone:
            tried.restore(0, checkpoint)
        else:
            clean.observe(0, committed, None)
            last = committed[-1]
    assert tried.propose([DraftRequest(0, last, 5)]) == clean.propose([DraftRequest(0, last, 5)])


@given(prompt=texts, kept=texts, dropped=texts)
def test_restore_across_steps(small: Config, prompt: list[int], kept: list[int], dropped: list[int]) -> None:
    """A checkpoint from before an indexed step rebuilds the index, and can be restored twice."""
    tried, clean = open_history(small), open_history(small)
    for session in (tried, clean):
        session.begin(0, prompt)
        session.observe(0, kept, None)
    checkpoint = tried.checkpoint(0)
    for _ in range(2):
        for token in dropped:
            tried.observe(0, [token], None)
            tried.propose([DraftRequest(0, token, 3)])
        tried.restore(0, checkpoint)
        request = [DraftRequest(0, kept[-1], 6)]
        assert tried.propose(request) == clean.propose(request)


@given(first=texts, second=texts)
def test_sequences_do_not_see_each_other(small: Config, first: list[int], second: list[int]) -> None:
    """A sequence proposes the same alone, beside another one, and after another one ended."""
    alone = open_history(small)
    alone.begin(7, second)
    request = DraftRequest(7, second[-1], 5)
    expected = alone.propose([request])
    shared = open_history(small)
    shared.begin(3, first)
    shared.begin(7, second)
    assert shared.propose([DraftRequest(3, first[-1], 5), request])[1:] == expected
    shared.end(3)
    shared.end(7)
    shared.begin(7, second)
    assert shared.propose([request]) == expected


@given(text=texts, k=st.integers(0, 9))
def test_limits(small: Config, text: list[int], k: int) -> None:
    """Never more than asked for, never an id that was not there, a confidence in (0, 1] for each where given."""
    session = open_history(small)
    session.begin(0, text)
    proposal = session.propose([DraftRequest(0, text[-1], k)])[0]
    assert len(proposal.token_ids) <= k
    assert set(proposal.token_ids) <= set(text)
    if proposal.confidences is not None:
        assert len(proposal.confidences) == len(proposal.token_ids)
        assert all(0 < confidence <= 1 for confidence in proposal.confidences)


@pytest.mark.parametrize("prompt", [[5], [5, 6], [1, 2, 3]], ids=str)
def test_prompts_shorter_than_an_ngram_propose_nothing(default: Config, prompt: list[int], draft: Draft) -> None:
    """Without a repetition there is nothing to propose, and no index error either."""
    assert list(draft(default, prompt, 8).token_ids) == []


def test_an_empty_prompt_begins(default: Config, propose: Propose) -> None:
    """A sequence may begin empty and be filled by what is committed."""
    session = open_history(default)
    session.begin(0, [])
    session.observe(0, [4] * 40, None)
    assert list(propose(session, 0, 4, 6).token_ids) == [4] * 6


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_run_is_continued_through_its_own_tail(default: Config, period: int, draft: Draft) -> None:
    """ "ha ha ha ha": a run of any period proposes all the tokens asked for, however short the period."""
    run = list(range(100, 100 + period)) * 48
    for end in range(len(run) - period, len(run)):
        text = [1, 2, 3, *run[:end]]
        expected = [100 + (end + i) % period for i in range(20)]
        assert list(draft(default, text, 20).token_ids) == expected


def test_the_prompt_is_copied(small: Config, propose: Propose) -> None:
    """Changing the list given to `begin` changes nothing; numpy ids come back as plain ints."""
    prompt = np.array([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    session = open_history(small)
    session.begin(0, prompt)  # type: ignore[arg-type]  # an array is used like a sequence
    prompt[:] = 9
    ids = propose(session, 0, 3, 3).token_ids
    assert list(ids) == [1, 2, 3]
    assert {type(token) for token in ids} == {int}


def test_misuse_is_an_error_that_changes_nothing(small: Config, propose: Propose) -> None:
    """Opening twice, a foreign checkpoint, a stale anchor and an unknown sequence are refused by name."""
    session = open_history(small)
    session.begin(0, [1, 2, 1, 2, 1, 2, 1])
    before = propose(session, 0, 1, 4)
    misuses: list[Callable[[], object]] = [
        lambda: session.begin(0, [1]),
        lambda: session.restore(0, 99),
        lambda: session.restore(0, None),
        lambda: propose(session, 0, 5, 4),
        lambda: session.checkpoint(1),
        lambda: session.end(1),
    ]
    for misuse in misuses:
        with pytest.raises(DrafterError) as caught:
            misuse()
        assert caught.value.who == f"strategy {small.strategy!r}"
        assert caught.value.fix
    assert propose(session, 0, 1, 4) == before


def test_end_and_close_free(small: Config) -> None:
    """An ended sequence may begin again; a closed session refuses to, and closing twice is harmless."""
    session = open_history(small)
    session.begin(0, [1, 2])
    session.end(0)
    session.begin(0, [3])
    session.close()
    session.close()
    with pytest.raises(DrafterError, match="after close"):
        session.begin(0, [3])
