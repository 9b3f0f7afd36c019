"""What an engine did, as one record for programs, ``power generate --stats`` and ``power doctor``."""

from __future__ import annotations

from copy import copy
from typing import Any

from attrs import asdict, frozen

from power_core.scheduler.admission import AdmissionCounters
from power_core.scheduler.loop import StepLoop
from power_core.scheduler.prompt_cache import CacheCounters, PromptCache
from power_core.scheduler.queue import Totals
from power_core.scheduler.replica_loop import ReplicaLoop
from power_core.scheduler.replicas import ReplicaCounters

__all__ = ["CacheStats", "EngineStats", "QueueStats", "ReplicaStats", "collect"]


@frozen
class QueueStats:
    """Requests that wait, those that are active, the bounds of both, and what became of all others."""

    waiting: int
    active: int
    most_waiting: int
    most_active: int
    counters: AdmissionCounters


@frozen
class CacheStats:
    """Prompts that are kept, their bytes, the bound, and what the cache did."""

    entries: int
    nbytes: int
    most_bytes: int
    counters: CacheCounters


@frozen
class ReplicaStats:
    """Replicas that exist and that are lent, how many there may be, and what became of all others."""

    built: int
    leased: int
    size: int
    counters: ReplicaCounters


@frozen
class EngineStats:
    """
    A snapshot of an engine's counters.

    Args:
        strategy: Default strategy of requests.
        policy: The width policy.
        queue: Admission.
        totals: Sums over steps and requests.
        cache: The prompt cache; None where there is none.
        replicas: Session replicas; None where one session decodes all requests.
    """

    strategy: str
    policy: str
    queue: QueueStats
    totals: Totals
    cache: CacheStats | None
    replicas: ReplicaStats | None

    def to_json(self) -> dict[str, Any]:
        """As a JSON document."""
        document = asdict(self)
        document["totals"]["widths"] = {str(rows): times for rows, times in sorted(self.totals.widths.items())}
        return document


def collect(loop: StepLoop | ReplicaLoop, strategy: str, cache: PromptCache | None) -> EngineStats:
    """The counters of what *loop* and *cache* did; copies, so that they stay as they are."""
    admission = loop.queue.admission
    queue = QueueStats(
        admission.waiting, admission.active, admission.max_waiting, admission.max_active, _copy(admission.counters)
    )
    kept = None
    if cache is not None:
        kept = CacheStats(cache.entries, cache.nbytes, cache.max_bytes, _copy(cache.counters))
    replicas = None
    if isinstance(loop, ReplicaLoop):
        pool = loop.pool
        replicas = ReplicaStats(pool.built, pool.leased, pool.size, _copy(pool.counters))
    return EngineStats(strategy, loop.policy.name, queue, _copy(loop.queue.totals), kept, replicas)


def _copy(counters: Any) -> Any:
    """*counters* as they are; tables in one go, because the thread that steps may add to them meanwhile."""
    values = asdict(counters, recurse=False)
    return type(counters)(**{name: copy(value) for name, value in values.items()})
