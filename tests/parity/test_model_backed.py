"""
Drafters with weights on SmolLM2, each by every executor on both target backends: a subset of the grid for each run.

A drafter is evaluated by the target's own library (`native`) or in torch; the target by llama.cpp or in torch. Needs
the packages that ship drafters and, for the second half, the torch backend; what is missing is named as it is skipped.
The whole grid is in `test_grid.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest

from parity.conftest import assert_same, ids_of
from parity.prompts import PROMPTS, ParityPrompt
from parity.setups import BACKENDS, SAMPLINGS, TRAINED, TRAINED_WIDTHS, Setup, has_form, opened
from power_core.engine import Engine
from power_core.request import GenerationRequest, Result

pytestmark = pytest.mark.model
MAX_TOKENS = 32
SETUPS = [
    Setup(backend, drafter, executor)
    for backend, drafter, executor in itertools.product(BACKENDS, TRAINED, ("native", "torch"))
    if has_form(backend, drafter, executor)
]
CELLS = list(itertools.product(TRAINED_WIDTHS, SAMPLINGS))
SUBSET = [PROMPTS[i] for i in range(0, len(PROMPTS), 6)]
Ask = Callable[[ParityPrompt, str], Result]


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def drafting(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """SmolLM2 with one strategy's trained drafter."""
    with opened(request.param, "smollm2", draft_max=max(TRAINED_WIDTHS), context_size=2048, parallel=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(drafting: Engine) -> Ask:
    """Plain decoding of a prompt under a sampling, done once an engine."""

    @cache
    def ask(prompt: ParityPrompt, sampling: str) -> Result:
        return drafting.complete(
            ids_of(drafting, prompt), spec="off", max_tokens=MAX_TOKENS, sampling=SAMPLINGS[sampling]
        )

    return ask


def test_a_subset_of_the_grid_equals_off(drafting: Engine, plain: Ask) -> None:
    """Four kinds of text; over them every width, greedy and seeded. Some proposals are accepted: these are trained."""
    accepted = 0
    for i, (width, sampling) in enumerate(CELLS):
        prompt = SUBSET[i % len(SUBSET)]
        result = drafting.complete(
            ids_of(drafting, prompt),
            spec=drafting.strategy,
            draft_max=width,
            max_tokens=MAX_TOKENS,
            sampling=SAMPLINGS[sampling],
        )
        assert_same(result, plain(prompt, sampling))
        assert result.counts.drafted > 0 or len(result.token_ids) < 2
        accepted += result.counts.accepted
    assert accepted > 0


def test_two_requests_of_a_batch_equal_their_solo_runs(drafting: Engine, plain: Ask) -> None:
    """Drafts of other lengths and samplings, decoded together."""
    pairs = [(SUBSET[0], "greedy", 7), (SUBSET[2], "seeded", 3)]
    make = partial(GenerationRequest, spec=drafting.strategy, max_tokens=MAX_TOKENS)
    requests = [
        make(ids_of(drafting, prompt), draft_max=width, sampling=SAMPLINGS[sampling])
        for prompt, sampling, width in pairs
    ]
    for result, (prompt, sampling, _) in zip(drafting.generate_many(requests), pairs, strict=True):
        assert result.token_ids == plain(prompt, sampling).token_ids
