"""
Targets whose state cannot be cut freely: K beyond the window S costs one replay a request, which is counted.

What is counted is compared with what the session was told to do: each replay is one state that was brought back, and
each pass is one forward. The models are generated: recurrent (mamba), and recurrent beside attention (qwen35, lfm2).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from parity.conftest import STRATEGIES, assert_same
from parity.lfm2 import tiny_lfm2
from power_core.artifacts import Provenance
from power_core.artifacts.admission import admit
from power_core.artifacts.matching import installed_contracts
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.evidence import verify_document
from power_core.request import GenerationRequest, Result, SamplingSpec
from power_core.runtime import Runtime
from power_core.testing.gguf import tiny_hybrid, tiny_recurrent
from power_core.testing.gguf_drafts import tiny_dflash, tiny_dflash2, tiny_dspark

for needed in ("power_llamacpp", "power_ngram"):
    pytest.importorskip(needed)
pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")
TARGETS: dict[str, Callable[[Path], Path]] = {
    "mamba": tiny_recurrent, "qwen35": lambda path: tiny_hybrid(path, nextn_layers=1), "lfm2": tiny_lfm2
}  # fmt: skip
DRAFTERS = {"dflash": tiny_dflash, "dflash2": tiny_dflash2, "dspark": tiny_dspark}
WINDOWS = [("mamba", 0), *((target, window) for target in ("qwen35", "lfm2") for window in (0, 2))]  # target, S
WIDTHS = (1, 2, 3, 5, 7)
# A random model copies nothing: each id stands once in a prompt, and one token is looked up, so that each of its
# tokens has been followed by something, which is proposed and mostly wrong.
PROMPTS = [tuple(random.Random(seed).sample(range(3, 320), 317)) for seed in (1, 2)]
LOOKUPS: dict[str, dict[str, Any]] = {
    "prompt-lookup": {"n_min": 1}, "ngram-context": {"n_min": 1}, "ngram-mod": {"n_match": 1},
    "ngram-map-k4v": {"key_size": 1}, "suffix": {"min_confidence": 0.0},
}  # fmt: skip
SECTIONS = {"llamacpp": {"flash_attention": "off"}, **LOOKUPS}
SAMPLINGS = (SamplingSpec(), SamplingSpec(temperature=0.9, seed=5, logprobs=1))
MAX_TOKENS = 40


@define
class Watch:
    """How often a session went back to a kept state, and how many forwards it made."""

    restores: int = 0
    forwards: int = 0


@pytest.fixture
def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch, session = Watch(), engine.session
    restore, forward = session.restore, session.forward

    def counted_restore(*args: Any) -> None:
        watch.restores += 1
        restore(*args)

    def counted_forward(*args: Any) -> Any:
        watch.forwards += 1
        return forward(*args)

    monkeypatch.setattr(session, "restore", counted_restore)
    monkeypatch.setattr(session, "forward", counted_forward)
    return watch


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A target with S resident states, opened for a strategy; one with weights gets a random drafter."""
    target, window, strategy = request.param
    folder = tmp_path_factory.mktemp(target)
    path = TARGETS[target](folder / "target.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POWER_ARTIFACTS_DIR", str(folder / "admitted"))
        with Runtime(PowerConfig(sections=SECTIONS)) as runtime:
            if strategy != "off" and strategy not in runtime.registry.strategies:
                pytest.skip(f"no installed plugin provides {strategy}")
            if strategy in DRAFTERS:  # `mtp` has the target's own layer
                admitted(runtime, DRAFTERS[strategy](folder / "drafter.gguf"), path)
            yield runtime.open(
                path, spec=strategy, draft_max=max(WIDTHS), width_policy="fixed", rollback_rows=window,
                context_size=512, parallel=1, threads=1,
            )  # fmt: skip


def admitted(runtime: Runtime, drafter: Path, target: Path) -> None:
    """Admit *drafter* for *target*."""
    model = runtime.load_target(target)
    contracts = installed_contracts(runtime.registry)
    admit(drafter, name="drafter", target=model, provenance=Provenance("made here", "1", "CC0"), contracts=contracts)
    model.close()


def check(engine: Engine, watch: Watch, expected: Result, request: GenerationRequest) -> Result:
    """One request: plain decoding's answer, and counts that are what the session did."""
    watch.restores = watch.forwards = 0
    result = engine.complete(request)
    assert_same(result, expected)
    counts = result.receipt["body"]["counts"]
    assert (counts["replays"], counts["target_passes"]) == (watch.restores, watch.forwards)
    assert counts["guard"] == (engine.session.rollback_capacity if watch.restores else None)
    verify_document(result.receipt)
    return result


def check_all(engine: Engine, watch: Watch, strategy: str) -> None:
    """Each K on a greedy and a seeded request; only beyond the window is anything replayed, and there it is."""
    window = engine.session.rollback_capacity
    assert window is not None
    replays = dict.fromkeys(WIDTHS, 0)
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        plain = engine.request(prompt, spec="off", max_tokens=MAX_TOKENS, sampling=sampling)
        expected = engine.complete(plain)
        for width in WIDTHS:
            result = check(engine, watch, expected, plain.with_(spec=strategy, draft_max=width))
            assert result.counts.drafted > 0
            replays[width] += result.counts.replays
    assert {width for width in WIDTHS if replays[width]} == {width for width in WIDTHS if width > window}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("engine", [(*window, "off") for window in WINDOWS], ids=str, indirect=True)
def test_strategies_without_weights(engine: Engine, watched: Watch, strategy: str) -> None:
    """Tokens of plain decoding on a recurrent and two hybrid targets, each replay in the receipt."""
    check_all(engine, watched, strategy)


@pytest.mark.parametrize("engine", [
    *(("qwen35", window, strategy) for strategy in (*DRAFTERS, "mtp") for window in (0, 2)),
    *(("lfm2", 2, strategy) for strategy in DRAFTERS),
], ids=str, indirect=True)  # fmt: skip
def test_strategies_with_weights(engine: Engine, watched: Watch) -> None:
    """The same for drafters that read the target's hidden states: rows evaluated again are not told them twice."""
    check_all(engine, watched, engine.strategy)
