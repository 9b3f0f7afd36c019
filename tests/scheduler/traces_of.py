"""Acceptance traces of known shape, for the policy tests."""

from __future__ import annotations

import random

from power_core.scheduler.costs import CostCurve, fixed_curve
from power_core.scheduler.traces import Trace, TracePoint

K = 8
CPU = (1.0, 1.9, 2.15, 2.4, 2.72, 3.05, 3.37, 3.7, 3.9, 4.1, 4.35, 4.55, 4.75, 5.0, 5.2, 5.4)
GPU = tuple(1 + 0.003 * n for n in range(16))


def curve(steps=CPU, draft: float = 0.003) -> CostCurve:
    return fixed_curve(steps, {"s": [draft] * 16})


def trace(*phases: tuple[int, int], k: int = K) -> Trace:
    """
    Phases of (tokens, right): every proposal is k long, and its first *right* tokens are.

    A proposal of the last phase ends where the text does; one that is right reaches into the next phase
    only as far as that one is right from its start.
    """
    rights = [right for tokens, right in phases for _ in range(tokens)]
    ends = [0]
    for tokens, _right in phases:
        ends.append(ends[-1] + tokens)
    points = []
    for position, right in enumerate(rights):
        end = next(end for end in ends if end > position)
        most = min(k, len(rights) - position)
        points.append(TracePoint(most, min(right, most, end - position)))
    return Trace("s", k, points)


def chance_trace(tokens: int, chance: float, seed: int, k: int = K) -> Trace:
    """Every token of every proposal is right with *chance*."""
    rng = random.Random(seed)
    points = []
    for position in range(tokens):
        most, right = min(k, tokens - position), 0
        while right < most and rng.random() < chance:
            right += 1
        points.append(TracePoint(most, right))
    return Trace("s", k, points)


def confident_trace(tokens: int, seed: int, k: int = K, sure: float = 0.95) -> Trace:
    """Half of the positions are *sure*, the others unsure and right one time in four."""
    rng = random.Random(seed)
    points = []
    for position in range(tokens):
        most = min(k, tokens - position)
        confidences = tuple(rng.choice((sure, 0.25)) for _ in range(most))
        right = 0
        while right < most and rng.random() < confidences[right]:
            right += 1
        points.append(TracePoint(most, right, confidences))
    return Trace("s", k, points)
