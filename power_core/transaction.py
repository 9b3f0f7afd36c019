r"""
The state machine of one step of one request.

    open -> drafted -> evaluated -> verified -> committed
      \\________\\__________\\___________\\-----> restored

Participants are the target, the draft, the sampler and the decoder. All are checkpointed when a
transaction opens; anything that goes wrong before `committed`, a failure inside commit included,
brings every one of them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from power_core.errors import TransactionError

__all__ = ["Participant", "Phase", "Transaction"]


class Phase(IntEnum):
    """Where a transaction stands. The first five follow one another; `restored` can follow any but the fifth."""

    OPEN = 0  # every participant is checkpointed
    DRAFTED = 1  # the proposal is fixed
    EVALUATED = 2  # the target has computed the rows
    VERIFIED = 3  # tokens are chosen up to the first mismatch
    COMMITTED = 4
    RESTORED = 5


class Participant(Protocol):
    """Something whose state a step changes."""

    def checkpoint(self) -> object:
        """Retain the current state; cheap, called at each step."""

    def commit(self, n: int) -> None:
        """Keep the first *n* rows of the step and drop the rest."""

    def restore(self, checkpoint: object) -> None:
        """Bring back the state *checkpoint* was taken in, wherever the step had got to."""


class Transaction:
    """
    One step of one request over its participants, which commit in the order given and restore in reverse.

    Raises:
        Exception: Whatever a participant's checkpoint raised; nothing has changed then.
    """

    __slots__ = ("_checkpoints", "_failure", "_participants", "phase")

    def __init__(self, participants: Sequence[Participant]) -> None:
        self._participants = participants
        self._checkpoints = [participant.checkpoint() for participant in participants]
        self._failure: Exception | None = None
        self.phase = Phase.OPEN

    def checkpoint_of(self, participant: Participant) -> object:
        """What *participant* retained when the transaction opened."""
        return self._checkpoints[self._participants.index(participant)]

    def advance(self, phase: Phase) -> None:
        """
        Enter *phase*, which must follow the current one.

        Raises:
            TransactionError: The transition is illegal; `committed` and `restored` have methods of their own.
        """
        if phase != self.phase + 1 or phase >= Phase.COMMITTED:
            raise self._illegal(phase)
        self.phase = phase

    def commit(self, n: int) -> None:
        """
        Commit the first *n* rows of the step in every participant; a failure restores them all.

        Raises:
            TransactionError: The step was not verified.
            Exception: Whatever a participant's commit raised, after the restore.
        """
        if self.phase != Phase.VERIFIED:
            raise self._illegal(Phase.COMMITTED)
        try:
            for participant in self._participants:
                participant.commit(n)
        except BaseException as cause:
            try:
                self.restore()
            except Exception:
                if isinstance(cause, Exception):
                    raise
            raise  # an interrupt stays one; what could not be restored comes up at the next restore
        self.phase = Phase.COMMITTED

    def restore(self) -> None:
        """
        Bring every participant back to where the transaction opened. A second call only reports again.

        Raises:
            TransactionError: The step is committed.
            Exception: The first failure of a participant's restore, after all others were restored.
        """
        if self.phase == Phase.RESTORED:
            if self._failure is not None:
                raise self._failure
            return
        if self.phase == Phase.COMMITTED:
            raise self._illegal(Phase.RESTORED)
        self.phase = Phase.RESTORED
        pairs = zip(self._participants, self._checkpoints, strict=True)
        for participant, checkpoint in reversed(list(pairs)):
            try:
                participant.restore(checkpoint)
            except Exception as exc:  # noqa: BLE001 - the others must be restored whatever one of them raises
                self._failure = self._failure or exc
        if self._failure is not None:
            raise self._failure

    def _illegal(self, phase: Phase) -> TransactionError:
        return TransactionError(
            f"a step cannot go from {self.phase.name.lower()} to {phase.name.lower()}",
            who="transaction",
            got=phase.name,
            fix="this is a bug in the engine",
        )
