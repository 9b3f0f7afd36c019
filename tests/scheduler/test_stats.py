"""An engine's counters as one record."""

import json
import sys
import threading
from types import SimpleNamespace

from attrs import fields

from power_core.prefix import Snapshot
from power_core.scheduler.admission import AdmissionController, AdmissionCounters
from power_core.scheduler.policy import FixedPolicy
from power_core.scheduler.prompt_cache import CacheCounters, PromptCache
from power_core.scheduler.queue import RequestQueue, Totals
from power_core.scheduler.replica_loop import ReplicaLoop
from power_core.scheduler.replicas import ReplicaCounters
from power_core.scheduler.stats import CacheStats, QueueStats, ReplicaStats, collect


def numbered(kind):
    """Counters of *kind* in which no two are the same: the i-th is i + 1."""
    return kind(**{field.name: number for number, field in enumerate(fields(kind), 1)})


def make_loop(waiting=0, active=0):
    """A loop that has nothing but what is counted: its queue, and the name of its policy."""
    queue = RequestQueue(AdmissionController(max_active=4, max_waiting=7))
    queue.admission.counters = numbered(AdmissionCounters)
    for _ in range(4 if waiting else active):
        queue.admission.acquire()
    for _ in range(waiting):
        queue.admission.submit()
    return SimpleNamespace(queue=queue, policy=FixedPolicy(), costs=None, is_healthy=True)


def test_an_engine_with_one_session_and_no_cache():
    loop = make_loop(active=3)
    loop.queue.totals = Totals(steps=5, widths={1: 2, 4: 3}, finished={"length": 1}, accepted=8)
    stats = collect(loop, "suffix", None)
    assert (stats.strategy, stats.policy, stats.cache, stats.replicas) == ("suffix", "fixed", None, None)
    assert stats.totals == loop.queue.totals
    assert stats.queue == QueueStats(0, 3, 7, 4, loop.queue.admission.counters)


def test_the_queue_tells_what_waits_from_what_is_active():
    queue = collect(make_loop(waiting=2), "off", None).queue
    assert (queue.waiting, queue.active, queue.most_waiting, queue.most_active) == (2, 4, 7, 4)


def test_an_empty_cache_is_told_from_none():
    """What it holds, what it may hold, and what it did."""
    cache = PromptCache({}, max_bytes=64)
    assert collect(make_loop(), "off", cache).cache == CacheStats(0, 0, 64, CacheCounters())
    cache.store("key", (1, 2, 3), {"target": Snapshot(object(), 20, 3, can_cut=True)}, prefilled=3)
    cache.counters = numbered(CacheCounters)
    assert collect(make_loop(), "off", cache).cache == CacheStats(1, cache.nbytes, 64, numbered(CacheCounters))
    assert cache.nbytes >= 20


def test_replicas_are_counted_where_there_are_some():
    first = make_loop()
    loop = ReplicaLoop(first, lambda: first, size=3)
    loop.pool.build = lambda: SimpleNamespace(is_healthy=True)
    lease = loop.pool.lease_now()
    loop.pool.lease_now()
    lease.end()
    loop.pool.counters = numbered(ReplicaCounters)
    assert collect(loop, "off", None).replicas == ReplicaStats(2, 1, 3, numbered(ReplicaCounters))


def test_a_record_stays_as_it_is_while_the_engine_goes_on():
    """Neither counters nor the tables in them are the engine's own."""
    first, cache = make_loop(), PromptCache({}, max_bytes=64)
    loop = ReplicaLoop(first, lambda: first, size=1)
    loop.queue.totals.widths[2] = 1
    stats = collect(loop, "off", cache)
    document = stats.to_json()
    loop.queue.admission.acquire()
    loop.queue.totals.widths[2] += 1
    loop.queue.totals.finished["stop"] = 1
    loop.queue.totals.steps += 1
    cache.counters.hits += 1
    loop.pool.counters.built += 1
    assert stats.to_json() == document
    assert collect(loop, "off", cache).to_json() != document


def test_the_record_is_a_json_document():
    """Widths ascend, their names as numbers do: 8 before 16."""
    loop = make_loop()
    loop.queue.totals = Totals(steps=6, widths={16: 1, 1: 3, 8: 2}, finished={"stop": 1})
    document = collect(loop, "off", PromptCache({}, max_bytes=64)).to_json()
    assert json.loads(json.dumps(document)) == document
    assert list(document["totals"]["widths"].items()) == [("1", 3), ("8", 2), ("16", 1)]
    assert document["totals"]["finished"] == {"stop": 1}
    assert document["queue"]["counters"]["granted"] == 2
    assert (document["cache"]["most_bytes"], document["replicas"]) == (64, None)


def test_a_record_may_be_taken_while_another_thread_steps():
    """Its tables grow at any moment; that is no failure of the thread that only looks."""
    loop, is_over, interval = make_loop(), threading.Event(), sys.getswitchinterval()
    totals = loop.queue.totals

    def step():
        while not is_over.is_set():
            totals.widths.clear()
            totals.finished.clear()
            for number in range(100):
                totals.widths[number] = totals.finished[str(number)] = 1

    thread = threading.Thread(target=step)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(3000):
            collect(loop, "off", None)
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
