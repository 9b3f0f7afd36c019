"""Speculative against plain decoding through the engine, on each kind of memory (field cases 18 and 19)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from power_llamacpp.session import LlamaCppSession
from power_llamacpp.tokenizer import LlamaCppTokenizer

from power_core.request import GenerationRequest, Result
from power_core.scheduler.drafting import OpenDraft
from power_core.scheduler.loop import StepLoop
from power_core.testing import PatternDrafter

# Rounds as (R)ight and (W)rong tokens: three right and a wrong one, none, one right, eight right, eight wrong.
CASE_18 = ("RRRW", "", "R", "RRRRRRRR", "WWWWWWWW", "")
PROMPT_LENGTHS = (1, 8, 28, 31, 32, 33, 90)  # around the window of 32
TOKENS = 60
Prompts = Sequence[Sequence[int]]


def decode(
    session: LlamaCppSession, tokenizer: LlamaCppTokenizer, prompts: Prompts, drafter: PatternDrafter | None, k: int
) -> list[Result]:
    """Results of *prompts*, decoded together."""

    def open_strategy(name: str) -> OpenDraft:
        assert drafter is not None
        return OpenDraft(name, drafter.open(model=None, session=session))

    loop = StepLoop(
        session, tokenizer, open_strategy=open_strategy, default_strategy="pattern" if drafter else "off", draft_max=k
    )
    numbers = [loop.submit(GenerationRequest(prompt, max_tokens=TOKENS)) for prompt in prompts]
    results: dict[int, Result] = {}
    while len(results) < len(numbers):
        results.update({event.request_id: event.result for event in loop.step() if event.result})
    return [results[number] for number in numbers]


@pytest.fixture(scope="module")
def plain(
    bench: Any, random_words: Callable[..., list[int]]
) -> Callable[[str], dict[tuple[int, ...], tuple[int, ...]]]:
    """Prompt -> ids of plain decoding, each prompt alone."""
    known: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}

    def of(kind: str) -> dict[tuple[int, ...], tuple[int, ...]]:
        if kind not in known:
            tokenizer = LlamaCppTokenizer(bench.model(kind))
            prompts = [tuple(random_words(length, length)) for length in PROMPT_LENGTHS]
            known[kind] = {p: decode(bench.session(kind), tokenizer, [p], None, 1)[0].token_ids for p in prompts}
        return known[kind]

    return of


@pytest.mark.parametrize(("kind", "low", "options"), [
    ("llama", 1, {}), ("gemma3", 1, {}), ("gemma3", 1, {"swa_full": False}), ("gemma3", 8, {"swa_full": False}),
    ("recurrent", 1, {}), ("recurrent", 2, {}), ("hybrid", 1, {}), ("hybrid", 1, {"rollback_rows": 4}),
    ("hybrid", 1, {"rollback_rows": 16}), ("hybrid", 8, {"rollback_rows": 4}),
    ("llama+lora", 1, {}), ("gemma3+lora", 1, {"swa_full": False}), ("recurrent+lora", 1, {}),
    ("hybrid+lora", 1, {"rollback_rows": 4}),
])  # fmt: skip
@pytest.mark.parametrize("patterns", [CASE_18, ("RWWWWWWWWWWWWWWW",)], ids=["case-18", "early-mismatch"])
def test_speculation_changes_no_token(
    bench: Any, one_class: Callable[[str], None], plain: Any, kind: str, low: int, options: dict[str, Any],
    patterns: tuple[str, ...],
) -> None:  # fmt: skip
    """Seven requests in one batch, proposals wrong early and late: ids are those of each alone without proposals."""
    one_class(kind)
    expected = plain(kind)

    def reference(tokens: Sequence[int]) -> int:
        prompt = next(p for p in expected if tuple(tokens[: len(p)]) == p)
        return (*expected[prompt], 5)[min(len(tokens) - len(prompt), TOKENS)]

    for k in (3, 15):
        session = bench.session(kind, low=low, max_sequences=len(expected), **options)
        drafter = PatternDrafter(reference, 320, patterns)
        results = decode(session, LlamaCppTokenizer(bench.model(kind)), list(expected), drafter, k)
        assert [result.token_ids for result in results] == list(expected.values())
        assert all(result.counts.replays <= 1 for result in results)
        assert sum(result.counts.accepted for result in results) > 0
        session.shutdown()
