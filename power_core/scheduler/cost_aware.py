"""
The cost-aware width policy: as many tokens as pay for themselves on this machine and this text.

A round is worth ``sum_i s_i - rate * (c(1 + k) - c(1))`` plain steps: s_i is the estimated chance that
the first i tokens are accepted, c the measured cost of a forward, and ``rate`` the tokens a unit of
time has been bringing lately. Weighing time by the going rate, rather than taking the best ratio of
each single round, is what maximises tokens over total time (renewal-reward; Dinkelbach 1967): a long
sure proposal amid plain text is used to its end, one amid many others is cut where its tail flags.
Beside other requests time is dearer, for they all wait: `rate` is the tokens that it brings all of them.

Two decisions share the formula. `trim` makes it with the proposal in hand. `limit` weighs what asking
costs against what trimmed proposals of that length have lately been worth.

What keeps it from ever costing much is a purse, counted in plain steps: each token pays a little in,
losses are paid from it, and the less it holds the less is risked, down to nothing. So what a request can
lose in all is `allowance`, `budget` for each token, a small debt and one round, whatever the text and
however the estimates err. Only proposals that were seen to be right, though unchecked, fill it up sooner.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from attrs import frozen

from power_core.scheduler.acceptance import WARM, AcceptanceTable
from power_core.scheduler.costs import CostCurve, CostModel
from power_core.scheduler.policy import DraftShape, RequestWidth, Round
from power_core.types import JSON, TokenId

__all__ = ["CostAwarePolicy", "hot_widths"]

_LADDER = (1, 2, 3, 4, 5, 7, 10, 15, 23, 31, 47, 63)
_FEW = 6  # a target that declares no more shapes than this has chosen them; others are thinned
_PURSE_MOST = 6.0  # earlier gains are not to be gambled away
_DEBT_MOST = -0.5
_CREDIT = 0.5  # plain steps a sure first token may risk on an empty purse
_FORGONE_DRIFT = 0.4  # plain steps of each round that chance could have brought
_FORGONE_LEAST = 5.0  # plain steps
_FORGONE_PART = 0.6
_RATE_KEEP = 0.965  # a rate is that of about the last 30 rounds
_RATE_PRIOR = 20.0
_WORTH_PRIOR = (0.5, 0.6, 0.9, 0.95)  # chance of a token by context, until proposals have been seen
_WORTH_STEP = 0.2
_CURIOSITY = 0.6  # of a step's worth is expected of the next one
_PROBE_EXTRA = 1.5
_REACH_STEP = 0.2
_FIRST_WAIT, _LONGEST_WAIT = 2, 12  # tokens between probes; the purse may make it longer
_WRONG_ROUNDS, _FREE_WAIT = 12, 3  # so often wrong in a row, a free drafter is left alone for a token more, up to 3
_IDLE_ROUNDS = 8  # without a token checked, before a request is said to decode plainly


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
        budget: Part of the time that may be lost on finding out, in plain steps a token.
        allowance: Plain steps a request may lose before it has earned any.
        head_start: The same, for each plain step that a first round should bring: who may win more may risk more.
        free: Asking a drafter is free where it costs less than this part of a plain step.
    """

    costs: CostModel | Callable[[], CostCurve]
    rows: tuple[int, ...] = ()
    budget: float = 0.0115
    allowance: float = 0.75
    head_start: float = 2.0
    free: float = 0.008
    name = "cost-aware"

    def begin(self, shape: DraftShape) -> RequestWidth:
        return CostAwareWidth(self, shape)

    def curve(self) -> CostCurve:
        """The costs to decide by at present."""
        return self.costs.curve if isinstance(self.costs, CostModel) else self.costs()

    @property
    def needs_plain_step(self) -> bool:
        """Whether nobody knows any more what a plain step costs."""
        return isinstance(self.costs, CostModel) and self.costs.needs_plain_step


