"""
Tokens a second of 1, 2, 4 and 8 requests together against the same requests one at a time, in one run.

``python bench/bench_concurrency.py [MODEL]`` mixes greedy and seeded requests with different strategies, limits and
stops, and exits 1 where an output differs from the request's own solo run.

With ``--server LLAMA_SERVER`` a llama.cpp server gets the same requests (model file, threads, context of a slot, token
ids, limits, samplers; its prompt cache off) in turns with Power, and two ratios are printed, medians of the rounds: of
the tokens a second, and of the tokens a second of processor time, which neighbours hardly move. Its outputs, too, are
compared with its own solo runs, without a verdict.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from attrs import define, field
from llama_server import LlamaServer

from power_core.engine import Engine
from power_core.request import GenerationRequest, SamplingSpec
from power_core.runtime import Runtime

COUNTS = (1, 2, 4, 8)
CONTEXT = 1_024
SPECS = ("suffix", "off", "prompt-lookup", "ngram-mod")
TEXTS = (
    "Once upon a time there was", "alpha beta gamma\n" * 12, "The capital of France is", "1, 2, 3, 4, 5,",
    "def add(a, b):\n    return", "Dear Sir or Madam,", '{"id": 1}, {"id": 2}, {"id":', "Roses are red,",
)  # fmt: skip
Ids = tuple[int, ...]


@define
class Runner:
    """
    One of the two, and what it did.

    Args:
        name: For the report.
        together: Sends requests at the same time; returns the token ids of each.
        cpu_s: Processor time it has used so far, in seconds.

    Attributes:
        alone: The token ids of each request, sent alone.
        alone_s: The seconds that took.
        rates: Number of requests -> tokens a second of each round.
        cpu_rates: The same of processor time.
        differing: Number of requests -> in the worst round, the outputs that were not those of the solo run.
    """

    name: str
    together: Callable[[Sequence[GenerationRequest]], list[Ids]]
    cpu_s: Callable[[], float]
    alone: list[Ids] = field(factory=list)
    alone_s: list[float] = field(factory=list)
    rates: dict[int, list[float]] = field(factory=dict)
    cpu_rates: dict[int, list[float]] = field(factory=dict)
    differing: dict[int, int] = field(factory=dict)

    def run_alone(self, asked: Sequence[GenerationRequest]) -> None:
        self.together(asked[:1])  # warm up
        for request in asked:
            started = time.perf_counter()
            self.alone += self.together([request])
            self.alone_s.append(time.perf_counter() - started)

    def run(self, asked: Sequence[GenerationRequest]) -> None:
        count = len(asked)
        started, used = time.perf_counter(), self.cpu_s()
        outputs = self.together(asked)
        seconds, used = time.perf_counter() - started, self.cpu_s() - used
        wrong = sum(ids != own for ids, own in zip(outputs, self.alone, strict=False))
        self.differing[count] = max(wrong, self.differing.get(count, 0))
        tokens = sum(map(len, outputs))
        self.rates.setdefault(count, []).append(tokens / seconds)
        self.cpu_rates.setdefault(count, []).append(tokens / used)

    def solo_rate(self, count: int) -> float:
        """Tokens a second of the first *count* requests, one at a time."""
        return sum(map(len, self.alone[:count])) / sum(self.alone_s[:count])

    def rate(self, count: int) -> float:
        """Tokens a second of *count* requests together."""
        return statistics.median(self.rates[count])

    def cpu_rate(self, count: int) -> float:
        """Tokens a second of processor time of *count* requests together."""
        return statistics.median(self.cpu_rates[count])

    def report(self, count: int) -> str:
        solo = self.solo_rate(count)
        return (
            f"{self.name} {self.rate(count):6.1f} tokens/s, one at a time {solo:6.1f}, "
            f"ratio {self.rate(count) / solo:4.2f}, {count - self.differing[count]} of {count} outputs as alone"
        )


def requests(engine: Engine, max_tokens: int) -> list[GenerationRequest]:
    return [
        engine.request(
            text,
            spec=SPECS[n % len(SPECS)],
            max_tokens=max_tokens - 3 * (n % 4),
            stop=("\n\n",) if n % 3 == 0 else (),
            sampling=SamplingSpec(temperature=0.8, seed=n) if n % 2 else SamplingSpec(repeat_penalty=1.1),
        )
        for n, text in enumerate(TEXTS)
    ]


def start_server(options: argparse.Namespace, runtime: Runtime, engine: Engine) -> LlamaServer:
    """A server of the model that *engine* has, with as many slots and threads."""
    models = runtime.models()
    model = models[engine.name].locate() if engine.name in models else Path(options.model)
    return LlamaServer(
        options.server, model, parallel=max(COUNTS), context_size=CONTEXT, threads=engine.host["threads"],
        options=shlex.split(options.server_options),
    )  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of a request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="two threads beside a busy neighbour measure that one")
    parser.add_argument("--server", type=Path, metavar="LLAMA_SERVER")
    parser.add_argument("--server-options", default="", help="more of its options, as in '--flash-attn off'")
    return parser.parse_args()


def main() -> int:
    options = parse()
    with ExitStack() as stack:
        runtime = stack.enter_context(Runtime())
        engine = runtime.open(options.model, context_size=CONTEXT, parallel=max(COUNTS), threads=options.threads)
        stack.enter_context(engine)
        power = Runner(
            "Power", lambda asked: [result.token_ids for result in engine.generate_many(asked)], time.process_time
        )
        runners = [power]
        if options.server is not None:
            server = stack.enter_context(start_server(options, runtime, engine))
            runners.append(Runner("server", server.together, server.cpu_s))
        asked = requests(engine, options.tokens)
        for runner in runners:
            runner.run_alone(asked)
        for turn in range(options.rounds):
            for count in COUNTS:
                for runner in runners if turn % 2 else reversed(runners):
                    runner.run(asked[:count])
    for count in COUNTS:
        print(f"{count} together: " + "; ".join(runner.report(count) for runner in runners))
        if len(runners) > 1:
            in_time = power.rate(count) / runners[1].rate(count)
            in_cpu = power.cpu_rate(count) / runners[1].cpu_rate(count)
            print(f"{count} together: Power / server {in_time:4.2f}, for the same processor time {in_cpu:4.2f}")
    return int(any(power.differing.values()))


if __name__ == "__main__":
    sys.exit(main())
