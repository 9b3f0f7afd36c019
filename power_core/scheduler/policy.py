"""
Width policies: how many tokens to ask a drafter for, and how many of them to let the target check.

One small interface, shared by every strategy and naming none. A policy decides speed, never tokens:
whatever it answers is clamped to what the step can hold exactly.

A round goes `limit` -> (propose) -> `trim` -> (forward, verify, commit) -> `feedback`. Only `feedback`
changes what a policy has learned, so a step that is undone leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import field, frozen

from power_core.errors import ConfigError
from power_core.types import JSON, TokenId

__all__ = [
    "AdaptivePolicy",
    "DraftShape",
    "FixedPolicy",
    "RequestWidth",
    "Round",
    "WidthPolicy",
]


@frozen
class DraftShape:
    """
    What a policy is told of a request before its first round.

    Args:
        draft_max: K, the most proposal tokens a round.
        rollback: S, the resident rollback rows, or None where they are unlimited.
        strategy: Key of the drafter's own costs; opaque.
        fixed: Whether the drafter proposes in one shape only: it is asked for K tokens or for none.
        sequential: Whether the drafter's time grows with what it proposes, and it heeds `RequestWidth.stop_below`.
    """

    draft_max: int
    rollback: int | None = None
    strategy: str = ""
    fixed: bool = False
    sequential: bool = False


@frozen
class Round:
    """
    What became of a round.

    Args:
        drafted: Proposed tokens that the target checked.
        accepted: Those it chose too.
        chosen: Every token it chose: the accepted ones, then a correction or one for free.
        replayed: Whether the commit had to go back further than the resident window.
    """

    drafted: int
    accepted: int
    chosen: Sequence[TokenId] = ()
    replayed: bool = False


class RequestWidth(Protocol):
    """
    A policy's state of one request.

    Attributes:
        chances: For the proposal that was trimmed last, the estimated chance that its first i+1 tokens
            are accepted, i = 0, 1, ...; empty where the policy estimates none.
        stop_below: What `DraftRequest.stop_below` is to be for the proposal that `limit` was asked about last.
    """

    chances: Sequence[float]
    stop_below: float

    @property
    def mode(self) -> str:
        """What the policy is doing with the request, in a word; only `feedback` changes it."""

    def limit(self, room: int, beside: int = 0, backlog: int = 0) -> int:
        """
        How many tokens to ask for, 0 to *room*.

        Args:
            room: min(K, remaining tokens - 1, remaining context, room in the class, guard).
            beside: Rows that other requests have in this step.
            backlog: Rows whose states the drafter must be told of before it can propose.
        """

    def trim(self, token_ids: Sequence[TokenId], confidences: Sequence[float] | None, beside: int = 0) -> int:
        """How many of the proposed *token_ids* the target shall check, from the first on."""

    def feedback(self, outcome: Round) -> None:
        """The round is committed. Called for every round that chose a token, also where nothing was asked."""

    def summary(self) -> JSON:
        """What a receipt says about the request's decisions."""


class WidthPolicy(Protocol):
    """
    Makes the state of each request.

    Attributes:
        name: As configured.
    """

    name: str

    def begin(self, shape: DraftShape) -> RequestWidth:
        """
        State for a new request.

        Raises:
            ConfigError: The policy cannot drive such a drafter.
        """


@frozen
class FixedPolicy:
    """
    Always one length.

    Args:
        length: The length; None takes the request's K.
    """

    length: int | None = None
    name = "fixed"

    def begin(self, shape: DraftShape) -> RequestWidth:
        return _FixedWidth(shape.draft_max if self.length is None else min(self.length, shape.draft_max))


class _FixedWidth:
    chances: Sequence[float] = ()
    stop_below = 0.0
    mode = "fixed"

    def __init__(self, draft_max: int) -> None:
        self._draft_max = draft_max

    def limit(self, room: int, beside: int = 0, backlog: int = 0) -> int:  # noqa: ARG002 - the protocol's
        return min(self._draft_max, room)

    def trim(self, token_ids: Sequence[TokenId], confidences: Sequence[float] | None, beside: int = 0) -> int:  # noqa: ARG002 - the protocol's
        return len(token_ids)

    def feedback(self, outcome: Round) -> None:
        pass  # nothing it could change

    def summary(self) -> JSON:
        return {"draft_max": self._draft_max}


@frozen
class AdaptivePolicy:
    """
    The adaptive controller: two hot shapes and a one-way exit.

    A request starts at min(K, S), inside the rollback window. Its first round opens the wide shape K if
    it is accepted whole and closes it otherwise. Partly accepted rounds then keep the shape: changing
    verify shapes costs more than acceptance gains. *patience* rounds of low yield in a row switch the
    request to target-only for good. A replayed round is no feedback, neither as the first nor later.

    Args:
        min_yield: A round is low where less than this part of its proposal was accepted.
        patience: Low rounds in a row that end drafting.
    """

    min_yield: float = 0.25
    patience: int = field(default=4)
    name = "adaptive"

    def begin(self, shape: DraftShape) -> RequestWidth:
        if shape.fixed:
            raise ConfigError(
                f"the adaptive policy cannot drive strategy {shape.strategy!r}, whose draft shape is fixed",
                who="scheduler",
                where="spec_width_policy",
                got=self.name,
                expected="fixed or cost-aware",
                fix="choose another --width-policy (spec_mtp_adaptive is its older name), or another strategy",
            )
        return _AdaptiveWidth(self, shape)


class _AdaptiveWidth:
    chances: Sequence[float] = ()
    stop_below = 0.0

    def __init__(self, policy: AdaptivePolicy, shape: DraftShape) -> None:
        self._policy = policy
        self._wide = shape.draft_max
        self._width = shape.draft_max if shape.rollback is None else min(shape.draft_max, shape.rollback)
        self._is_first = True
        self._low_rounds = 0
        self._is_off = False

    @property
    def mode(self) -> str:
        if self._is_off:
            return "target-only"
        return "wide" if self._width == self._wide else "narrow"

    def limit(self, room: int, beside: int = 0, backlog: int = 0) -> int:  # noqa: ARG002 - the protocol's
        return 0 if self._is_off else min(self._width, room)

    def trim(self, token_ids: Sequence[TokenId], confidences: Sequence[float] | None, beside: int = 0) -> int:  # noqa: ARG002 - the protocol's
        return len(token_ids)

    def feedback(self, outcome: Round) -> None:
        if outcome.replayed or outcome.drafted == 0:
            return
        if self._is_first:
            self._is_first = False
            if outcome.accepted == outcome.drafted:
                self._width = self._wide
        is_low = outcome.accepted < self._policy.min_yield * outcome.drafted
        self._low_rounds = self._low_rounds + 1 if is_low else 0
        self._is_off = self._is_off or self._low_rounds >= self._policy.patience

    def summary(self) -> JSON:
        return {"width": self._width, "target_only": self._is_off}
