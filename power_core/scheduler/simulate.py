"""
What a width policy would have done: recorded acceptance replayed against a cost curve.

Speeds are relative to plain decoding (`off`), whose every token costs one plain step. The limit is the
oracle: the lengths that cost least in all, chosen with the whole text known.

A cost curve is a JSON file, costs in any one unit; what lies between two row counts is interpolated:

    {"rows": {"1": 8.3, "2": 15.8, "8": 30.7, "16": 44.8}, "drafts": {"suffix": 0.03, "dspark": [2.1, 2.3, 2.4]}}

A draft's cost is one number, or a list for 1, 2, ... tokens. `CostCurve.to_json` has this form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from power_core.drafter import stop_length
from power_core.errors import ConfigError
from power_core.scheduler.cost_aware import CostAwarePolicy
from power_core.scheduler.costs import CostCurve, fixed_curve, interpolate
from power_core.scheduler.policy import AdaptivePolicy, DraftShape, FixedPolicy, Round, WidthPolicy
from power_core.scheduler.traces import MAX_ROWS, Trace

__all__ = ["FIXED_WIDTHS", "Comparison", "Replay", "compare", "oracle_cost", "read_curve", "replay"]

FIXED_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 15)
MAX_COST = 1e12  # in a file's unit; as 1 / MAX_COST is the least, no quotient and no sum of costs leaves the numbers
_WRONG = -1  # stands for every token that the target did not choose


@define
class Replay:
    """
    One policy on one trace.

    Attributes:
        cost: Time taken, in plain steps.
        tokens: Tokens emitted: what plain decoding would have cost.
        lengths: Checked proposal length -> rounds.
    """

    cost: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    asked: int = 0
    lengths: dict[int, int] = field(factory=dict)
    milestones: list[tuple[int, float]] = field(factory=list, repr=False)

    @property
    def speed(self) -> float:
        """Speed over plain decoding's."""
        return self.tokens / self.cost if self.cost else 1.0

    def cost_until(self, token: int) -> float:
        """Time taken until *token* tokens were out."""
        return next((cost for tokens, cost in self.milestones if tokens >= token), self.cost)


def replay(policy: WidthPolicy, trace: Trace, curve: CostCurve, *, rollback: int | None = None) -> Replay:
    """Run *policy* over *trace* on a machine whose costs are *curve*."""
    width = policy.begin(DraftShape(trace.draft_max, rollback, trace.strategy, sequential=trace.sequential))
    end, position, result = len(trace.points), 0, Replay()
    while position < end:
        point = trace.points[position]
        asked = width.limit(min(trace.draft_max, end - position - 1))
        count = min(asked, point.proposed)
        if trace.sequential:
            known = point.confidences[:count] if point.confidences else None
            asked = count = count if known is None else stop_length(known, width.stop_below)
        # Output token q is called q, so proposals can be compared as they are in the engine.
        right = min(point.accepted, count)
        ids = [*range(position, position + right), *[_WRONG] * (count - right)]
        checked = width.trim(ids, point.confidences[:count] if point.confidences else None)
        accepted = min(checked, right)
        width.feedback(Round(checked, accepted, range(position, position + accepted + 1)))
        position += accepted + 1
        result.cost += curve.step(1 + checked) + curve.draft(trace.strategy, asked)
        result.rounds += 1
        result.asked += bool(asked)
        result.drafted += checked
        result.accepted += accepted
        result.lengths[checked] = result.lengths.get(checked, 0) + 1
        result.milestones.append((position, result.cost))
    result.tokens = position
    return result


def oracle_cost(trace: Trace, curve: CostCurve) -> float:
    """The least time *trace* can take: each round's length chosen with the text known."""
    end = len(trace.points)
    best = [0.0] * (end + 1)  # best[p]: from position p to the end
    for position in range(end - 1, -1, -1):
        most = min(trace.points[position].accepted, end - position - 1)
        best[position] = min(
            curve.step(1 + k) + curve.draft(trace.strategy, k) + best[position + k + 1] for k in range(most + 1)
        )
    return best[0]


