"""
The cost-aware width policy: as many tokens as pay for themselves on this machine and this text.

A round is worth ``sum_i s_i - rate * (c(1 + k) - c(1))`` plain steps: s_i is the estimated chance that
the first i tokens are accepted, c the measured cost of a forward, and ``rate`` the tokens a unit of
time has been bringing lately. Weighing time by the going rate, rather than taking the best ratio of
each single round, is what maximises tokens over total time (renewal-reward; Dinkelbach 1967): a long
sure proposal amid plain text is used to its end, one amid many others is cut where its tail flags.

Two decisions share the formula. `trim` makes it with the proposal in hand. `limit` weighs what asking
costs against what trimmed proposals of that length have lately been worth.

What keeps it from ever costing much is a purse, counted in plain steps: each token pays a little in,
losses are paid from it, and where it is empty nothing is risked. So a request's total loss stays
below `allowance` + `budget` * its tokens + one round, whatever the text and however the estimates err.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from power_core.scheduler.acceptance import AcceptanceTable
from power_core.scheduler.costs import CostCurve, CostModel
from power_core.scheduler.policy import DraftShape, RequestWidth, Round
from power_core.types import JSON, TokenId

__all__ = ["CostAwarePolicy", "hot_widths"]

_LADDER = (1, 2, 3, 4, 5, 7, 10, 15, 23, 31, 47, 63)
_FEW = 6  # a target that declares no more shapes than this has chosen them; others are thinned
_PURSE_MOST = 2.0  # earlier gains are not to be gambled away
_DEBT_MOST = -2.0
_CREDIT = 0.5  # plain steps a sure first token may risk on an empty purse
_RATE_KEEP = 0.93  # a rate is that of about the last 15 rounds
_RATE_PRIOR = 4.0
_WORTH_PRIOR = (0.2, 0.6, 0.9)  # chance of a token by context, until proposals have been seen
_WORTH_STEP = 0.25
_PROBE_EXTRA = 1.5
_FIRST_WAIT, _LONGEST_WAIT = 2, 32  # tokens between probes; the purse may make it longer


def hot_widths(draft_max: int, rows: Sequence[int] = ()) -> tuple[int, ...]:
    """
    The few proposal lengths worth using: a target's shapes have to be warm to be fast.

    Args:
        draft_max: K, always one of them.
        rows: Row counts that the target computes without padding.

    >>> hot_widths(8), hot_widths(8, rows=(1, 4, 8, 16))
    ((1, 2, 3, 4, 5, 7, 8), (3, 7, 8))
    """
    declared = [width - 1 for width in rows if 1 < width <= draft_max + 1]
    ladder = declared if 0 < len(declared) <= _FEW else [k for k in _LADDER if k <= draft_max]
    return tuple(sorted({*ladder, draft_max})) if draft_max > 0 else ()


@frozen
class CostAwarePolicy:
    """
    Settings of the policy; see the module.

    Args:
        costs: The session's cost model, or a function that gives a fixed curve.
        rows: Row counts that the target declares, for `hot_widths`.
        budget: Part of the time that may be spent on finding out, in plain steps a token.
        allowance: Plain steps a request may lose before it has earned any.
        free: Asking a drafter is free where it costs less than this part of a plain step.
    """

    costs: CostModel | Callable[[], CostCurve]
    rows: tuple[int, ...] = ()
    budget: float = 0.01
    allowance: float = 1.0
    free: float = 0.008
    name = "cost-aware"

    def begin(self, shape: DraftShape) -> RequestWidth:
        return CostAwareWidth(self, shape)

    def curve(self) -> CostCurve:
        """The costs to decide by at present."""
        return self.costs.curve if isinstance(self.costs, CostModel) else self.costs()


class CostAwareWidth:
    """The policy's state of one request. Made by `CostAwarePolicy.begin`."""

    def __init__(self, policy: CostAwarePolicy, shape: DraftShape) -> None:
        self._policy = policy
        self._shape = shape
        self._ladder = hot_widths(shape.draft_max, policy.rows)
        self._curve = policy.curve()
        self._table = AcceptanceTable()
        self._worth = _Worth(self._ladder, self._curve)
        self._rate = _Rate()
        self._purse = policy.allowance
        self._since_probe = 0  # tokens
        self._probe_wait = _FIRST_WAIT
        # Of the round in progress; taken up by `feedback` only.
        self._asked = 0
        self._is_probe = False
        self._context = self._table.context
        self._ids: Sequence[TokenId] = ()
        self._cells: Sequence[int] = ()
        self._values: Sequence[float] = ()
        # For the receipt.
        self._asks = self._probes = 0

    # -- the two decisions ------------------------------------------------------------------------

    def limit(self, room: int, beside: int = 0) -> int:  # noqa: ARG002 - what is asked for costs the same beside others
        self._curve = self._policy.curve()
        self._ids, self._cells, self._values = (), (), ()
        self._is_probe = False
        self._context = self._table.context
        self._asked = self._ask(room) if room > 0 else 0
        return self._asked

    def _ask(self, room: int) -> int:
        """Ask for the length whose worth beyond its cost is largest; where none has any, now and then for a probe."""
        longest = min(room, self._shape.draft_max)
        costs = self._curve.drafts.get(self._shape.strategy)
        if costs is None or costs[min(longest, len(costs) - 1)] <= self._policy.free:
            return longest
        lengths = self._lengths(longest)
        if not lengths:
            return 0
        best = self._worth.best(self._context, lengths, costs, self._rate.value) if self._purse > _DEBT_MOST else 0
        if best:
            return best
        return self._probe(lengths, costs)

    def _probe(self, lengths: Sequence[int], costs: Sequence[float]) -> int:
        """The longest proposal that costs little more than the shortest, where one is due and paid for."""
        last = len(costs) - 1
        most = _PROBE_EXTRA * costs[min(lengths[0], last)]
        probe = max((k for k in lengths if costs[min(k, last)] <= most), default=lengths[0])
        if self._since_probe < self._probe_wait or self._purse < costs[min(probe, last)]:
            return 0
        self._is_probe = True
        return probe

    def _lengths(self, longest: int) -> Sequence[int]:
        if self._shape.fixed:
            return (longest,) if longest == self._shape.draft_max else ()
        return [k for k in self._ladder if k <= longest]

    def trim(self, token_ids: Sequence[TokenId], confidences: Sequence[float] | None, beside: int = 0) -> int:
        self._ids = token_ids
        self._cells = self._table.cells(len(token_ids), confidences)
        self._values = values = []
        if not token_ids:
            return 0
        survival = self._table.survival(self._cells)
        step, rate, first = self._curve.step, self._rate.value, survival[0]
        base, expected, done = step(beside + 1), 0.0, 0
        # An unsure first token risks the extra cost of the whole proposal; the purse must be able to bear it.
        bearable = (max(self._purse, 0.0) + _CREDIT * first) / (1.0 - first + 1e-9)
        best, best_value = 0, 0.0
        for k in self._ladder:
            if k > len(survival):
                break
            expected += sum(survival[done:k])
            done = k
            extra = step(beside + 1 + k) - base
            value = expected - rate * extra
            if value > best_value and extra <= bearable:
                best, best_value = k, value
            values.append(best_value)
        return best

    # -- what is learned --------------------------------------------------------------------------

    def feedback(self, outcome: Round) -> None:
        if outcome.replayed:
            return
        budget, tokens = self._policy.budget, len(outcome.chosen)
        right = self._table.learn(self._ids, self._cells, outcome.chosen)
        cost = self._curve.step(1 + outcome.drafted) + self._curve.draft(self._shape.strategy, self._asked)
        self._rate.add(tokens, cost)
        # Plain decoding would have taken one step for each token.
        purse = self._purse + tokens - cost + budget * tokens
        self._purse = min(max(purse, _DEBT_MOST), _PURSE_MOST)
        self._since_probe += tokens
        if self._asked:
            self._asks += 1
            self._worth.add(self._context, self._asked, self._values)
        if self._is_probe:
            self._probes += 1
            self._since_probe = 0
            self._probe_wait = _FIRST_WAIT if right else min(2 * self._probe_wait, _LONGEST_WAIT)
        self._asked, self._is_probe = 0, False
        self._ids, self._cells, self._values = (), (), ()

    def summary(self) -> JSON:
        return {
            "asks": self._asks,
            "probes": self._probes,
            "purse": round(self._purse, 4),
            "rate": round(self._rate.value, 4),
            "curve": self._curve.version,
        }


