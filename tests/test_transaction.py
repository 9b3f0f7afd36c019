"""The state machine of a step allows exactly the transitions that are drawn in its module."""

from __future__ import annotations

import itertools

import pytest

from power_core.errors import TransactionError
from power_core.transaction import Phase, Transaction

FORWARD = (Phase.OPEN, Phase.DRAFTED, Phase.EVALUATED, Phase.VERIFIED)


def at(phase: Phase) -> Transaction:
    """A transaction without participants that has come as far as *phase*."""
    transaction = Transaction([])
    for step in FORWARD[1 : min(phase, Phase.VERIFIED) + 1]:
        transaction.advance(step)
    if phase is Phase.COMMITTED:
        transaction.commit(0)
    if phase is Phase.RESTORED:
        transaction.restore()
    return transaction


@pytest.mark.parametrize(("start", "end"), list(itertools.product(Phase, Phase)))
def test_advance_takes_one_step(start: Phase, end: Phase) -> None:
    """No phase can be skipped, repeated or gone back to, and the last two have methods of their own."""
    transaction = at(start)
    if end in FORWARD and end == start + 1:
        transaction.advance(end)
        assert transaction.phase is end
        return
    with pytest.raises(TransactionError) as caught:
        transaction.advance(end)
    assert transaction.phase is start
    assert caught.value.got == end.name
    assert start.name.lower() in str(caught.value)


@pytest.mark.parametrize("phase", list(Phase))
def test_only_a_verified_step_commits(phase: Phase) -> None:
    """A commit before the tokens are chosen, or after the end, is refused."""
    transaction = at(phase)
    if phase is Phase.VERIFIED:
        transaction.commit(1)
        assert transaction.phase is Phase.COMMITTED
        return
    with pytest.raises(TransactionError):
        transaction.commit(1)
    assert transaction.phase is phase


@pytest.mark.parametrize("phase", list(Phase))
def test_all_but_a_committed_step_restore(phase: Phase) -> None:
    """A restore works from everywhere and twice; what is committed cannot be taken back."""
    transaction = at(phase)
    if phase is Phase.COMMITTED:
        with pytest.raises(TransactionError):
            transaction.restore()
        return
    transaction.restore()
    transaction.restore()
    assert transaction.phase is Phase.RESTORED
