"""Eight clients at once on one engine, each as if it were alone (case 23)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from cases.lab import COPY, GREETING, fields_of
from parity.setups import Setup, opened
from power_core.engine import Engine
from power_core.errors import PowerError
from power_core.request import GenerationRequest, Result, SamplingSpec
from power_core.types import FinishReason

pytestmark = pytest.mark.model
ROUNDS = 3
TEXTS = (
    GREETING, COPY, "def f(x):\n    return x\n\ndef f(x):\n    return", "1, 2, 3, 1, 2, 3, 1, 2,",
    "The sea was", "ha ha ha ha ha ha", "A B C D E F", '{"id": 1}, {"id": 2}, {"id":',
)  # fmt: skip
TRAINED = (
    Setup("llamacpp", "dspark", "native"), Setup("llamacpp", "dflash2", "native"), Setup("llamacpp", "mtp", "torch"),
    Setup("torch", "dspark", "torch"), Setup("torch", "dflash", "torch"),
)  # fmt: skip


@pytest.fixture(
    scope="module", ids=str, params=["weightless", *(pytest.param(each, marks=pytest.mark.slow) for each in TRAINED)]
)
def busy(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine that all clients use; some have a trained drafter on board."""
    if request.param == "weightless":
        yield request.getfixturevalue("engine")
        return
    with opened(request.param, "smollm2", draft_max=7, context_size=512, parallel=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def requests(busy: Engine) -> list[GenerationRequest]:
    """Four greedy ones with different penalties, four at temperature 0.9 with seeds 1 to 4; K from 1 to 8."""
    own = busy.strategy
    specs = ("suffix", "prompt-lookup", "ngram-mod", "off") if own == "off" else (own, "suffix", own, "off")

    def sampling(n: int) -> SamplingSpec:
        if n < 4:
            return SamplingSpec(repeat_penalty=1 + n / 10, logprobs=1)
        return SamplingSpec(temperature=0.9, seed=n - 3, frequency_penalty=n / 20)

    return [
        busy.request(
            text, sampling=sampling(n), max_tokens=8 + n, spec=specs[n % 4], draft_max=min(n + 1, busy.draft_max)
        )
        for n, text in enumerate(TEXTS)
    ]


@pytest.fixture(scope="module")
def alone(busy: Engine, requests: list[GenerationRequest]) -> list[Result]:
    return [busy.complete(request) for request in requests]


def check_same(result: Result, expected: Result) -> None:
    assert fields_of(result) == fields_of(expected)
    share, solo = (r.counts.accepted / max(r.counts.drafted, 1) for r in (result, expected))
    assert abs(share - solo) <= 0.02


def test_each_thread_gets_its_solo_answer(busy: Engine, requests: list[GenerationRequest], alone: list[Result]) -> None:
    """Three rounds, half of them streamed; twice as many clients as sequences, so that some queue."""
    barrier = Barrier(len(requests))

    def client(number: int) -> list[Result]:
        results = []
        for turn in range(ROUNDS):
            barrier.wait(timeout=120)
            generation = busy.generate(requests[number])
            if (number + turn) % 2:
                shown = "".join(event.text for event in generation)
                assert shown == generation.result.text
            results.append(generation.finish())
        return results

    with ThreadPoolExecutor(len(requests)) as pool:
        for expected, results in zip(alone, pool.map(client, range(len(requests))), strict=True):
            for result in results:
                check_same(result, expected)


def test_cancels_and_failures_beside_it_change_nothing(
    busy: Engine, requests: list[GenerationRequest], alone: list[Result]
) -> None:
    """A stream that is dropped, one that is cancelled and one that fails leave the others what they were."""

    def failing(tokens: Any, logits: Any) -> None:
        if len(tokens) % 5 == 0:
            raise RuntimeError("mine")

    broken = busy.generate("Once upon a time there", max_tokens=30, processors=[failing])
    dropped = busy.generate(COPY, max_tokens=30, spec="suffix")
    kept = [busy.generate(request) for request in requests[:3]]
    cancelled = busy.generate(GREETING, max_tokens=30)
    next(dropped)
    del dropped
    gc.collect()
    next(cancelled)
    cancelled.cancel()
    for generation, expected in zip(kept, alone, strict=False):
        check_same(generation.finish(), expected)
    assert cancelled.drain().finish_reason is FinishReason.CANCELLED
    with pytest.raises(PowerError, match="mine"):
        broken.finish()
    assert busy.loop.active == 0
