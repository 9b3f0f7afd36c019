"""
Model-backed drafters on held-out prompts: `python bench/bench_drafters.py --prompts FOLDER [--backend torch]`.

For every strategy with an artifact for the model, and for prompt lookup beside them: accepted tokens a round, tokens
per target pass, acceptance by position, cost of a draft round over a target forward of one row, and speed over plain
decoding, all on the same greedy texts. FOLDER holds `humaneval.jsonl`, `mt-bench.jsonl` and `gsm8k.jsonl`, a line
``{"id": ..., "turns": [...]}`` each; without it a few prompts of the parity suite are taken. The texts are compared as
well: a strategy whose output is not plain decoding's ends the run with status 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # prompts of the parity suite

from parity.prompts import PROMPTS
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.request import Result
from power_core.runtime import Runtime
from power_core.target import ChatMessage

SETS = ("humaneval", "mt-bench", "gsm8k")
COLUMNS = "SET         STRATEGY     K  ACCEPTED  TOKENS/PASS  DRAFT/FORWARD  SPEED/OFF  ACCEPTED AT POSITION 1, 2, ..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="folder with the prompt sets")
    parser.add_argument("--count", type=int, default=8, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--draft-max", type=int, nargs="+", default=[1, 2, 3, 4, 5, 7])
    parser.add_argument("--spec", nargs="+", help="strategies, instead of all that have an artifact")
    parser.add_argument("--policy", default="fixed", help="width policy")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", help="target backend, instead of the first that claims the file")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    with Runtime(PowerConfig()) as runtime:
        strategies = options.spec or [*available(runtime), "suffix"]
        engine = runtime.open(
            options.model, spec=",".join(strategies), draft_max=max(options.draft_max), width_policy=options.policy,
            context_size=2048, threads=options.threads, backend=options.backend,
        )  # fmt: skip
        curve = {n: engine.profile.decode.cost(n) for n in (1, 2, 4, 8)}
        print(
            f"model {engine.name}, level {engine.profile.level.value}, policy {options.policy}, {options.tokens} tokens"
        )
        print("cost of n rows / 1 row:", ", ".join(f"{n}: {cost:.2f}" for n, cost in curve.items() if cost))
        print(COLUMNS)
        wrong = 0
        for name, prompts in prompt_sets(options.prompts, options.count):
            wrong += compare(engine, name, prompts, strategies, options.draft_max, options.tokens)
    sys.exit(min(wrong, 1))


def available(runtime: Runtime) -> list[str]:
    """Strategies that load an artifact and whose kind some package or the user offers."""
    return [item.name for item in runtime.registry.strategies if item.options.get("artifact_kind")]


def prompt_sets(folder: Path | None, count: int) -> Iterator[tuple[str, list[str]]]:
    if folder is None:
        yield "parity", [prompt.text for prompt in PROMPTS[:count]]
        return
    for name in SETS:
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        yield name, [json.loads(line)["turns"][0] for line in lines]


def compare(
    engine: Engine, name: str, prompts: Sequence[str], strategies: Iterable[str], widths: Sequence[int], tokens: int
) -> int:
    """Print a line for every strategy and K; returns how many texts differed from plain decoding."""
    wrong = 0
    for strategy in strategies:
        pairs: dict[int, list[tuple[Result, Result]]] = {width: [] for width in widths}
        for text in prompts:  # plain decoding stands beside its drafted runs: a change of the machine's speed hits both
            messages = [ChatMessage("user", text)]
            plain = engine.complete(messages, spec="off", max_tokens=tokens)
            for width, runs in pairs.items():
                drafted = engine.complete(messages, spec=strategy, draft_max=width, max_tokens=tokens)
                wrong += plain.token_ids != drafted.token_ids
                runs.append((plain, drafted))
        for width, runs in pairs.items():
            print(line(engine, name, strategy, width, runs), flush=True)
    return wrong


def line(engine: Engine, name: str, strategy: str, width: int, pairs: Sequence[tuple[Result, Result]]) -> str:
    rounds = sum(drafted.counts.rounds for _, drafted in pairs)
    accepted = sum(drafted.counts.accepted for _, drafted in pairs)
    speed = statistics.median(decode_seconds(plain) / decode_seconds(drafted) for plain, drafted in pairs)
    cost = engine.loop.costs.curve.draft(strategy, width)
    at = positions([drafted for _, drafted in pairs], width, rounds)
    return (
        f"{name:<10}  {strategy:<11} {width:>2}  {accepted / rounds:>8.3f}  {1 + accepted / rounds:>11.3f}  "
        f"{cost:>13.2f}  {speed:>9.2f}  " + " ".join(f"{share:.3f}" for share in at)
    )


def decode_seconds(result: Result) -> float:
    timings: Mapping[str, float] = result.receipt["body"]["timings"]
    return timings["decode_s"] or 1e-9


def positions(results: Iterable[Result], width: int, rounds: int) -> list[float]:
    """Share of the rounds in which the proposal's position i was accepted: runs of accepted tokens, counted."""
    reached = [0] * width
    for result in results:
        run = 0
        for origin in (*result.origins, "end"):
            if origin == "accepted":
                run += 1
                continue
            for position in range(min(run, width)):
                reached[position] += 1
            run = 0
    return [count / rounds for count in reached]


if __name__ == "__main__":
    main()
