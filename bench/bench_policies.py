"""
Width policies as ratios in one run: `python bench/bench_policies.py [--rounds N] [--threads T] [--backend B]`.

For each kind of text the speed over plain decoding of every policy, prefill excluded on both sides. Runs
alternate within a round and each figure is the median over rounds. Wanted: cost-aware / off >= 0.98 on every
line, cost-aware / best fixed >= 0.95 where drafting pays, cost-aware / oracle >= 0.9 on the recorded traces,
recovery >= 0.8. Prints no absolute times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # prompts of the parity suite

from attrs import evolve

from parity.prompts import PROMPTS
from power_core.config import PowerConfig
from power_core.drafter import Proposal
from power_core.engine import Engine
from power_core.errors import ConfigError
from power_core.plugins import load_plugins
from power_core.request import Result
from power_core.runtime import Runtime
from power_core.scheduler.policy import AdaptivePolicy, FixedPolicy, WidthPolicy
from power_core.scheduler.simulate import compare
from power_core.scheduler.traces import RecordingPolicy
from power_core.scheduler.widths import make_policy
from power_core.testing import AdversarialDrafter, OracleDrafter, ScriptedDrafter, ZeroDrafter
from power_core.types import TokenId

DRAFT_MAX = 15
FIXED = (3, 8, 15)
LOST, RECOVERED = 100, 164  # no proposal is right up to the first token; speed must be back at the second
NAMES = {
    "prose": ("prose-harbour", "prose-science", "prose-history"),
    "copy": ("copy-words", "copy-items", "copy-log"),
    "code": ("code-merge", "code-class", "code-c"),
    "json": ("code-json",),
}
TEXTS = {kind: [p.text for p in PROMPTS if p.name in names] for kind, names in NAMES.items()}


class KnownText:
    """What plain decoding made of the prompt at hand, for drafters that must know it."""

    def __init__(self) -> None:
        self.ids: Sequence[TokenId] = ()
        self.start = 0

    def show(self, result: Result) -> None:
        self.ids, self.start = (*result.prompt_token_ids, *result.token_ids), len(result.prompt_token_ids)

    def following(self, tokens: Sequence[TokenId]) -> TokenId | None:
        return self.ids[len(tokens)] if len(tokens) < len(self.ids) else None


def scripted(known: KnownText, vocab_size: int) -> Mapping[str, ScriptedDrafter]:
    """Drafters that are never right, right once and then wrong, always right, and right after `LOST` tokens."""
    oracle, zero = OracleDrafter(known.following, vocab_size), ZeroDrafter(known.following, vocab_size)

    def late(tokens: Sequence[TokenId], wanted: int, round_: int) -> Proposal:
        drafter = zero if len(tokens) - known.start < LOST else oracle
        return drafter.proposal(tokens, wanted, round_)

    lure = AdversarialDrafter(known.following, vocab_size, wrong_at=1)
    return {"zero": zero, "lure": lure, "oracle": oracle, "late": ScriptedDrafter(late)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="two threads beside a busy neighbour measure that one")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", help="target backend, instead of the first that claims the file")
    parser.add_argument("--spec", nargs="*", default=["suffix", "prompt-lookup", "suffix,prompt-lookup"])
    parser.add_argument("--texts", nargs="*", default=list(TEXTS), choices=list(TEXTS))
    parser.add_argument("--only-spec", action="store_true", help="leave out the scripted drafters")
    options = parser.parse_args()
    plugins, known, drafters = load_plugins(), KnownText(), dict[str, ScriptedDrafter]()
    register = plugins.registry.registrar("power_register_strategies", "bench", "bench")
    for name in ("zero", "lure", "oracle", "late"):
        register(name, lambda _config, name=name: drafters[name])
    with Runtime(PowerConfig(), plugins) as runtime:
        engine = runtime.open(
            options.model, spec=",".join(dict.fromkeys(",".join(options.spec).split(","))) or "off",
            draft_max=DRAFT_MAX, context_size=2048, threads=options.threads, backend=options.backend,
        )  # fmt: skip
        drafters.update(scripted(known, engine.model.tokenizer.vocab_size))
        print(
            f"model {engine.name}, level {engine.profile.level.value}, {options.tokens} tokens, {options.rounds} rounds"
        )
        print("speed over plain decoding; oracle and zero are told the text")
        for spec in options.spec:
            for kind in options.texts:
                print_speeds(engine, known, f"{kind}, {spec}", spec, TEXTS[kind], options.rounds, options.tokens)
                print_limit(engine, f"{kind}, {spec}", spec, TEXTS[kind], options.tokens)
        if not options.only_spec:
            for spec in ("zero", "lure", "oracle"):
                print_speeds(engine, known, f"prose, {spec}", spec, TEXTS["prose"], options.rounds, options.tokens)
            print_recovery(engine, known, options.rounds)
        print_curve(engine)


def policies(engine: Engine, spec: str) -> dict[str, WidthPolicy]:
    """Each policy that can drive *spec*, by the name of its column."""
    found: dict[str, WidthPolicy] = {f"fixed {k}": FixedPolicy(k) for k in FIXED}
    try:
        engine.loop.policy = found["adaptive"] = AdaptivePolicy()
        engine.loop.prepare(spec, DRAFT_MAX)
    except ConfigError:  # the shape of its drafts is fixed
        del found["adaptive"]
    return {**found, "cost-aware": make_policy("cost-aware", engine.loop.costs)}


def decode_seconds(engine: Engine, text: str, spec: str, tokens: int) -> tuple[float, Result]:
    result = engine.complete(text, spec=spec, max_tokens=tokens)
    return result.receipt["body"]["timings"]["decode_s"], result


def print_speeds(
    engine: Engine, known: KnownText, title: str, spec: str, texts: Sequence[str], rounds: int, tokens: int
) -> None:
    """One line: every policy's speed, the best fixed length in hindsight, and how cost-aware compares with it."""
    speeds: dict[str, list[float]] = {}
    checked: Counter[int] = Counter()
    for _ in range(rounds):
        spent: Counter[str] = Counter()
        for text in texts:
            seconds, plain = decode_seconds(engine, text, "off", tokens)
            spent["off"] += seconds
            known.show(plain)
            for name, policy in policies(engine, spec).items():
                engine.loop.policy = policy
                seconds, result = decode_seconds(engine, text, spec, tokens)
                spent[name] += seconds
                if result.token_ids != plain.token_ids:
                    raise SystemExit(f"{title}, {name}: the ids are not those of plain decoding")
                if name == "cost-aware":
                    checked.update(result.counts.widths)
        for name in spent.keys() - {"off"}:
            speeds.setdefault(name, []).append(spent["off"] / spent[name])
    medians = {name: statistics.median(speeds[name]) for name in policies(engine, spec)}
    best = max(1.0, *(medians[f"fixed {k}"] for k in FIXED))
    columns = "  ".join(f"{name} {value:.2f}" for name, value in medians.items())
    rows = ", ".join(f"{width} x {times}" for width, times in checked.most_common(4))
    print(f"{title}: {columns}  | cost-aware / best of fixed and off {medians['cost-aware'] / best:.2f}  | {rows}")