@frozen
class Comparison:
    """
    Speeds over plain decoding on one set of traces.

    Args:
        workload: What the traces are of.
        tokens: Tokens in all.
        speeds: Policy -> speed.
        best_fixed: The fixed length that was fastest in hindsight, and its speed.
        oracle: The limit.
    """

    workload: str
    tokens: int
    speeds: Mapping[str, float]
    best_fixed: tuple[int, float]
    oracle: float


def compare(
    workload: str,
    traces: Iterable[Trace],
    curve: CostCurve,
    *,
    rollback: int | None = None,
    rows: tuple[int, ...] = (),
) -> Comparison:
    """
    Run every policy over *traces*, which count as one workload.

    Args:
        workload: What the traces are of.
        traces: At least one.
        curve: The machine's costs.
        rollback: Resident rollback rows of the target, or None where they are unlimited.
        rows: Row counts that the target computes without padding; none where that is not known.
    """
    traces = list(traces)
    tokens = sum(len(trace.points) for trace in traces)
    longest = max((trace.draft_max for trace in traces), default=0)

    def speed(make: Callable[[], WidthPolicy]) -> float:
        cost = sum(replay(make(), trace, curve, rollback=rollback).cost for trace in traces)
        return tokens / cost if cost else 1.0

    fixed = {k: speed(lambda k=k: FixedPolicy(k)) for k in (*FIXED_WIDTHS, longest) if k <= longest}  # type: ignore[misc]  # the default binds k
    best = max(fixed, key=lambda k: fixed[k])
    speeds = {f"fixed {k}": value for k, value in sorted(fixed.items())}
    speeds["adaptive"] = speed(AdaptivePolicy)
    speeds["cost-aware"] = speed(lambda: CostAwarePolicy(lambda: curve, rows))
    oracle = tokens / sum(oracle_cost(trace, curve) for trace in traces) if tokens else 1.0
    return Comparison(workload, tokens, speeds, (best, fixed[best]), oracle)


def read_curve(file: Path) -> CostCurve:
    """
    The cost curve in *file*.

    Raises:
        ConfigError: It is none.
    """
    try:
        return _curve(json.loads(file.read_text(encoding="utf-8")))
    except OSError as exc:
        raise ConfigError(f"cannot be read: {exc.strerror}", who="cost curve", where=str(file)) from exc
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise ConfigError(
            f"no cost curve: {exc}", who="cost curve", where=str(file),
            expected='{"rows": {"1": COST, ...}, "drafts": {STRATEGY: COST or [COST, ...]}}, costs above 0',
        ) from exc  # fmt: skip


def _curve(table: Any) -> CostCurve:
    if not isinstance(table, dict) or not isinstance(table.get("rows"), dict):
        raise TypeError("it has no table of rows")
    if not isinstance(table.get("drafts", {}), dict):
        raise TypeError("its drafts are no table")
    points = sorted((float(rows), float(cost)) for rows, cost in table["rows"].items())
    if 1 not in dict(points) or not all(1 <= rows <= MAX_ROWS for rows, _ in points):  # false for NaN too
        raise ValueError(f"rows must begin with 1 and end at {MAX_ROWS} or before")
    if not all(1 / MAX_COST <= cost <= MAX_COST for _, cost in points):
        raise ValueError(f"rows must cost more than 0, and at most {MAX_COST:g}")
    steps = [interpolate(points, float(n), default=0.0) for n in range(1, int(points[-1][0]) + 1)]
    drafts = {
        str(name): [float(cost) for cost in (costs if isinstance(costs, list) else [costs])]
        for name, costs in table.get("drafts", {}).items()
    }
    if any(not costs or not all(0 <= cost <= MAX_COST for cost in costs) for costs in drafts.values()):
        raise ValueError(f"a draft costs 0 or more, and at most {MAX_COST:g}")
    return fixed_curve(steps, drafts)
