"""
Cost of the n-gram strategies: one step at 50,000 tokens of history against one at 1,000, in one run.

``python bench/bench_ngram.py`` prints the ratio for each strategy and exits 1 where one is above 2.
"""

from __future__ import annotations

import random
import statistics
import sys
import time

from power_ngram.config import NgramContextConfig, NgramMapConfig, NgramModConfig, PromptLookupConfig, SuffixConfig
from power_ngram.drafter import Config, open_history

from power_core.drafter import DraftRequest

STRATEGIES: tuple[Config, ...] = (
    SuffixConfig(),
    PromptLookupConfig(),
    NgramContextConfig(),
    NgramModConfig(),
    NgramMapConfig(),
)
SHORT, LONG = 1_000, 50_000
MAX_TOKENS = 8
STEPS = 400
REPEATS = 7
LIMIT = 2.0


def text(length: int) -> list[int]:
    """Words with the skew of a language, in which passages recur: what a long prompt looks like."""
    draw = random.Random(3)
    tokens: list[int] = []
    while len(tokens) < length:
        if len(tokens) > 200 and draw.random() < 0.1:
            start = draw.randrange(len(tokens) - 40)
            tokens += tokens[start : start + 40]
        else:
            tokens.append(min(int(draw.paretovariate(0.7)), 40_000))
    return tokens[:length]


def step_seconds(config: Config, prompt: list[int], answer: list[int]) -> float:
    """CPU seconds of one checkpoint, propose and observe of a committed token, over *answer*."""
    session = open_history(config)
    session.begin(0, prompt)
    anchor = prompt[-1]
    started = time.thread_time()
    for token in answer:
        session.checkpoint(0)
        session.propose([DraftRequest(0, anchor, MAX_TOKENS)])
        session.observe(0, [token], None)
        anchor = token
    return (time.thread_time() - started) / len(answer)


def begin_seconds(config: Config, prompt: list[int]) -> float:
    session = open_history(config)
    started = time.thread_time()
    session.begin(0, prompt)
    return time.thread_time() - started


def main() -> int:
    history = text(LONG)
    answer = history[LONG // 2 : LONG // 2 + STEPS]  # copies from the long history's middle
    short = history[LONG // 2 - SHORT // 2 : LONG // 2 + SHORT // 2]  # holds the same passage
    print(f"one step (propose at most {MAX_TOKENS}, observe 1) after {LONG} / after {SHORT} tokens of history")
    worst = 0.0
    for config in STRATEGIES:
        pairs = [(step_seconds(config, short, answer), step_seconds(config, history, answer)) for _ in range(REPEATS)]
        ratio = statistics.median(late / early for early, late in pairs)
        early, late = (min(column) * 1e6 for column in zip(*pairs, strict=True))
        begin = begin_seconds(config, history) / LONG * 1e6
        print(
            f"{config.strategy:14s} ratio {ratio:5.2f}   {early:5.1f} -> {late:5.1f} us a step   "
            f"begin {begin:4.2f} us a token"
        )
        worst = max(worst, ratio)
    print(f"worst ratio {worst:.2f} (at most {LIMIT:g}): {'ok' if worst <= LIMIT else 'TOO HIGH'}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
