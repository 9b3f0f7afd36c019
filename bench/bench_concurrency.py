"""
Tokens a second of 1, 2, 4 and 8 requests together against the same requests one at a time, in one run.

``python bench/bench_concurrency.py [MODEL]`` mixes greedy and seeded requests with different strategies, limits and
stops, and exits 1 where an output differs from the request's own solo run.
"""

from __future__ import annotations

import os
import sys
import time

from power_core.engine import Engine
from power_core.request import GenerationRequest, Result, SamplingSpec
from power_core.runtime import Runtime

COUNTS = (1, 2, 4, 8)
MAX_TOKENS = int(os.environ.get("BENCH_TOKENS", "48"))
SPECS = ("suffix", "off", "prompt-lookup", "ngram-mod")
TEXTS = (
    "Once upon a time there was", "alpha beta gamma\n" * 12, "The capital of France is", "1, 2, 3, 4, 5,",
    "def add(a, b):\n    return", "Dear Sir or Madam,", '{"id": 1}, {"id": 2}, {"id":', "Roses are red,",
)  # fmt: skip


def requests(engine: Engine) -> list[GenerationRequest]:
    return [
        engine.request(
            text,
            spec=SPECS[n % len(SPECS)],
            max_tokens=MAX_TOKENS - 3 * (n % 4),
            stop=("\n\n",) if n % 3 == 0 else (),
            sampling=SamplingSpec(temperature=0.8, seed=n) if n % 2 else SamplingSpec(repeat_penalty=1.1),
        )
        for n, text in enumerate(TEXTS)
    ]


def timed(engine: Engine, asked: list[GenerationRequest]) -> tuple[list[Result], float]:
    started = time.perf_counter()
    results = engine.generate_many(asked)
    return results, time.perf_counter() - started


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    differ = 0
    with Runtime() as runtime, runtime.open(model, context_size=1_024, parallel=max(COUNTS)) as engine:
        asked = requests(engine)
        timed(engine, asked[:1])  # warm up
        alone = [timed(engine, [request]) for request in asked]
        for count in COUNTS:
            together, seconds = timed(engine, asked[:count])
            solo = sum(elapsed for _, elapsed in alone[:count])
            pairs = zip(together, alone, strict=False)
            wrong = sum((got.token_ids, got.text) != (own.token_ids, own.text) for got, ([own], _) in pairs)
            differ += wrong
            tokens = sum(len(result.token_ids) for result in together)
            print(
                f"{count} together: {tokens / seconds:6.1f} tokens/s, one at a time {tokens / solo:6.1f}, "
                f"ratio {solo / seconds:4.2f}; {wrong} of {count} outputs differ"
            )
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
