"""Many requests leave no memory, files or threads behind, and long histories cost no time (case 26)."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from power_ngram.config import NgramContextConfig, PromptLookupConfig, SuffixConfig
from power_ngram.drafter import Config, open_history

from cases.conftest import OPTIONS, SECTIONS
from cases.lab import fields_of
from parity.conftest import open_engine
from power_core.config import PowerConfig
from power_core.drafter import DraftRequest
from power_core.engine import Engine
from power_core.errors import DeadlineError
from power_core.generation import Generation
from power_core.runtime import Runtime
from power_core.testing.gguf import tiny_llama

needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, which Linux has")


def resident_mb() -> float:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def serve(engine: Engine, first: int, count: int, max_tokens: int) -> None:
    """*count* distinct requests, four at a time, every fifth cancelled after its first token."""
    for start in range(first, first + count, 4):
        running = []
        for number in range(start, min(start + 4, first + count)):
            prompt = f"{number} pears, {number}"
            running.append((number, engine.generate(prompt, max_tokens=max_tokens, spec="suffix", draft_max=4)))
        for number, generation in running:
            if number % 5 == 0:
                next(generation)
                generation.cancel()
            generation.finish()


@needs_proc
@pytest.mark.model
@pytest.mark.parametrize("max_tokens", [3, pytest.param(48, marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_requests(runtime: Runtime, engine: Engine, max_tokens: int) -> None:
    """From the 50th to the 250th request the process grows by less than 20 MB; files and threads not at all."""
    with open_engine(runtime, "smollm2", context_size=2048, **{**OPTIONS, "width_policy": "adaptive"}) as adaptive:
        serve(adaptive, 0, 50, max_tokens)
        before = resident_mb(), len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208 - a count
        serve(adaptive, 50, 200, max_tokens)
        after = resident_mb(), len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208 - a count
        assert after[0] - before[0] < 20
        assert after[1:] == before[1:]
        assert adaptive.loop.active == 0


def soak_request(engine: Engine, draw: random.Random, number: int) -> Generation | None:
    """
    A request of its own strategy, client, key and deadline.

    Every fifth is cancelled, half of these after their first token. None where its deadline passed on the way in.
    """
    try:
        generation = engine.generate(
            [*range(3, 60), *(draw.randrange(3, 320) for _ in range(number % 9 + 1))],
            max_tokens=6, spec=("off", "suffix")[number % 2], client=str(number % 3),
            prompt_cache_key=(None, "a", "b")[number % 3], deadline_s=None if number % 7 else 0.001,
        )  # fmt: skip
        if number % 10 == 0:
            next(generation)
    except DeadlineError:
        return None
    if number % 5 == 0:
        generation.cancel()
    return generation


@needs_proc
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_soak(tmp_path: Path, record_property: Callable[[str, object], None], count: int) -> None:
    """Kept prompts, deadlines, clients and every fifth request cancelled: memory flat, every place back."""
    pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")
    config = PowerConfig(sections=SECTIONS, prompt_cache_bytes=1 << 20, queue_max=16)
    draw = random.Random(1)
    with Runtime(config) as runtime:
        engine = runtime.open(tiny_llama(tmp_path / "tiny.gguf"), context_size=256, parallel=4, threads=1, draft_max=3)

        def serve_all(first: int, last: int) -> None:
            for start in range(first, last, 8):
                running = [soak_request(engine, draw, number) for number in range(start, start + 8)]
                for generation in running:
                    if generation is not None:
                        generation.drain()

        def four() -> tuple[list[tuple[Any, ...]], int]:
            """Fields of four requests at once, and the steps they took: more where a sequence is missing."""
            steps = engine.stats().totals.steps
            results = engine.generate_many([engine.request("One", max_tokens=4)] * 4)
            return [fields_of(result) for result in results], engine.stats().totals.steps - steps

        expected = four()
        serve_all(0, count // 5)
        before = resident_mb()
        serve_all(count // 5, count)
        growth = resident_mb() - before
        record_property("growth_mb", growth)
        assert growth < 20
        stats, counters = engine.stats(), engine.stats().queue.counters
        assert (engine.loop.active, stats.queue.active, stats.queue.waiting) == (0, 0, 0)
        assert counters.submitted == count + 4 == counters.released + counters.expired + counters.cancelled
        assert stats.totals.finished["cancelled"] >= count // 5 - count // 35 - 1  # less those that came too late
        assert stats.cache is not None
        assert stats.cache.nbytes <= 1 << 20
        assert stats.cache.counters.hits > count // 10
        assert four() == expected


CONFIGS = [
    PromptLookupConfig(n_min=2, n_max=4), PromptLookupConfig(n_min=10, n_max=500), NgramContextConfig(n_min=2, n_max=4),
    NgramContextConfig(n_min=10, n_max=500), SuffixConfig(),
]  # fmt: skip


def words(length: int) -> tuple[list[int], list[int]]:
    """*length* random tokens with a passage of 40 in their middle, and that passage."""
    draw = random.Random(length)
    text = [draw.randrange(1000, 49_000) for _ in range(length)]
    return text, text[length // 2 : length // 2 + 40]


def propose_seconds(config: Config, length: int) -> float:
    """Median CPU time of one `propose` while the passage comes again, each of which must hit."""
    text, passage = words(length)
    session = open_history(config)
    session.begin(0, [*text, *passage[:12]])
    seconds = []
    for n in range(12, 38):
        session.checkpoint(0)
        started = time.thread_time()
        [proposal] = session.propose([DraftRequest(0, passage[n - 1], 2)])
        seconds.append(time.thread_time() - started)
        assert list(proposal.token_ids) == passage[n : n + 2]
        session.observe(0, [passage[n]], None)
    return sorted(seconds)[len(seconds) // 2]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_propose_on_long_histories(config: Config) -> None:
    """Under 5 ms of processor time at 6,000 tokens, the repeat is found, and 6,000 cost no more than 8 times 1,000."""
    short, long = propose_seconds(config, 1_000), propose_seconds(config, 6_000)
    assert long < 0.005
    assert long < 8 * max(short, 20e-6)  # below that a clock measures itself


@pytest.mark.slow
@pytest.mark.model
def test_a_prompt_of_3000_tokens(runtime: Runtime) -> None:
    """End to end: random words, then the beginning of a passage out of their middle; ids == off."""
    text, passage = words(3_000)
    with open_engine(runtime, "smollm2", context_size=8192, **{**OPTIONS, "parallel": 1}) as engine:
        request = engine.request([*text, *passage[:20]], max_tokens=16)
        off = engine.complete(request)
        for spec in ("suffix", "prompt-lookup"):
            result = engine.complete(request.with_(spec=spec, draft_max=8))
            assert fields_of(result) == fields_of(off)
            assert result.counts.drafted
