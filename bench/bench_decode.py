"""
Decoding speed as ratios in one run: `python bench/bench_decode.py [--rounds N]`.

Compared things alternate within a round and each figure is the median over rounds, so that a change
of the machine's speed hits both sides. Absolute times are not printed: they mean nothing elsewhere.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # prompts and the raw loop of the parity suite

from parity.prompts import PROMPTS
from parity.reference import raw_loop
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.runtime import Runtime

TOKENS = 96
COPY = {
    "words": "alpha beta gamma\n" * 30,
    "log": next(p.text for p in PROMPTS if p.name == "copy-log"),
    "items": next(p.text for p in PROMPTS if p.name == "copy-items"),
}
PROSE = {p.name: p.text for p in PROMPTS if p.name.startswith("prose-")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    with Runtime(PowerConfig()) as runtime:
        engine = runtime.open(options.model, spec="off", draft_max=15, width_policy="fixed", context_size=2048)
        print(f"model {engine.name}, level {engine.profile.level.value}, {TOKENS} tokens, {options.rounds} rounds")
        print_costs(engine)
        print_off_against_raw(engine, options.rounds)
        print_loop_share(engine)
        print_strategies(engine, runtime, "copy", COPY, options.rounds, widths=(4, 8, 15))
        print_strategies(engine, runtime, "prose", PROSE, options.rounds, widths=(4,))


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def print_costs(engine: Engine) -> None:
    """The cost curve bounds what any strategy can reach: K accepted tokens cost one forward of K + 1 rows."""
    curve = {n: engine.profile.decode.cost(n) for n in (1, 2, 4, 5, 8, 9, 16)}
    print("cost of n rows / 1 row:", ", ".join(f"{n}: {cost:.2f}" for n, cost in curve.items() if cost))
    print("upper limit of speed / off:", ", ".join(f"{n} rows: {n / cost:.2f}" for n, cost in curve.items() if cost))


def print_off_against_raw(engine: Engine, rounds: int) -> None:
    """Tokens per second of plain decoding over those of a bare loop on llama-cpp-python (wanted: >= 0.95)."""
    raw = raw_loop(engine)
    ids = engine.encode(PROSE["prose-science"])
    ratios = []
    for _ in range(rounds):
        bare = seconds(lambda: raw.generate(ids, TOKENS))
        ratios.append(bare / seconds(lambda: engine.complete(ids, spec="off", max_tokens=TOKENS)))
    raw.close()
    print(f"off / raw loop, tokens per second: {statistics.median(ratios):.3f} (min {min(ratios):.3f})")


def print_loop_share(engine: Engine) -> None:
    """Time of a step outside the target's forward over the forward (wanted: <= 0.03)."""
    for strategy in ("off", "suffix"):
        engine.loop.forward_seconds = 0.0
        request = engine.request(PROSE["prose-history"], spec=strategy, draft_max=4, max_tokens=TOKENS)
        total = seconds(partial(engine.complete, request))
        inside = engine.loop.forward_seconds
        print(f"Python time / forward time, {strategy}: {(total - inside) / inside:.4f}")


def print_strategies(
    engine: Engine, runtime: Runtime, kind: str, prompts: dict[str, str], rounds: int, widths: tuple[int, ...]
) -> None:
    """Speed of every zero-weight strategy over plain decoding, prefill excluded on both sides."""
    for width in widths:
        for item in runtime.registry.strategies:
            if not item.options.get("zero_weight"):
                continue
            ratios, accepted, passes = [], 0, 0
            for _ in range(rounds):
                spent = {"off": 0.0, item.name: 0.0}
                for text in prompts.values():
                    for strategy in spent:
                        result = engine.complete(text, spec=strategy, draft_max=width, max_tokens=TOKENS)
                        spent[strategy] += result.receipt["body"]["timings"]["decode_s"]
                    accepted += result.counts.accepted
                    passes += result.counts.rounds
                ratios.append(spent["off"] / spent[item.name])
            mean = 1 + accepted / passes
            print(
                f"{kind}, K={width}, {item.name} / off: {statistics.median(ratios):.2f} "
                f"({mean:.2f} tokens per target pass)"
            )


if __name__ == "__main__":
    main()
