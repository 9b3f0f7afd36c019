"""Drafters as the step loop sees them: one session a strategy, checked proposals, isolated failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import isnan
from operator import index
from typing import ParamSpec, TypeVar

import numpy as np

from power_core.drafter import DrafterRequirements, DraftRequest, DraftSession, Proposal
from power_core.errors import DrafterError, PowerError
from power_core.scheduler.backlog import backlog_of, catch_up
from power_core.scheduler.costs import CostModel
from power_core.types import SeqId, TokenId

__all__ = ["DraftPool", "OpenDraft", "checked_confidences", "checked_ids"]

P = ParamSpec("P")
T = TypeVar("T")


class OpenDraft:
    """
    A strategy opened for one target session.

    Args:
        name: The strategy's.
        session: Its state.
        needs: What its drafter required.
        owner: Distribution and version that provide it.
    """

    def __init__(
        self, name: str, session: DraftSession, needs: DrafterRequirements | None = None, *, owner: str = ""
    ) -> None:
        self.name = name
        self.session = session
        self.needs = needs or DrafterRequirements()
        self.owner = owner

    def call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a *method* of the draft session; what it raises is a `PowerError` that names the strategy."""
        try:
            return method(*args, **kwargs)
        except (Exception, SystemExit) as exc:
            raise self._error(exc) from exc

    def _error(self, exc: BaseException) -> PowerError:
        if isinstance(exc, PowerError):
            return exc
        return DrafterError(
            f"{type(exc).__name__}: {exc}",
            who=f"strategy {self.name!r}",
            got=exc,
            fix="report it to the plugin's author, or decode with --spec off",
        )

    def backlog(self, seq: SeqId) -> int:
        """Rows whose states the draft must be told of before it can propose for *seq*."""
        return backlog_of(self.session, seq)

    def catch_up(self, seq: SeqId, costs: CostModel) -> PowerError | None:
        """Tell the draft of its backlog, and *costs* how long that took; returns the error where it failed."""
        try:
            self.call(catch_up, self.session, seq, self.name, costs, time.perf_counter)
        except PowerError as exc:
            return exc
        return None

    def propose(
        self, requests: Sequence[DraftRequest], rewinds: Sequence[Callable[[], None]]
    ) -> list[Proposal | PowerError]:
        """
        A proposal for each request, or the error that request met.

        A failed batch is asked again one request at a time, so that one request's failure is its own.

        Args:
            requests: Of one step.
            rewinds: For each of them, brings its draft back to where the step opened.
        """
        try:
            return [self._checked(answer) for answer in self._propose(requests)]
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - plugin code may raise anything
            if len(requests) == 1:
                return [self._error(exc)]
        return [self._propose_alone(*pair) for pair in zip(requests, rewinds, strict=True)]

    def _propose_alone(self, request: DraftRequest, rewind: Callable[[], None]) -> Proposal | PowerError:
        try:
            rewind()
            return self._checked(self._propose([request])[0])
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - the same
            return self._error(exc)

    def _checked(self, answer: object) -> Proposal | PowerError:
        if isinstance(answer, Proposal) and isinstance(answer.token_ids, Sequence | np.ndarray):
            return answer
        return DrafterError(
            f"proposed {answer!r:.80}",
            who=f"strategy {self.name!r}",
            got=answer,
            expected="a Proposal with a sequence of token ids",
            fix="report it to the plugin's author",
        )

    def _propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        proposals = self.session.propose(requests)
        if len(proposals) != len(requests):
            raise DrafterError(
                f"{len(proposals)} proposals for {len(requests)} requests",
                who=f"strategy {self.name!r}",
                got=len(proposals),
                expected=len(requests),
                fix="report it to the plugin's author",
            )
        return proposals


class DraftPool:
    """Opens each strategy once, when the first request asks for it."""

    def __init__(self, opener: Callable[[str], OpenDraft]) -> None:
        self._opener = opener
        self._open: dict[str, OpenDraft] = {}

    def get(self, name: str) -> OpenDraft:
        """Raises what opening the strategy raised, `CapabilityError` where nobody provides it."""
        if name not in self._open:
            self._open[name] = self._opener(name)
        return self._open[name]

    def close(self) -> None:
        """
        Close every session, whatever one of them raises.

        Raises:
            PowerError: The first failure; names the strategy.
        """
        failure: PowerError | None = None
        while self._open:
            draft = self._open.popitem()[1]
            try:
                draft.call(draft.session.close)
            except PowerError as exc:
                failure = failure or exc
        if failure is not None:
            raise failure


def checked_ids(proposal: Proposal, limit: int, vocab_size: int) -> list[TokenId]:
    """
    The proposed ids that may reach the target: at most *limit*, up to the first that is no token id.

    >>> checked_ids(Proposal([5, 7, -1, 8]), limit=8, vocab_size=10)
    [5, 7]
    """
    ids: list[TokenId] = []
    for token in proposal.token_ids[:limit]:
        try:
            value = index(token)  # ints and integer scalars; never a float
        except TypeError:
            break
        if not 0 <= value < vocab_size:
            break
        ids.append(value)
    return ids


def checked_confidences(proposal: Proposal, count: int) -> list[float] | None:
    """
    The confidences of the first *count* proposed tokens; None where the drafter gave fewer, or what are no numbers.

    >>> checked_confidences(Proposal([5, 7], [0.9, 0.5]), 1), checked_confidences(Proposal([5, 7], [0.9, None]), 2)
    ([0.9], None)
    """
    if proposal.confidences is None:
        return None
    try:
        values = [float(value) for value in proposal.confidences[:count]]
    except (TypeError, ValueError, OverflowError):
        return None
    return None if len(values) < count or any(map(isnan, values)) else values
