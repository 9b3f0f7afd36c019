"""
The prompt cache: how much sooner a kept prompt's first token comes, and what a drafter accepts after a hit.

``python bench/bench_cache.py [MODEL]`` evaluates a 2,000-token prompt and takes it from the cache, in one run: each
pair of times to the first token, the median ratio and whether every field agrees. It exits 1 where the ratio is below
13 or anything differs.

``python bench/bench_cache.py [MODEL] --spec mtp dspark --backend torch`` continues a conversation of 600 tokens, with
K = 3, cold, after a hit with a question that is new, and after a hit with hardly a new token: tokens a target pass.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence

from power_core.engine import Engine
from power_core.request import GenerationRequest, Result
from power_core.runtime import Runtime
from power_core.target import ChatMessage

PREFIX, QUESTION = 2_000, 8
MAX_TOKENS = 8
REPEATS = int(os.environ.get("BENCH_REPEATS", "3"))
WANTED = 13.0
TEXT = (
    "The keeper wound the clockwork, trimmed the wick and wrote the hour, the wind and the passing ships in his log. "
)
CONVERSATION, ANSWER, DRAFT_MAX = 600, 64, 3
QUESTIONS = (
    "A baker sells 14 loaves in the morning and twice as many in the afternoon. How many are that in a day?",
    "Anna reads 12 pages a day. Her book has 180 pages. How many days does she need?",
    "A train has 8 wagons with 42 seats each, and 250 seats are taken. How many are free?",
    "Tom has 5 dollars. He buys 3 pencils at 60 cents each. How much money is left?",
    "A garden is 12 meters long and 7 meters wide. How long is the fence around it?",
    "Four friends share 52 cherries fairly. How many does each of them get?",
    "A pump fills 30 liters a minute. How long does it take for a pool of 1,800 liters?",
    "Why is the sky blue? Answer in three sentences.",
    "Name five animals that sleep through the winter.",
    "Write a function in Python that adds the numbers of a list.",
    "How do bees find their way home?",
    "A ticket costs 9 dollars, for children half of that. What do two adults and three children pay?",
)


def first_token_s(result: Result) -> float:
    return float(result.receipt["body"]["timings"]["ttft_s"])


def run(engine: Engine, prompt: list[int], key: str | None) -> Result:
    return engine.complete(GenerationRequest(prompt, max_tokens=MAX_TOKENS, prompt_cache_key=key))


def first_tokens(runtime: Runtime, model: str | None, backend: str | None) -> bool:
    """Print times to the first token; returns whether they are as wanted."""
    with runtime.open(model, spec="off", context_size=2_048, backend=backend) as engine:
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
    return ratio >= WANTED and same


def conversation(engine: Engine) -> tuple[list[ChatMessage], Sequence[str]]:
    """The target's own answers to some questions, `CONVERSATION` tokens of them; and the questions that are left."""
    messages: list[ChatMessage] = []
    for n, question in enumerate(QUESTIONS):
        if len(engine.encode_chat([*messages, ChatMessage("user", "")])) >= CONVERSATION:
            return messages, QUESTIONS[n:]
        messages.append(ChatMessage("user", question))
        answer = engine.complete(messages, spec="off", max_tokens=2 * ANSWER)
        messages.append(ChatMessage("assistant", answer.text))
    return messages[:-4], QUESTIONS[-2:]


def accepted(runtime: Runtime, model: str | None, backend: str | None, strategies: Sequence[str]) -> bool:
    """Print tokens a pass; returns whether all texts agree."""
    with runtime.open(
        model, spec=",".join(strategies), draft_max=DRAFT_MAX, width_policy="fixed", context_size=2_048, backend=backend
    ) as engine:
        messages, questions = conversation(engine)
        before = engine.encode_chat(messages)
        same = True
        for spec in strategies:
            engine.complete(GenerationRequest(before, max_tokens=1, spec=spec, prompt_cache_key=spec))
            ways: dict[str, list[Result]] = {"cold": [], "new question": [], "same question": []}
            for question in questions:
                prompt = engine.encode_chat([*messages, ChatMessage("user", question)])
                request = GenerationRequest(prompt, max_tokens=ANSWER, spec=spec)
                for way, found in ways.items():
                    found.append(engine.complete(request.with_(prompt_cache_key=None if way == "cold" else spec)))
                same &= len({results[-1].token_ids for results in ways.values()}) == 1
            print(f"{spec:<10} after {len(before)} tokens:", ", ".join(map(line, ways, ways.values())))
    print(f"outputs {'identical' if same else 'DIFFER'}")
    return same


def line(way: str, results: Sequence[Result]) -> str:
    """Tokens a pass, and how many tokens of each prompt were evaluated, at least."""
    passes = 1 + sum(each.counts.accepted for each in results) / sum(each.counts.rounds for each in results)
    return f"{way} {passes:.3f} ({min(each.usage.prompt_tokens - each.counts.reused for each in results)} evaluated)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--spec", nargs="+", help="strategies whose drafters are measured")
    parser.add_argument("--backend")
    options = parser.parse_args()
    with Runtime() as runtime:
        if options.spec:
            return int(not accepted(runtime, options.model, options.backend, options.spec))
        return int(not first_tokens(runtime, options.model, options.backend))


if __name__ == "__main__":
    sys.exit(main())