class CostAwareWidth:
    """The policy's state of one request. Made by `CostAwarePolicy.begin`."""

    def __init__(self, policy: CostAwarePolicy, shape: DraftShape) -> None:
        self._policy = policy
        self._shape = shape
        self._ladder = hot_widths(shape.draft_max, policy.rows)
        self._pads = bool(policy.rows) and not {*range(2, shape.draft_max + 2)} <= {*policy.rows}
        self._curve = policy.curve()
        self._beside = 0  # rows of others in the step at hand
        self._table = AcceptanceTable()
        self._worth = _Worth(self._ladder, self._curve)
        self._rate = _Rate()
        expected = self._worth.expected(self._curve.drafts.get(shape.strategy))
        self._purse = policy.allowance + policy.head_start * expected
        self.chances: Sequence[float] = ()
        self.stop_below = 0.0
        self._reach = 2.0  # tokens that a sequential drafter gets to before it stops
        self._wrong = 0  # proposals in a row whose first token was
        self._since_ask = self._since_probe = 0  # tokens
        self._probe_wait = _FIRST_WAIT
        # Of the round in progress; taken up by `feedback` only.
        self._asked = 0
        self._feed = 0.0  # cost of what the drafter is told before
        self._is_probe = False
        self._context = self._table.context
        self._ids: Sequence[TokenId] = ()
        self._cells: Sequence[int] = ()
        self._values: Sequence[float] = ()
        self._wanted = 0
        self._forgone = _Forgone()
        # For the receipt.
        self._asks = self._probes = 0
        self._idle_rounds = _IDLE_ROUNDS

    @property
    def mode(self) -> str:
        return "plain" if self._idle_rounds >= _IDLE_ROUNDS else "drafting"

    # -- the two decisions ------------------------------------------------------------------------

    def limit(self, room: int, beside: int = 0, backlog: int = 0) -> int:
        self._curve, self._beside = self._policy.curve(), beside
        self._ids, self._cells, self._values = (), (), ()
        self._is_probe, self._wanted, self.stop_below = False, 0, 0.0
        self._context = self._table.context
        self._feed = self._curve.feed(self._shape.strategy, backlog)
        self._asked = self._ask(room, beside) if room > 0 else 0
        return self._asked

    def _ask(self, room: int, beside: int) -> int:
        """Ask for the length whose worth beyond its cost is largest; where none has any, now and then for a probe."""
        longest = min(room, self._shape.draft_max)
        costs = self._curve.drafts.get(self._shape.strategy)
        if costs is None:  # what asking costs can only be told beside a plain step
            return longest if beside or not self._policy.needs_plain_step else 0
        if costs[min(longest, len(costs) - 1)] <= self._policy.free:
            return longest if self._since_ask >= min(self._wrong // _WRONG_ROUNDS, _FREE_WAIT) else 0
        if self._shape.sequential:
            self.stop_below = self._curve.stop_below(self._shape.strategy, longest, self._going_rate)
            costs = costs[: 1 + max(round(self._reach), 1)]
        lengths = self._lengths(longest)
        if not lengths:
            return 0
        feed = self._feed if self._asks else 0.0  # the prompt's rows are told once for the whole request
        if self._purse > _DEBT_MOST and (
            best := self._worth.best(self._context, lengths, costs, feed, self._going_rate)
        ):
            self._feed = feed
            return best
        return self._probe(lengths, costs)

    def _probe(self, lengths: Sequence[int], costs: Sequence[float]) -> int:
        """The longest proposal that costs little more than the shortest, where one is due and paid for."""
        last = len(costs) - 1
        most = _PROBE_EXTRA * costs[min(lengths[0], last)]
        probe = max((k for k in lengths if costs[min(k, last)] <= most), default=lengths[0])
        if self._since_probe < self._probe_wait or self._purse < costs[min(probe, last)] + self._feed:
            return 0
        if not any(k > self._forgo(self._curve.added(k, self._beside) + costs[min(k, last)]) for k in lengths):
            return 0  # not even tokens that are all right would pay
        self._is_probe = True
        return probe

    def _lengths(self, longest: int) -> Sequence[int]:
        if self._shape.fixed:
            return (longest,) if longest == self._shape.draft_max else ()
        if self._shape.sequential:
            return (longest,)  # it stops by itself
        return [k for k in self._ladder if k <= longest]

    def trim(self, token_ids: Sequence[TokenId], confidences: Sequence[float] | None, beside: int = 0) -> int:
        self._ids, self._beside = token_ids, beside
        self._cells = self._table.cells(len(token_ids), confidences)
        self._values = values = []
        self.chances = survival = self._table.survival(self._cells)
        if not token_ids or (self._policy.needs_plain_step and not beside):
            return 0  # beside other requests a step of one row cannot be had
        rate, first = self._going_rate, survival[0]
        expected, done = 0.0, 0
        # An unsure first token risks the extra cost of the whole proposal; the purse must be able to bear it.
        credit = _CREDIT * first * max(1.0 - min(self._purse, 0.0) / _DEBT_MOST, 0.0)
        bearable = (max(self._purse, 0.0) + credit) / (1.0 - first + 1e-9)
        best = wanted = 0
        best_value = wanted_value = 0.0
        for k in self._cuts(len(survival)):
            expected += sum(survival[done:k])
            done = k
            extra = self._curve.added(k, beside)
            value = expected - rate * extra
            if value > wanted_value:
                wanted, wanted_value = k, value
                if self._forgo(extra) <= bearable:
                    best, best_value = k, value
            values.append(best_value)
        self._wanted = wanted if wanted > best else 0
        return best

    def _cuts(self, count: int) -> Sequence[int]:
        """What a proposal of *count* tokens may be cut to; where rows are padded, fewer would not cost less."""
        known = bisect_right(self._ladder, count)
        cuts = self._ladder[:known]
        return (*cuts, count) if self._pads and count not in cuts else cuts

    @property
    def _going_rate(self) -> float:
        """Tokens, of all requests of the step, that a unit of time brings."""
        return self._rate.value * self._forgo(1.0)

    def _forgo(self, time: float) -> float:
        """Tokens that plain decoding would bring the requests of the step in *time*."""
        return time * (self._beside + 1) / self._curve.step(self._beside + 1)

    # -- what is learned --------------------------------------------------------------------------

    def feedback(self, outcome: Round) -> None:
        self._idle_rounds = 0 if outcome.drafted else self._idle_rounds + 1
        if outcome.replayed:
            return
        tokens = len(outcome.chosen)
        right = self._table.learn(self._ids, self._cells, outcome.chosen)
        drafted = len(self._ids) if self._shape.sequential else self._asked
        time = self._curve.added(outcome.drafted, self._beside) + self._curve.draft(self._shape.strategy, drafted)
        cost = 1.0 + self._forgo(time + (self._feed if self._asked else 0.0))
        self._rate.add(tokens, cost)
        # Plain decoding would have taken one step for each token.
        purse = self._purse + tokens - cost + self._policy.budget * tokens
        if self._wanted:
            self._forgone.watch(
                self._ids[: self._wanted], 1.0 + self._forgo(self._curve.added(self._wanted, self._beside))
            )
        self._purse = min(purse + self._forgone.follow(outcome.chosen), _PURSE_MOST)
        self._since_ask += tokens
        self._since_probe += tokens
        if self._asked:
            self._asks += 1
            self._since_ask = 0
            self._wrong = 0 if right else self._wrong + bool(self._ids)
            self._reach += _REACH_STEP * (drafted - self._reach)
            self._worth.add(self._context, self._asked, self._values, was_right=0 < len(self._ids) == right)
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


class _Forgone:
    """
    What proposals would have earned that an empty purse kept from being checked.

    The target goes on to choose the same tokens, so it can be seen. A purse that holds up what would
    clearly have paid is filled up again; the sum starts anew at each loss that outweighs it (CUSUM).
    """

    __slots__ = ("_cost", "_ids", "_right", "_sum")

    def __init__(self) -> None:
        self._ids: Sequence[TokenId] = ()
        self._right = 0
        self._cost = self._sum = 0.0

    def watch(self, token_ids: Sequence[TokenId], cost: float) -> None:
        """A proposal that checking would have cost *cost*; one at a time is enough."""
        if not self._ids:
            self._ids, self._cost, self._right = token_ids, cost, 0

    def follow(self, chosen: Sequence[TokenId]) -> float:
        """The target chose *chosen*; returns what the purse gets."""
        ids = self._ids
        if not ids:
            return 0.0
        for actual in chosen:
            if ids[self._right] != actual:
                break
            self._right += 1
            if self._right == len(ids):
                break
        else:
            return 0.0  # right so far
        self._ids = ()
        self._sum = max(self._sum + self._right + 1 - self._cost - _FORGONE_DRIFT, 0.0)
        if self._sum < _FORGONE_LEAST:
            return 0.0
        earned, self._sum = self._sum * _FORGONE_PART, 0.0
        return earned


class _Worth:
    """What proposals of each length have lately been worth once trimmed, by what the one before did."""

    __slots__ = ("_ladder", "_values")

    def __init__(self, ladder: Sequence[int], curve: CostCurve) -> None:
        self._ladder = ladder
        self._values = [_expected_worth(ladder, curve, chance) for chance in _WORTH_PRIOR]

    def best(self, context: int, lengths: Sequence[int], costs: Sequence[float], feed: float, rate: float) -> int:
        """The length worth most beyond *feed* and what asking for it costs, or 0."""
        values, best, best_value, last = self._values[context], 0, 0.0, len(costs) - 1
        for i, k in enumerate(self._ladder):
            value = values[i] - rate * (costs[min(k, last)] + feed)
            if value > best_value and k in lengths:
                best, best_value = k, value
        return best

    def expected(self, costs: Sequence[float] | None) -> float:
        """What a first proposal should bring beyond what asking costs, at most 1; 0 until that is known."""
        if costs is None:
            return 0.0
        last = len(costs) - 1
        nets = [v - costs[min(k, last)] for v, k in zip(self._values[WARM], self._ladder, strict=True)]
        return min(max([0.0, *nets]), 1.0)

    def add(self, context: int, asked: int, seen: Sequence[float], *, was_right: bool) -> None:
        """
        Take up a proposal that was asked for *asked* tokens: `seen[i]` is what its first `ladder[i]` were worth.

        Of longer ones is known what they used to add; where all of this one *was_right*, a little more.
        """
        values = self._values[context]
        before = value = slope = 0.0  # of the longest length that was asked for
        for i, k in enumerate(self._ladder):
            old = values[i]
            if k <= asked:
                if i < len(seen):
                    slope, value = seen[i] - value, seen[i]
                before = old
                values[i] += _WORTH_STEP * (value - old)
            else:
                longer = value + old - before + (_CURIOSITY * slope if was_right else 0.0)
                values[i] += _WORTH_STEP * (longer - old)


def _expected_worth(ladder: Sequence[int], curve: CostCurve, chance: float) -> list[float]:
    """Worth of each length where every token is accepted with *chance*."""
    worths, best = [], 0.0
    for k in ladder:
        best = max(best, sum(chance**i for i in range(1, k + 1)) - (curve.step(1 + k) - 1.0))
        worths.append(best)
    return worths
