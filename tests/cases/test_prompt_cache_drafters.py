"""Kept prompts under drafters with weights: a hit changes nothing, their proposals neither (case 22)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cases.lab import STORY, asked_after, check_kept, plain_fields
from parity.setups import TRAINED, Setup
from parity.setups import opened as open_setup
from power_core.artifacts import Provenance
from power_core.artifacts.admission import admit
from power_core.artifacts.matching import installed_contracts
from power_core.config import PowerConfig
from power_core.drafter import DraftRequest, Proposal
from power_core.engine import Engine
from power_core.runtime import Runtime
from power_core.scheduler.kept_rows import MOST_TOLD
from power_core.testing.gguf import tiny_hybrid, tiny_llama
from power_core.testing.gguf_drafts import tiny_dflash, tiny_dflash2, tiny_dspark, tiny_mtp

for needed in ("power_llamacpp", "power_dflash", "power_dspark", "power_mtp"):
    pytest.importorskip(needed)
pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")

SECTIONS = {"llamacpp": {"flash_attention": "off"}}
OPTIONS = {"width_policy": "fixed", "threads": 1, "context_size": 512, "draft_max": 5, "parallel": 2}
BLOCKS: dict[str, Callable[..., Path]] = {"dflash": tiny_dflash, "dflash2": tiny_dflash2, "dspark": tiny_dspark}
CELLS = [("llama", name) for name in BLOCKS] + [("hybrid", name) for name in (*BLOCKS, "mtp")]
ENDS = (" one day", " one day", " and then nobody", " so")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, str], Engine]]:
    """``opened("hybrid", "dspark")``: a random target, and an engine that drafts with a random drafter for it."""
    monkeypatch.setenv("POWER_ARTIFACTS_DIR", str(tmp_path / "admitted"))
    runtimes: list[Runtime] = []

    def call(target: str, strategy: str) -> Engine:
        runtime = Runtime(PowerConfig(sections=SECTIONS, spec_mtp_recurrent_snapshots=2))
        runtimes.append(runtime)
        if target == "llama":
            path = tiny_llama(tmp_path / "target.gguf", layers=4)
        else:
            path = tiny_hybrid(tmp_path / "target.gguf", nextn_layers=1)
        make = BLOCKS.get(strategy, tiny_mtp)
        drafter = make(tmp_path / "drafter.gguf", **({} if strategy == "mtp" else {"target_layers": (1, 3)}))
        model = runtime.load_target(path)
        contracts = installed_contracts(runtime.registry)
        admit(drafter, name=strategy, target=model, provenance=Provenance("a test", "1", "CC0"), contracts=contracts)
        model.close()
        return runtime.open(path, spec=strategy, **OPTIONS)

    yield call
    for runtime in runtimes:
        runtime.close()


def check(engine: Engine, repeats: int) -> None:
    """Cache off, cold, warm, evicted and together are plain decoding's, and what is warm was drafted too."""
    text, ends = engine.encode(STORY * repeats), [engine.encode(end) for end in ENDS]
    asked = asked_after(text, ends)
    warm = check_kept(engine, asked, plain_fields(engine, asked))
    for result in warm:
        assert result.counts.reused > len(text) - 16
        assert result.counts.drafted > 0


@pytest.mark.parametrize(("target", "strategy"), CELLS)
def test_random_drafters(opened: Callable[[str, str], Engine], target: str, strategy: str) -> None:
    """Also on memory that cannot be cut, where a rejection goes back to a checkpoint taken after the hit."""
    check(opened(target, strategy), 3)


@pytest.mark.parametrize(("target", "strategy"), CELLS)
def test_a_hit_proposes_what_a_cold_start_does(
    opened: Callable[[str, str], Engine], target: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, also where hardly a row of the prompt is new: the drafter is told of the states of the others."""
    engine = opened(target, strategy)
    session = engine.loop.drafts.get(strategy).session
    propose, proposed = session.propose, []

    def recorded(requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        answers = propose(requests)
        proposed.extend([*map(int, answer.token_ids)] for answer in answers)
        return answers

    monkeypatch.setattr(session, "propose", recorded)
    text = engine.encode(STORY * 8)[: MOST_TOLD - 8]
    for request in asked_after(text, [engine.encode(end) for end in ENDS]):
        engine.complete(request.with_(prompt_cache_key=None))
        cold, proposed[:] = list(proposed), []
        result = engine.complete(request)
        assert any(cold)
        assert proposed == cold
        proposed.clear()
    assert result.counts.reused > len(text) - 16


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("strategy", TRAINED)
def test_trained_drafters(strategy: str) -> None:
    """SmolLM2 on llama.cpp with each drafter trained for it."""
    setup = Setup("llamacpp", strategy, "torch" if strategy == "mtp" else "native")
    with open_setup(setup, "smollm2", **OPTIONS) as engine:
        check(engine, 4)
