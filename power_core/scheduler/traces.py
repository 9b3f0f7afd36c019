"""
Acceptance traces: what a drafter would have proposed at every position of a text, and how much of it was right.

A trace says nothing about a machine, so one recorded on a laptop tells what a policy would do on a
GPU. The file is JSON lines: a header, then one line for each output position, in order.

    {"format": "power-trace/1", "strategy": "suffix", "draft_max": 8, "sequential": false, "workload": "copy"}
    {"position": 0, "proposed": 8, "accepted": 3, "confidences": [0.9, ...]}

Position p is the round that chooses the p-th output token: `accepted` counts how many of the
`proposed` tokens agree with the output from position p on. `confidences` is absent where the
drafter has none. Several traces may follow each other in one file, each with its header.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from power_core.errors import ConfigError
from power_core.scheduler.policy import DraftShape, RequestWidth, Round
from power_core.types import JSON, TokenId

__all__ = ["FORMAT", "MAX_ROWS", "RecordingPolicy", "Trace", "TracePoint", "read_traces", "write_traces"]

FORMAT = "power-trace/1"
MAX_ROWS = 4096  # of a step: every row count up to the last gets a cost


@frozen
class TracePoint:
    """A round that starts at one position of the output."""

    proposed: int
    accepted: int
    confidences: tuple[float, ...] | None = None


@define
class Trace:
    """
    The rounds of one request.

    Args:
        strategy: Who proposed.
        draft_max: K that was asked for.
        points: One a position.
        workload: Free text.
        sequential: See `DrafterRequirements`.
    """

    strategy: str
    draft_max: int
    points: list[TracePoint] = field(factory=list)
    workload: str = ""
    sequential: bool = False


def write_traces(file: Path, traces: Iterable[Trace]) -> None:
    """Write *traces* to *file*."""
    with file.open("w", encoding="utf-8") as out:
        for trace in traces:
            header = {"format": FORMAT, "strategy": trace.strategy, "draft_max": trace.draft_max}
            out.write(json.dumps({**header, "sequential": trace.sequential, "workload": trace.workload}) + "\n")
            for position, point in enumerate(trace.points):
                line: JSON = {"position": position, "proposed": point.proposed, "accepted": point.accepted}
                if point.confidences is not None:
                    line["confidences"] = [round(value, 4) for value in point.confidences]
                out.write(json.dumps(line) + "\n")


def read_traces(file: Path) -> list[Trace]:
    """
    The traces in *file*.

    Raises:
        ConfigError: A line is no trace; names its number.
    """
    traces: list[Trace] = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # a text may hold what `splitlines` takes for line ends
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot be read: {exc}", who="trace", where=str(file)) from exc
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            _take(json.loads(line), traces)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as exc:
            raise ConfigError(
                f"not a trace: {type(exc).__name__}: {exc}", who="trace", where=f"{file}:{number}",
                expected=f"JSON lines of format {FORMAT}",
            ) from exc  # fmt: skip
    if not traces:
        raise ConfigError("holds no trace", who="trace", where=str(file), expected=f"JSON lines of format {FORMAT}")
    return traces


def _take(line: dict[str, Any], traces: list[Trace]) -> None:
    """Take up one line of a file."""
    if "format" in line:
        if line["format"] != FORMAT:
            raise ValueError(f"format {line['format']!r}")
        draft_max = int(line["draft_max"])
        if not 0 <= draft_max < MAX_ROWS:
            raise ValueError(f"draft_max {draft_max} where 0 to {MAX_ROWS - 1} are possible")
        is_sequential = bool(line.get("sequential", False))
        traces.append(Trace(str(line["strategy"]), draft_max, [], str(line.get("workload", "")), is_sequential))
        return
    if not traces:
        raise ValueError("a round before the header")
    trace = traces[-1]
    if line["position"] != len(trace.points):
        raise ValueError(f"position {line['position']} where {len(trace.points)} is due")
    given = line.get("confidences")
    point = TracePoint(int(line["proposed"]), int(line["accepted"]), tuple(map(float, given)) if given else None)
    if not 0 <= point.accepted <= point.proposed <= trace.draft_max or (given and len(given) < point.proposed):
        raise ValueError(f"accepted {point.accepted} of {point.proposed} proposed, draft_max {trace.draft_max}")
    if not all(0 <= confidence <= 1 for confidence in point.confidences or ()):  # false for NaN too
        raise ValueError("a confidence outside 0 to 1")
    trace.points.append(point)


class RecordingPolicy:
    """
    Records traces: asks for K tokens every round and lets the target check none of them.

    So the output is plain decoding's, every position is a round, and what would have been accepted is
    known once the text has been written.
    """

    name = "recording"

    def __init__(self) -> None:
        self._requests: list[tuple[DraftShape, _RecordingWidth]] = []

    def begin(self, shape: DraftShape) -> RequestWidth:
        width = _RecordingWidth(shape.draft_max)
        self._requests.append((shape, width))
        return width

    def traces(self) -> list[Trace]:
        """A trace of each request so far, in the order they began."""
        return [
            Trace(shape.strategy, shape.draft_max, width.points(), sequential=shape.sequential)
            for shape, width in self._requests
        ]


class _RecordingWidth:
    chances: Sequence[float] = ()
    stop_below = 0.0
    mode = "recording"

    def __init__(self, draft_max: int) -> None:
        self._draft_max = draft_max
        self._pending: tuple[Sequence[TokenId], Sequence[float] | None] = ((), None)
        self._rounds: list[tuple[int, Sequence[TokenId], Sequence[float] | None]] = []
        self._output: list[TokenId] = []

    def limit(self, room: int, beside: int = 0, backlog: int = 0) -> int:  # noqa: ARG002 - the protocol's
        self._pending = ((), None)
        return min(room, self._draft_max)

    def trim(self, token_ids: Sequence[TokenId], confidences: Sequence[float] | None, beside: int = 0) -> int:  # noqa: ARG002 - the protocol's
        self._pending = (tuple(token_ids), None if confidences is None else tuple(confidences))
        return 0

    def feedback(self, outcome: Round) -> None:
        self._rounds.append((len(self._output), *self._pending))
        self._output += outcome.chosen
        self._pending = ((), None)

    def summary(self) -> JSON:
        return {"rounds": len(self._rounds)}

    def points(self) -> list[TracePoint]:
        return [self._point(*round_) for round_ in self._rounds]

    def _point(self, start: int, ids: Sequence[TokenId], confidences: Sequence[float] | None) -> TracePoint:
        actual = self._output[start : start + len(ids)]
        ids = ids[: len(actual)]  # nothing is known beyond the end of the text
        agree = (i for i, (a, b) in enumerate(zip(ids, actual, strict=True)) if a != b)
        accepted = next(agree, len(ids))
        return TracePoint(len(ids), accepted, None if confidences is None else tuple(confidences[: len(ids)]))
