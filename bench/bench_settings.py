"""
A strategy under several settings: `python bench/bench_settings.py --spec mtp --set spec_draft_p_min=0.3`.

A line for each setting: proposed and accepted tokens for each emitted one, their ratio, tokens
per target pass, and the cost of a draft round over a target forward of one row. Cuts are compared where they propose
equally much; forms of one drafter (`spec_artifact=NAME`, admitted before) by what of acceptance they keep. An output
that is not that of all other settings ends the run with status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench_drafters import prompt_sets

from power_core.config import load_config
from power_core.request import Result
from power_core.runtime import Runtime
from power_core.target import ChatMessage
from power_core.types import TokenId

DEFAULT = {
    "dspark": ("", "spec_draft_margin=0.2", "spec_draft_margin=0.5", "spec_draft_p_min=0.2", "spec_draft_p_min=0.5"),
    "dflash2": ("", "spec_draft_margin=0.5", "spec_draft_margin=2", "spec_draft_p_min=0.2", "spec_draft_p_min=0.5"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", help="strategy, instead of a few cuts of each that has them")
    parser.add_argument("--set", nargs="*", default=[""], metavar="KEY=VALUE", help="a line for each")
    parser.add_argument("--prompts", type=Path, help="folder with the prompt sets, see bench_drafters.py")
    parser.add_argument("--count", type=int, default=4, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft-max", type=int, default=7)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", help="target backend, instead of the first that claims the file")
    options = parser.parse_args()
    texts = [text for _, texts in prompt_sets(options.prompts, options.count) for text in texts]
    chosen = {options.spec: tuple(options.set)} if options.spec else DEFAULT
    print(f"{len(texts)} prompts, {options.tokens} tokens, K = {options.draft_max}")
    print("STRATEGY  SETTING                    PROPOSED  ACCEPTED  SHARE  TOKENS/PASS  DRAFT/FORWARD")
    expected: list[Sequence[TokenId]] = []
    for spec, settings in chosen.items():
        for setting in settings:
            results, cost = run(spec, setting, texts, options)
            expected = expected or [result.token_ids for result in results]
            if expected != [result.token_ids for result in results]:
                sys.exit(f"{spec} {setting}: the ids are those of no other setting")
            print(line(spec, setting, results, cost), flush=True)


def run(spec: str, setting: str, texts: Sequence[str], options: argparse.Namespace) -> tuple[list[Result], float]:
    """Results of all *texts*, and the cost of a draft round."""
    key, _, value = setting.partition("=")
    config = load_config(environ={f"POWER_{key.upper()}": value} if key else {})
    with Runtime(config) as runtime:
        engine = runtime.open(
            options.model, spec=spec, draft_max=options.draft_max, width_policy="fixed", context_size=2048,
            backend=options.backend, threads=1,
        )  # fmt: skip
        results = [engine.complete([ChatMessage("user", text)], max_tokens=options.tokens) for text in texts]
        return results, engine.loop.costs.curve.draft(spec, options.draft_max)


def line(spec: str, setting: str, results: Sequence[Result], cost: float) -> str:
    emitted = sum(len(result.token_ids) for result in results)
    drafted = sum(result.counts.drafted for result in results)
    accepted = sum(result.counts.accepted for result in results)
    rounds = sum(result.counts.rounds for result in results)
    return (
        f"{spec:<9} {setting or '(none)':<25}  {drafted / emitted:>8.3f}  {accepted / emitted:>8.3f}  "
        f"{accepted / max(drafted, 1):>5.2f}  {1 + accepted / rounds:>11.3f}  {cost:>13.2f}"
    )


if __name__ == "__main__":
    main()
