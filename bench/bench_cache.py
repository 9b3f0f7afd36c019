"""
Time to the first token of a 2,000-token prompt: kept before against evaluated, in one run.

``python bench/bench_cache.py [MODEL]`` prints each pair, the median ratio and whether every field agrees, and exits 1
where the ratio is below 13 or anything differs.
"""

from __future__ import annotations

import os
import statistics
import sys

from power_core.engine import Engine
from power_core.request import GenerationRequest, Result
from power_core.runtime import Runtime

PREFIX, QUESTION = 2_000, 8
MAX_TOKENS = 8
REPEATS = int(os.environ.get("BENCH_REPEATS", "3"))
WANTED = 13.0
TEXT = (
    "The keeper wound the clockwork, trimmed the wick and wrote the hour, the wind and the passing ships in his log. "
)


def first_token_s(result: Result) -> float:
    return float(result.receipt["body"]["timings"]["ttft_s"])


def run(engine: Engine, prompt: list[int], key: str | None) -> Result:
    return engine.complete(GenerationRequest(prompt, max_tokens=MAX_TOKENS, prompt_cache_key=key))


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    with Runtime() as runtime, runtime.open(model, spec="off", context_size=2_048) as engine:
        prefix = engine.encode(TEXT * 100)[:PREFIX]
        ends = [engine.encode(f" Hour {n}: the light was")[-QUESTION:] for n in range(REPEATS + 1)]
        run(engine, prefix + ends[0], "log")
        ratios, same = [], True
        for end in ends[1:]:
            cold, warm = run(engine, prefix + end, None), run(engine, prefix + end, "log")
            ratios.append(first_token_s(cold) / first_token_s(warm))
            same &= (warm.token_ids, warm.text) == (cold.token_ids, cold.text)
            print(
                f"cold {first_token_s(cold):6.3f} s, warm {first_token_s(warm):6.3f} s, ratio {ratios[-1]:5.1f}, "
                f"{warm.counts.reused} of {len(prefix + end)} tokens reused"
            )
    ratio = statistics.median(ratios)
    print(f"median ratio {ratio:.1f} (wanted {WANTED:g}); outputs {'identical' if same else 'DIFFER'}")
    return int(ratio < WANTED or not same)


if __name__ == "__main__":
    sys.exit(main())
