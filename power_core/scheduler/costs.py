"""
What a step costs on this machine, learned from the engine's own timings.

Every figure is relative to a step of one row, because machines drift: a neighbour that takes half
of the cores doubles every timing and changes no decision. The prior is the curve that the target
measured when it was opened (`WidthClass.costs`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from attrs import field, frozen

from power_core.shapes import WidthClass
from power_core.types import JSON

__all__ = ["CostCurve", "CostModel", "fixed_curve", "interpolate"]

WINDOW = 15  # timings a median is taken over
PRIOR_TIMINGS = 3  # the target's own measurement counts for so many of them
OUTLIER = 3.0  # a timing this far from its median is dropped ...
OUTLIERS_IN_ROW = 5  # ... unless so many follow each other: then the machine has changed
REFRESH = 16  # forwards between two curves: decisions are made against a curve that holds still
PLAIN_TIMINGS = 3  # of single-row steps, before the cost of others means anything ...
PLAIN_STALE = 100  # ... and again after so many forwards without one
FEW_ROWS = 16  # rows up to which feeding a drafter takes the time of a call, above it that of the rows
NEXT_CHANCE = 0.75  # of a token whose predecessors were all right
ROW_COST = 0.3  # of a single-row step, for targets that measured nothing: what CPUs take


@frozen
class CostCurve:
    """
    Costs at one moment, in units of a step of one row.

    Args:
        version: Counts the curves of one model.
        steps: `steps[n]` is the cost of a target forward of n rows, pad rows included; `steps[0]` is 0.
        row: Cost of each further row beyond the table.
        drafts: Strategy -> `d`, where `d[k]` is the cost of asking it for k tokens; `d[0]` is 0.
        feeds: Strategy -> cost of telling it the states of a few rows, and of each row where they are many.
        apart: See `WidthClass`.
    """

    version: int
    steps: tuple[float, ...]
    row: float
    drafts: Mapping[str, tuple[float, ...]]
    feeds: Mapping[str, tuple[float, float]] = field(factory=dict)
    apart: bool = False

    def step(self, rows: int) -> float:
        """
        Cost of a forward of *rows* rows.

        >>> CostCurve(0, (0.0, 1.0, 1.5), 0.5, {}).step(4)
        2.5
        """
        known = len(self.steps) - 1
        return self.steps[rows] if rows <= known else self.steps[known] + self.row * (rows - known)

    def added(self, tokens: int, beside: int = 0) -> float:
        """
        What checking *tokens* proposed tokens adds to a step that has *beside* rows of other sequences.

        >>> [CostCurve(0, (0.0, 1.0, 1.5), 0.5, {}, apart=apart).added(1, beside=4) for apart in (False, True)]
        [0.5, 1.0]
        """
        if self.apart and beside and tokens:
            return self.step(tokens)
        return self.step(beside + 1 + tokens) - self.step(beside + 1)

    def draft(self, strategy: str, tokens: int) -> float:
        """Cost of asking *strategy* for *tokens* tokens; 0 until it has been timed."""
        costs = self.drafts.get(strategy)
        if not costs or tokens < 1:
            return 0.0
        return costs[tokens] if tokens < len(costs) else costs[-1]

    def stop_below(self, strategy: str, tokens: int, rate: float = 1.0) -> float:
        """
        The chance below which a sequential drafter is to stop: one more token costs more than it should bring.

        Args:
            strategy: Who is asked.
            tokens: Most that it is asked for.
            rate: Tokens that a unit of time brings otherwise.

        >>> CostCurve(0, (0.0, 1.0), 0.25, {"mtp": (0.0, 0.25, 0.375, 0.5)}).stop_below("mtp", 3)
        0.5
        """
        if tokens < 2:
            return 0.0
        further = self.draft(strategy, tokens) - self.draft(strategy, 1) + self.step(1 + tokens) - self.step(2)
        return rate * further / (tokens - 1) / NEXT_CHANCE

    def feed(self, strategy: str, rows: int) -> float:
        """
        Cost of telling *strategy* the states of *rows* rows; 0 until it has been timed.

        >>> curve = CostCurve(0, (0.0, 1.0), 0.5, {}, {"dspark": (0.25, 0.03125)})
        >>> curve.feed("dspark", 0), curve.feed("dspark", 2), curve.feed("dspark", 64)
        (0.0, 0.25, 2.0)
        """
        few, each = self.feeds.get(strategy, (0.0, 0.0))
        if rows <= FEW_ROWS:
            return few if rows else 0.0
        return max(few, each * rows)

    def to_json(self) -> JSON:
        """The curve as a receipt or a cost-curve file has it."""
        return {
            "rows": {str(n): round(cost, 4) for n, cost in enumerate(self.steps) if n},
            "drafts": {name: [round(cost, 5) for cost in costs[1:]] for name, costs in self.drafts.items()},
            "feeds": {name: [round(cost, 5) for cost in costs] for name, costs in self.feeds.items()},
        }


class _Window:
    """The last timings of one kind, and their median; what lies far from it is dropped."""

    __slots__ = ("_dropped", "_values", "median")

    def __init__(self, prior: float | None = None) -> None:
        self._values: deque[float] = deque([prior] * PRIOR_TIMINGS if prior is not None else [], maxlen=WINDOW)
        self._dropped = 0
        self.median = prior if prior is not None else math.nan

    def add(self, value: float) -> None:
        if self._values and not self.median / OUTLIER <= value <= self.median * OUTLIER:
            self._dropped += 1
            if self._dropped < OUTLIERS_IN_ROW:
                return
            self._values.clear()
        self._dropped = 0
        self._values.append(value)
        ordered = sorted(self._values)
        self.median = ordered[len(ordered) // 2]


class CostModel:
    """
    The costs of one target session and of the strategies that draft for it.

    Belongs to the thread that steps. Given the same timings in the same order it yields the same
    curves, so that a decision can be computed again from what was recorded.

    Args:
        shape: The class that steps are computed in; its costs are the prior.
        draft_max: Longest proposal to tabulate.
    """

    def __init__(self, shape: WidthClass, draft_max: int = 16) -> None:
        self._shape = shape
        self._draft_max = draft_max
        self._widths = tuple(shape.widths)
        first = _prior(shape, self._widths[0])
        self._priors = {width: _prior(shape, width) / first for width in self._widths}
        self._measured: dict[int, _Window] = {}
        self._drafts: dict[str, dict[int, _Window]] = {}
        self._feeds: dict[str, tuple[_Window, _Window]] = {}  # of calls with few rows, and a row of those with many
        self._plain: deque[float] = deque(maxlen=WINDOW // 2)  # seconds of the last single-row steps
        self._implied: deque[float] = deque(maxlen=WINDOW // 2)  # what they would have taken, from wider steps since
        self._forwards = 0
        self._plain_steps = 0
        self._last_plain = 0
        self._stale = True
        self._curve = CostCurve(-1, (), 0.0, {})

    @property
    def widths(self) -> tuple[int, ...]:
        """Row counts that the target computes without padding."""
        return self._widths

    @property
    def single_row_s(self) -> float | None:
        """
        Seconds that a step of one row takes at present; None before the first timing.

        Requests that decode together take no such steps: then it is what their steps imply.
        """
        timings = self._implied or self._plain
        return sorted(timings)[len(timings) // 2] if timings else None

    @property
    def needs_plain_step(self) -> bool:
        """
        Whether a single-row step should be timed: where only wide ones are, their cost has nothing to be compared with.
        """
        return self._plain_steps < PLAIN_TIMINGS or self._is_plain_stale

    @property
    def _is_plain_stale(self) -> bool:
        return not self._plain or self._forwards - self._last_plain > PLAIN_STALE

    def observe_forward(self, width: int, seconds: float) -> None:
        """A decode forward that computed *width* rows (pad rows included) took *seconds*."""
        if width not in self._priors:
            return  # a mixed step wider than the decode class says nothing about it
        self._forwards += 1
        if width == self._widths[0]:
            self._plain.append(seconds)
            self._plain_steps += 1
            self._last_plain = self._forwards
            self._implied.clear()
        elif self._is_plain_stale:  # the cost of a width cannot be told from the machine's speed
            self._implied.append(seconds / self._cost(width))
        else:  # compared with single rows timed lately: the machine's speed drifts
            window = self._measured.setdefault(width, _Window(self._priors[width]))
            window.add(seconds / sorted(self._plain)[len(self._plain) // 2])
        if self._forwards % REFRESH == 0 or self._forwards == REFRESH // 4:
            self._stale = True

    def _cost(self, width: int) -> float:
        window = self._measured.get(width)
        return self._priors[width] if window is None else window.median

    def observe_draft(self, strategy: str, tokens: int, seconds: float) -> None:
        """Asking *strategy* for *tokens* tokens of one request took *seconds*."""
        speed = self.single_row_s
        if not speed or tokens < 1:
            return
        windows = self._drafts.setdefault(strategy, {})
        window = windows.get(tokens)
        if window is None:
            window = windows[tokens] = _Window()
            self._stale = True  # unknown until now: the next decision should know
        window.add(seconds / speed)

    def observe_feed(self, strategy: str, rows: int, seconds: float) -> None:
        """Telling *strategy* the states of *rows* rows of one request took *seconds*."""
        speed = self.single_row_s
        if not speed or rows < 1:
            return
        few, each = self._feeds.setdefault(strategy, (_Window(), _Window()))
        if rows <= FEW_ROWS:
            few.add(seconds / speed)
        else:
            each.add(seconds / rows / speed)

    @property
    def curve(self) -> CostCurve:
        """The costs to decide by; a new object only every few forwards."""
        if self._stale:
            self._stale = False
            self._curve = self._tabulate()
        return self._curve

    def _tabulate(self) -> CostCurve:
        steps = [0.0]
        for width, cost in zip(self._widths, self._corrected(), strict=True):
            steps += [cost] * (width + 1 - len(steps))
        last, before = steps[-1], steps[max(len(steps) // 2, 1)]
        row = (last - before) / max(len(steps) - 1 - len(steps) // 2, 1)
        drafts = {name: self._draft_table(windows) for name, windows in self._drafts.items()}
        feeds = {name: _feed_costs(*windows) for name, windows in self._feeds.items()}
        return CostCurve(self._curve.version + 1, tuple(steps), max(row, 0.0), drafts, feeds, self._shape.apart)

    def _corrected(self) -> list[float]:
        """Priors of all widths, each scaled by what the nearest measured widths turned out to cost."""
        points = sorted((math.log(w), window.median / self._priors[w]) for w, window in self._measured.items())
        if points:
            points.insert(0, (math.log(self._widths[0]), 1.0))
        return [self._priors[w] * interpolate(points, math.log(w), default=1.0) for w in self._widths]

    def _draft_table(self, windows: Mapping[int, _Window]) -> tuple[float, ...]:
        points = sorted((float(tokens), window.median) for tokens, window in windows.items())
        if len(points) == 1:  # half of a draft's cost is taken to be its fixed part until a second length is timed
            tokens, cost = points[0]
            points = [(0.0, cost / 2), (tokens, cost)]
        return (0.0, *(interpolate(points, float(k), default=0.0) for k in range(1, self._draft_max + 1)))


def _feed_costs(few: _Window, each: _Window) -> tuple[float, float]:
    """What is not known of two costs is taken from the other: a call is like a row of many, `FEW_ROWS` times."""
    if math.isnan(few.median):
        return each.median * FEW_ROWS, each.median
    return few.median, few.median / FEW_ROWS if math.isnan(each.median) else each.median


def _prior(shape: WidthClass, width: int) -> float:
    cost = shape.cost(width)
    return cost if cost is not None and cost > 0 else 1 + ROW_COST * (width - shape.widths[0])


def interpolate(points: Sequence[tuple[float, float]], x: float, *, default: float) -> float:
    """The line through *points*, ascending in x; flat beyond both ends."""
    if not points:
        return default
    right = bisect_right(points, (x, math.inf))
    if right == 0 or right == len(points):
        return points[min(right, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def fixed_curve(steps: Iterable[float], drafts: Mapping[str, Sequence[float]] | None = None) -> CostCurve:
    """
    A curve that was measured elsewhere.

    Args:
        steps: Costs of 1, 2, ... rows, in any unit.
        drafts: Strategy -> costs of asking for 1, 2, ... tokens, in the same unit.

    >>> fixed_curve([8.0, 16.0]).step(2)
    2.0
    """
    costs = list(steps)
    unit = costs[0]
    row = (costs[-1] - costs[0]) / (len(costs) - 1) / unit if len(costs) > 1 else 0.0
    tables = {name: (0.0, *(cost / unit for cost in table)) for name, table in (drafts or {}).items()}
    return CostCurve(0, (0.0, *(cost / unit for cost in costs)), row, tables)
