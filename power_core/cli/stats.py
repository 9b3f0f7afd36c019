"""``--stats``: how a request was decoded and what it waited for, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict

if TYPE_CHECKING:
    from power_core.request import Result
    from power_core.scheduler.stats import EngineStats

__all__ = ["engine_lines", "lines"]

_APART = frozenset({"guard", "widths"})  # counters with a line of their own


def lines(result: Result, stats: EngineStats) -> Iterator[str]:
    """Strategy and policy, widths, guard, counters, and the costs that decisions were made by."""
    body, counts = result.receipt["body"], result.counts
    yield f"strategy: {body['strategy']}" + (f" ({body['drafter']})" if body["drafter"] else "")
    policy = body["policy"]
    yield "width policy: " + (f"{policy['name']} ({_pairs(policy['summary'])})" if policy else "none, plain decoding")
    widths = (f"{rows} x {times}" for rows, times in sorted(counts.widths.items()))
    yield "widths (rows x passes): " + (", ".join(widths) or "none")
    yield "guard: " + ("none" if counts.guard is None else f"at most {counts.guard} tokens a proposal, after a replay")
    yield "counters: " + _pairs({name: n for name, n in asdict(counts).items() if name not in _APART})
    if policy:
        yield "costs of rows, in plain steps: " + _pairs(policy["costs"]["rows"])
        for strategy, costs in policy["costs"]["drafts"].items():
            asked = {str(k): costs[k - 1] for k in (1, len(costs))}
            yield f"cost of asking {strategy} for tokens, in plain steps: {_pairs(asked)}"
    yield f"prompt tokens reused: {counts.reused} of {result.usage.prompt_tokens}"
    yield from engine_lines(stats)


def engine_lines(stats: EngineStats) -> Iterator[str]:
    """The queue, the prompt cache and the replicas of an engine, with what became of everything."""
    queue, cache, replicas = stats.queue, stats.cache, stats.replicas
    yield (
        f"queue: {queue.waiting} of {queue.most_waiting} waiting, {queue.active} of {queue.most_active} active; "
        + _pairs(asdict(queue.counters))
    )
    if cache is None:
        yield "prompt cache: none"
    else:
        held = f"{cache.entries} entries, {cache.nbytes} of {cache.most_bytes} bytes"
        yield f"prompt cache: {held}; {_pairs(asdict(cache.counters))}"
    if replicas is not None:
        yield f"replicas: {replicas.built} of {replicas.size} built; {_pairs(asdict(replicas.counters))}"


def _pairs(table: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in table.items())
