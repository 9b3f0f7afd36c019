"""
Drafters with weights on SmolLM2: ids(strategy) == ids(off) for every trained drafter, on both target backends.

A drafter is evaluated by the target's own library (`native`) or in torch; the target by llama.cpp or in torch. Needs
the packages that ship drafters and, for the second half, the torch backend; what is missing is named as it is skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec

import pytest

from parity.conftest import open_engine
from parity.prompts import PROMPTS, ParityPrompt
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.errors import ArtifactError
from power_core.plugins import load_plugins
from power_core.request import GenerationRequest, Result, SamplingSpec
from power_core.runtime import Runtime
from power_core.target import ChatMessage

pytestmark = pytest.mark.model
DRAFTERS = {
    "mtp": "smollm2-mtp", "dflash": "smollm2-dflash", "dflash2": "smollm2-dflash2", "dspark": "smollm2-dspark"
}  # fmt: skip
WIDTHS = (1, 2, 3, 4, 5, 7)
MAX_TOKENS = 64
SAMPLINGS = {"greedy": SamplingSpec(), "seeded": SamplingSpec(temperature=0.8, top_k=50, top_p=0.95, seed=17)}
SETUPS = ("llamacpp-native", "llamacpp-torch", "torch-torch")  # target backend, executor of the drafter
CELLS = list(itertools.product(WIDTHS, SAMPLINGS))
Ask = Callable[[ParityPrompt, str], Result]


@pytest.fixture(scope="module", params=SETUPS)
def setup(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Target backend and executor."""
    backend, executor = request.param.split("-")
    if "torch" in (backend, executor) and find_spec("power_torch") is None:
        pytest.skip("needs power-torch: pip install power-torch")
    if "llamacpp" in (backend, executor) and find_spec("power_llamacpp") is None:
        pytest.skip("needs power-llamacpp: pip install power-llamacpp")
    return backend, executor


@pytest.fixture(scope="module", params=DRAFTERS)
def drafting(request: pytest.FixtureRequest, setup: tuple[str, str]) -> Iterator[Engine]:
    """SmolLM2 with one strategy's trained drafter."""
    backend, executor = setup
    strategy, artifact = request.param, DRAFTERS[request.param]
    other = {"torch": "llamacpp", "llamacpp": "torch"}[backend]  # both take GGUF files
    plugins = load_plugins(environ={"POWER_BLOCK_PLUGINS": other})
    if strategy not in plugins.registry.strategies:
        pytest.skip(f"no installed plugin provides {strategy}")
    if artifact not in plugins.registry.artifacts:
        pytest.skip(f"{artifact} is not installed: pip install power-smollm2-drafters")
    try:
        plugins.registry.artifacts.get(artifact).value.locate()
    except ArtifactError as exc:
        pytest.skip(str(exc))
    if (strategy, executor) == ("mtp", "native"):
        pytest.skip("an attached head has no native form; the native one is tested on targets with layers of their own")
    config = PowerConfig(sections={strategy: {"executor": executor}})
    with Runtime(config, plugins) as runtime, open_engine(
        runtime, "smollm2", spec=strategy, artifact=artifact, draft_max=max(WIDTHS), width_policy="fixed",
        context_size=2048, parallel=2, threads=1,
    ) as engine:  # fmt: skip
        yield engine


def ids_of(engine: Engine, prompt: ParityPrompt) -> tuple[int, ...]:
    if prompt.chat:
        return tuple(engine.encode_chat([ChatMessage("user", prompt.text)]))
    return tuple(engine.encode(prompt.text))


@pytest.fixture(scope="module")
def plain(drafting: Engine) -> Ask:
    """Plain decoding of a prompt under a sampling, done once an engine."""

    @cache
    def ask(prompt: ParityPrompt, sampling: str) -> Result:
        return drafting.complete(
            ids_of(drafting, prompt), spec="off", max_tokens=MAX_TOKENS, sampling=SAMPLINGS[sampling]
        )

    return ask


def check(engine: Engine, plain: Ask, prompt: ParityPrompt, width: int, sampling: str) -> Result:
    """One cell: tokens, text and end of plain decoding, from rounds that did draft."""
    result = engine.complete(
        ids_of(engine, prompt),
        spec=engine.strategy,
        draft_max=width,
        max_tokens=MAX_TOKENS,
        sampling=SAMPLINGS[sampling],
    )
    expected = plain(prompt, sampling)
    assert result.token_ids == expected.token_ids
    assert result.text == expected.text
    assert result.finish_reason == expected.finish_reason
    assert result.usage == expected.usage
    assert result.counts.drafted > 0 or len(expected.token_ids) < 2
    return result


SUBSET = [PROMPTS[i] for i in range(0, len(PROMPTS), 6)]


def test_a_subset_of_the_grid_equals_off(drafting: Engine, plain: Ask) -> None:
    """Four kinds of text; over them every width, greedy and seeded. Some proposals are accepted: these are trained."""
    accepted = 0
    for i, (width, sampling) in enumerate(CELLS):
        accepted += check(drafting, plain, SUBSET[i % len(SUBSET)], width, sampling).counts.accepted
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


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: p.name)
@pytest.mark.parametrize(("width", "sampling"), CELLS)
def test_full_grid(drafting: Engine, plain: Ask, prompt: ParityPrompt, width: int, sampling: str) -> None:
    """Every prompt x K x sampling."""
    check(drafting, plain, prompt, width, sampling)
