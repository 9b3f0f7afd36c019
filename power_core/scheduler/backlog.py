"""
Rows for drafters that read hidden states: copied when they are committed, told when the drafter is next asked.

A drafter pays for every row it takes in, so a request that hardly drafts would pay for nothing. Told late, rows come
in one `observe`, which is also cheaper than one each. What is committed never changes, so telling it is no part of
the step in which it happens: an undone step undoes the proposal alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import define, field, frozen

from power_core.drafter import Drafter, DrafterRequirements, DraftRequest, DraftSession, HiddenRows, Proposal
from power_core.errors import DrafterError
from power_core.scheduler.costs import CostModel
from power_core.scheduler.kept_rows import KeptRows
from power_core.target import TargetModel, TargetSession
from power_core.types import SeqId, TokenId

__all__ = ["BacklogDrafter", "BacklogSession", "backlog_of", "catch_up"]

_MOST_ROWS = 1024  # kept for a sequence: a row is some kilobytes, and a whole context of them could be gigabytes


class BacklogDrafter:
    """A drafter whose sessions are told of hidden states late; see `BacklogSession`."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def requirements(self) -> DrafterRequirements:
        return self._drafter.requirements()

    def open(self, model: TargetModel, session: TargetSession) -> DraftSession:
        layers = self._drafter.requirements().hidden_layers
        opened = self._drafter.open(model, session)
        return BacklogSession(opened, layers) if layers else opened


@frozen(eq=False)
class _Observed:
    """What an `observe` brought."""

    committed: Sequence[TokenId]
    rows: KeptRows | None = None

    @property
    def count(self) -> int:
        return 0 if self.rows is None else self.rows.count


@define
class _Sequence:
    untold: list[_Observed] = field(factory=list)
    rows: int = 0  # in `untold`
    told: int = 0  # observations that the drafter knows of
    base: object = None  # its own checkpoint, after all that it knows of
    has_proposed: bool = False  # since `base`


class BacklogSession:
    """
    Draft state of several sequences, part of which the drafter has yet to be told.

    Args:
        session: The drafter's own session.
        layers: Target blocks whose states it reads.
    """

    def __init__(self, session: DraftSession, layers: Sequence[int]) -> None:
        self._session = session
        self._layers = tuple(layers)
        self._sequences: dict[SeqId, _Sequence] = {}

    def backlog(self, seq: SeqId) -> int:
        """Rows that the drafter will be told of before its next proposal for *seq*."""
        return self._sequences[seq].rows

    def catch_up(self, seq: SeqId) -> None:
        """Tell the drafter what it does not know of *seq*. A failure leaves it where it was."""
        sequence = self._sequences[seq]
        if sequence.untold:
            whole = _joined(sequence.untold)
            rows = None if whole.rows is None else whole.rows.told()
            if sequence.base is None:
                sequence.base = self._session.checkpoint(seq)
            try:
                self._session.observe(seq, whole.committed, rows)
            except BaseException:
                sequence.has_proposed = False
                self._session.restore(seq, sequence.base)
                raise
            sequence.told += len(sequence.untold)
            sequence.untold, sequence.rows, sequence.base, sequence.has_proposed = [], 0, None, False

    def begin(self, seq: SeqId, tokens: Sequence[TokenId]) -> None:
        self._session.begin(seq, tokens)
        self._sequences[seq] = _Sequence()

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        for request in requests:
            self.catch_up(request.seq)
            sequence = self._sequences[request.seq]
            sequence.base = self._session.checkpoint(request.seq)
        for request in requests:
            self._sequences[request.seq].has_proposed = True
        return self._session.propose(requests)

    def observe(self, seq: SeqId, committed: Sequence[TokenId], rows: HiddenRows | None) -> None:
        sequence = self._sequences[seq]
        if rows is None:
            sequence.untold.append(_Observed(tuple(committed)))
            return
        block = slice(rows.start, rows.start + rows.count)
        states = {layer: rows.rows.hidden(block, layer) for layer in self._layers}
        if not isinstance(rows.rows, KeptRows):  # those are copies already
            states = {layer: values.copy() for layer, values in states.items()}
        sequence.untold.append(_Observed(tuple(committed), KeptRows(states, rows.position, rows.count)))
        sequence.rows += rows.count

    def checkpoint(self, seq: SeqId) -> object:
        sequence = self._sequences[seq]
        if sequence.rows >= _MOST_ROWS:
            self.catch_up(seq)
        return sequence.told + len(sequence.untold)

    def restore(self, seq: SeqId, checkpoint: object) -> None:
        sequence = self._sequences[seq]
        if not isinstance(checkpoint, int) or not 0 <= checkpoint - sequence.told <= len(sequence.untold):
            raise DrafterError(f"{checkpoint!r:.40} is no checkpoint of sequence {seq}", who="backlog", got=checkpoint)
        del sequence.untold[checkpoint - sequence.told :]
        sequence.rows = sum(each.count for each in sequence.untold)
        if sequence.has_proposed and not sequence.untold:
            self._session.restore(seq, sequence.base)
            sequence.has_proposed = False

    def end(self, seq: SeqId) -> None:
        self._sequences.pop(seq, None)
        self._session.end(seq)

    def close(self) -> None:
        self._sequences.clear()
        self._session.close()


def backlog_of(session: DraftSession, seq: SeqId) -> int:
    """Rows that *session* must be told of before it can propose for *seq*."""
    return session.backlog(seq) if isinstance(session, BacklogSession) else 0


def catch_up(session: DraftSession, seq: SeqId, name: str, costs: CostModel, clock: Callable[[], float]) -> None:
    """Tell *session* of its backlog, where it has one, and *costs* how many seconds the strategy *name* took for it."""
    rows = backlog_of(session, seq)
    if rows and isinstance(session, BacklogSession):
        started = clock()
        session.catch_up(seq)
        costs.observe_feed(name, rows, clock() - started)


def _joined(parts: Sequence[_Observed]) -> _Observed:
    """Several observations as one."""
    committed = [token for part in parts for token in part.committed]
    found = [part.rows for part in parts if part.rows is not None]
    if not found:
        return _Observed(committed)
    layers = {layer: np.concatenate([rows.layers[layer] for rows in found]) for layer in found[0].layers}
    return _Observed(committed, KeptRows(layers, found[0].position, sum(rows.count for rows in found)))
