"""The state machine of a step allows exactly the transitions that are drawn in its module."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from attrs import define, field

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


@define(eq=False)
class Recorder:
    """A participant that writes down what is asked of it, and raises what it is told to."""

    name: str
    log: list[tuple[object, ...]]
    fails: dict[str, BaseException] = field(factory=dict)

    def checkpoint(self) -> object:
        return self._did("checkpoint", f"before {self.name}")

    def commit(self, n: int) -> None:
        self._did("commit", n)

    def restore(self, checkpoint: object) -> None:
        self._did("restore", checkpoint)

    def _did(self, call: str, what: object) -> object:
        self.log.append((call, self.name, what))
        if call in self.fails:
            raise self.fails[call]
        return what


def recorded(**fails: dict[str, BaseException]) -> tuple[Transaction, list[tuple[object, ...]]]:
    """A verified transaction of the participants a, b and c, and what they are asked after its beginning."""
    log: list[tuple[object, ...]] = []
    transaction = Transaction([Recorder(name, log, fails.get(name, {})) for name in "abc"])
    for phase in FORWARD[1:]:
        transaction.advance(phase)
    log.clear()
    return transaction, log


RESTORES = [("restore", name, f"before {name}") for name in "cba"]


def raised(call: Callable[[], None]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the caller looks at what it is
        call()
    return caught.value


def test_checkpoints_are_taken_in_order_and_kept_by_participant() -> None:
    """Each participant's own checkpoint can be asked for, whichever of several it is."""
    log: list[tuple[object, ...]] = []
    participants = [Recorder(name, log) for name in "abc"]
    transaction = Transaction(participants)
    assert log == [("checkpoint", name, f"before {name}") for name in "abc"]
    assert [transaction.checkpoint_of(each) for each in participants] == ["before a", "before b", "before c"]


def test_commit_tells_each_participant_the_rows_in_order() -> None:
    """The target is told before those that follow it; nobody is restored."""
    transaction, log = recorded()
    transaction.commit(3)
    assert log == [("commit", name, 3) for name in "abc"]
    assert transaction.phase is Phase.COMMITTED


def test_restore_goes_back_in_reverse_with_each_own_checkpoint() -> None:
    """Who was told last is brought back first; a second restore asks nobody again."""
    transaction, log = recorded()
    transaction.restore()
    transaction.restore()
    assert log == RESTORES


@pytest.mark.parametrize("failing", "abc")
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_a_commit_that_fails_restores_everybody(failing: str, error: BaseException) -> None:
    """The failure, or the interrupt, comes up as it was, and no participant keeps half a step."""
    transaction, log = recorded(**{failing: {"commit": error}})
    assert raised(lambda: transaction.commit(2)) is error
    assert [entry for entry in log if entry[0] == "restore"] == RESTORES
    assert transaction.phase is Phase.RESTORED
    transaction.restore()  # everybody is back: there is nothing to report


def test_a_restore_that_fails_still_restores_the_others_and_reports_the_first() -> None:
    """The first failure is raised now and at every later restore."""
    first, second = ValueError("c"), ValueError("b")
    transaction, log = recorded(c={"restore": first}, b={"restore": second})
    assert raised(transaction.restore) is first
    assert log == RESTORES
    assert raised(transaction.restore) is first
    assert log == RESTORES


def test_a_commit_whose_restore_fails_too_reports_the_restore() -> None:
    """A participant that cannot be brought back is worse than a failed step: that is what comes up."""
    lost = ValueError("lost")
    transaction, _ = recorded(a={"commit": ValueError("no")}, b={"restore": lost})
    assert raised(lambda: transaction.commit(2)) is lost


def test_an_interrupt_whose_restore_fails_stays_an_interrupt() -> None:
    """What could not be restored comes up at the next restore instead."""
    stop, lost = KeyboardInterrupt(), ValueError("lost")
    transaction, _ = recorded(a={"commit": stop}, b={"restore": lost})
    assert raised(lambda: transaction.commit(2)) is stop
    assert raised(transaction.restore) is lost


def test_an_illegal_step_is_a_bug_and_says_so() -> None:
    """The error names the component and says that no user did it."""
    error = raised(lambda: Transaction([]).commit(1))
    assert isinstance(error, TransactionError)
    assert (error.who, error.got) == ("transaction", "COMMITTED")
    assert str(error) == "transaction: a step cannot go from open to committed; this is a bug in the engine"