def print_limit(engine: Engine, title: str, spec: str, texts: Sequence[str], tokens: int) -> None:
    """Cost-aware on what was recorded of the texts, over the oracle: at the costs measured here, and with free rows."""
    engine.loop.policy = recording = RecordingPolicy()
    for text in texts:
        engine.complete(text, spec=spec, max_tokens=tokens)
    here, traces = engine.loop.costs.curve, recording.traces()
    free = evolve(here, steps=(0.0, *[1.0] * (DRAFT_MAX + 1)), row=0.0)
    for name, curve in (("replayed", here), ("rows free", free)):
        found = compare(title, traces, curve, rows=engine.loop.costs.widths)
        speed = found.speeds["cost-aware"]
        print(f"{title}, {name}: cost-aware {speed:.2f}, oracle {found.oracle:.2f}: {speed / found.oracle:.2f} of it")


def print_recovery(engine: Engine, known: KnownText, rounds: int) -> None:
    """After 100 tokens without a hit the drafter is an oracle: speed from token 164 on, over that of an oracle."""
    text, end = TEXTS["copy"][0], RECOVERED + 120
    known.show(engine.complete(text, spec="off", max_tokens=end))
    for name in ("adaptive", "cost-aware"):
        ratios = []
        for _ in range(rounds):
            spent = {}
            for spec in ("oracle", "late"):
                engine.loop.policy = policies(engine, spec)[name]
                spent[spec] = seconds_after(engine, text, spec, RECOVERED, end)
            ratios.append(spent["oracle"] / spent["late"])
        print(f"recovery, {name}: {statistics.median(ratios):.2f} of the oracle's speed, 64 tokens after the first hit")


def seconds_after(engine: Engine, text: str, spec: str, first: int, end: int) -> float:
    """Time from the emission of token *first* to that of the last."""
    started = time.perf_counter()
    for event in engine.generate(text, spec=spec, max_tokens=end):
        if event.index == first:
            started = time.perf_counter()
    return time.perf_counter() - started


def print_curve(engine: Engine) -> None:
    """The costs that decisions were made by in the end."""
    curve = engine.loop.costs.curve
    print("cost of n rows:", ", ".join(f"{n}: {curve.step(n):.2f}" for n in (1, 2, 4, 8, 16)))
    for name, costs in curve.drafts.items():
        print(f"cost of asking {name} for {DRAFT_MAX} tokens: {costs[min(DRAFT_MAX, len(costs) - 1)]:.4f}")


if __name__ == "__main__":
    main()