class _Rate:
    """Tokens a unit of time has been bringing lately, never less than plain decoding's 1."""

    __slots__ = ("_cost", "_tokens", "value")

    def __init__(self) -> None:
        self._tokens = self._cost = _RATE_PRIOR
        self.value = 1.0

    def add(self, tokens: int, cost: float) -> None:
        self._tokens = self._tokens * _RATE_KEEP + tokens
        self._cost = self._cost * _RATE_KEEP + cost
        self.value = max(self._tokens / self._cost, 1.0)


class _Worth:
    """What proposals of each length have lately been worth once trimmed, by what the one before did."""

    __slots__ = ("_ladder", "_values")

    def __init__(self, ladder: Sequence[int], curve: CostCurve) -> None:
        self._ladder = ladder
        self._values = [_expected_worth(ladder, curve, chance) for chance in _WORTH_PRIOR]

    def best(self, context: int, lengths: Sequence[int], costs: Sequence[float], rate: float) -> int:
        """The length worth most beyond what asking for it costs, or 0."""
        values, best, best_value, last = self._values[context], 0, 0.0, len(costs) - 1
        for i, k in enumerate(self._ladder):
            value = values[i] - rate * costs[min(k, last)]
            if value > best_value and k in lengths:
                best, best_value = k, value
        return best

    def add(self, context: int, asked: int, seen: Sequence[float]) -> None:
        """A proposal was asked for *asked* tokens; `seen[i]` is what its first `ladder[i]` were worth."""
        values = self._values[context]
        value = slope = 0.0
        for i, k in enumerate(self._ladder):
            if i < len(seen):
                slope = seen[i] - value if k <= asked else slope
                value = seen[i]
            elif k > asked:
                # Nobody asked for these. A proposal that was worth using to its end would have gone on.
                value += slope / 2
            values[i] += _WORTH_STEP * (value - values[i])


def _expected_worth(ladder: Sequence[int], curve: CostCurve, chance: float) -> list[float]:
    """Worth of each length where every token is accepted with *chance*."""
    worths, best = [], 0.0
    for k in ladder:
        best = max(best, sum(chance**i for i in range(1, k + 1)) - (curve.step(1 + k) - 1.0))
        worths.append(best)
    return worths
