"""
The whole claim, cell by cell: each strategy x K x target backend x sampling on the 24 prompts is plain decoding.

Plain decoding is each prompt alone, one token a step. A cell decodes the prompts four at a time, so that it takes
seconds; which prompts meet, and which is alone, changes from cell to cell. Every second prompt asks for
log-probabilities, for without them greedy rows are read by another way; where prompts can be kept, strategies without
weights find the state of those prompts kept by the cell before. The second model takes part with a handful of cells.
A run of this folder ends with the totals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice, product
from pathlib import Path

import pytest
from attrs import evolve

from parity.conftest import STRATEGIES, WIDTHS, gemma, ids_of
from parity.prompts import PROMPTS
from parity.setups import BACKENDS, SAMPLINGS, TRAINED, TRAINED_WIDTHS, Setup, has_form, opened
from power_core.engine import Engine
from power_core.request import GenerationRequest, Result

pytestmark = pytest.mark.model
GEMMA_STRATEGIES, GEMMA_WIDTHS = ("prompt-lookup", "suffix"), (7,)
BATCHES = (1, 7, 16)  # requests handed in together; 24 in all
PARALLEL = {"smollm2": 4, "gemma": 1}  # of them decoded together: as many as leave each its K of the rows of a step
MAX_TOKENS = 16
Cell = tuple[Setup, str, int, str]
Ask = Callable[[int, str], Result]


def cells() -> list[Cell]:
    """Setup, strategy, K and sampling of every cell."""
    weightless = [(Setup(backend), STRATEGIES, WIDTHS) for backend in BACKENDS]
    trained = [(trained_setup(*pair), pair[1:], TRAINED_WIDTHS) for pair in product(BACKENDS, TRAINED)]
    second = [(Setup(backend, model="gemma"), GEMMA_STRATEGIES, GEMMA_WIDTHS) for backend in BACKENDS]
    return [
        (setup, *cell)
        for setup, strategies, widths in weightless + trained + second
        for cell in product(strategies, widths, SAMPLINGS)
    ]


def trained_setup(backend: str, drafter: str) -> Setup:
    """A trained drafter, evaluated by the backend's own library where that can do it."""
    return Setup(backend, drafter, "native" if has_form(backend, drafter, "native") else "torch")


CELLS = cells()


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine of a setup."""
    setup: Setup = request.param
    model = gemma(Path(request.config.cache.mkdir("models"))) if setup.model == "gemma" else setup.model
    draft_max = max(TRAINED_WIDTHS if setup.drafter else WIDTHS)
    with opened(setup, model, draft_max=draft_max, context_size=512, parallel=PARALLEL[setup.model]) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Ask:
    """Plain decoding of a prompt under a sampling, done once an engine, with nothing kept from before."""

    @cache
    def ask(index: int, sampling: str) -> Result:
        return engine.complete(asked(engine, index, sampling).with_(spec="off", prompt_cache_key=None))

    return ask


def asked(engine: Engine, index: int, sampling: str) -> GenerationRequest:
    """What prompt *index* asks for."""
    return GenerationRequest(
        ids_of(engine, PROMPTS[index]),
        sampling=evolve(SAMPLINGS[sampling], logprobs=2 if index % 2 else None),
        max_tokens=MAX_TOKENS,
        prompt_cache_key="kept" if index % 2 and engine.strategy == "off" and engine.cache is not None else None,
    )


def decoded(engine: Engine, turn: int, strategy: str, width: int, sampling: str) -> dict[int, Result]:
    """Results by prompt of one cell; *turn* says which prompts are decoded together."""
    order = iter([(turn + 5 * i) % len(PROMPTS) for i in range(len(PROMPTS))])
    results: dict[int, Result] = {}
    for size in BATCHES:
        batch = list(islice(order, size))
        requests = [asked(engine, index, sampling).with_(spec=strategy, draft_max=width) for index in batch]
        results.update(zip(batch, engine.generate_many(requests), strict=True))
    return results


def difference(result: Result, expected: Result) -> str | None:
    """The first field of those a caller sees that is not plain decoding's."""
    names = ("error", "token_ids", "logprobs", "text", "finish_reason", "usage")
    return next((name for name in names if getattr(result, name) != getattr(expected, name)), None)


def test_no_cell_is_left_out() -> None:
    """Nine strategies on two backends, each K and sampling, and 24 prompts in each."""
    for backend, sampling in product(BACKENDS, SAMPLINGS):
        held = {cell[1:3] for cell in CELLS if cell[0].backend == backend and cell[3] == sampling}
        assert held >= {*product(STRATEGIES, WIDTHS), *product(TRAINED, TRAINED_WIDTHS)}
    assert sum(BATCHES) == len(PROMPTS) == 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "strategy", "width", "sampling", "turn"), [(*cell, turn) for turn, cell in enumerate(CELLS)],
    ids=["-".join(map(str, cell)) for cell in CELLS], indirect=["engine"], scope="module",  # else an engine a cell
)  # fmt: skip
def test_a_cell_is_plain_decoding(
    engine: Engine, plain: Ask, strategy: str, width: int, sampling: str, turn: int,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    """24 prompts: ids, text, end, usage and log-probabilities, from rounds that drafted no more than K tokens."""
    results = decoded(engine, turn, strategy, width, sampling)
    expected = {index: plain(index, sampling) for index in results}
    found = {PROMPTS[i].name: difference(results[i], expected[i]) for i in results}
    differing = {name: field for name, field in found.items() if field}
    counts = [result.counts for result in results.values()]
    totals = {
        "requests": len(results), "differing": len(differing), "tokens": sum(c.emitted for c in counts),
        "logprobs": sum(len(result.logprobs or ()) for result in results.values()),
        "drafted": sum(c.drafted for c in counts), "accepted": sum(c.accepted for c in counts),
    }  # fmt: skip
    record_property("parity", totals)
    assert not differing
    assert 0 < totals["drafted"] <= width * sum(c.proposals for c in counts)
