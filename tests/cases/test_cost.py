"""What drafting costs and what it saves, in counts (case 25); ratios of times are the benchmarks'."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from cases.conftest import SECTIONS
from cases.lab import COPY, fields_of
from parity.conftest import open_engine
from power_core.config import PowerConfig
from power_core.drafter import Proposal
from power_core.engine import Engine
from power_core.plugins import load_plugins
from power_core.request import Result
from power_core.runtime import Runtime
from power_core.scheduler.cost_aware import CostAwarePolicy
from power_core.scheduler.costs import fixed_curve
from power_core.testing import ScriptedDrafter
from power_core.types import Origin

pytestmark = pytest.mark.model
STORY, LAUGH = "Once upon a time", "ha ha ha ha ha ha ha ha"
NEVER = 7  # an id that the model does not choose here: see `wrong`
MAX_TOKENS, DRAFT_MAX = 64, 8
POLICIES = ("cost-aware", "adaptive")
# Of a processor without matrix units; what this machine's clock says while others run would decide anew each time.
COSTS = fixed_curve(
    [1, 1.6, 2.1, 2.6, 3.1, 3.6, 4.4, 5, 5.7], {name: [0.002] * DRAFT_MAX for name in ("suffix", "wrong")}
)


@pytest.fixture(scope="module", params=POLICIES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """SmolLM2 under a policy that adapts, with a strategy `wrong` that is never right."""
    plugins = load_plugins()
    register = plugins.registry.registrar("power_register_strategies", "test", "test")
    register("wrong", lambda _config: ScriptedDrafter(lambda tokens, wanted, round_: Proposal([NEVER] * wanted)))
    with Runtime(PowerConfig(sections=SECTIONS), plugins) as runtime:
        options = {"spec": "off", "width_policy": request.param, "draft_max": DRAFT_MAX}
        with open_engine(runtime, "smollm2", threads=1, context_size=512, **options) as engine:
            if request.param == CostAwarePolicy.name:
                engine.loop.policy = CostAwarePolicy(lambda: COSTS)
            yield engine


@cache
def plain(engine: Engine, prompt: str) -> Result:
    """Plain decoding of *prompt*, done once an engine."""
    return engine.complete(prompt, spec="off", max_tokens=MAX_TOKENS)


def decode(engine: Engine, prompt: str, spec: str) -> Result:
    """The result, whose fields are those of plain decoding."""
    result = engine.complete(prompt, spec=spec, max_tokens=MAX_TOKENS)
    assert fields_of(result) == fields_of(plain(engine, prompt))
    return result


def evaluations(result: Result) -> float:
    """Forwards of the target for each token, the prompt's not counted."""
    return (result.counts.target_passes - result.counts.prefill_passes) / len(result.token_ids)


def most(engine: Engine) -> float:
    """Most evaluations of repeated text, for each token; cost-aware begins with care where rows are dear."""
    return 0.4 if engine.loop.policy.name == "adaptive" else 0.6


def test_a_drafter_that_is_never_right_is_left_alone(engine: Engine) -> None:
    """25a: at most four full proposals are checked, and next to none of the second half of the tokens waits for one."""
    result = decode(engine, STORY, "wrong")
    assert NEVER not in result.token_ids
    assert result.counts.drafted + result.counts.dropped > 0  # asked it was; the costs decide whether a row is checked
    assert result.counts.drafted <= 4 * DRAFT_MAX
    assert list(result.origins[MAX_TOKENS // 2 :]).count(Origin.CORRECTION) <= 1


@pytest.mark.parametrize("prompt", [COPY, LAUGH], ids=["copy", "laugh"])
def test_text_that_comes_again_is_drafted(engine: Engine, prompt: str) -> None:
    """25c, d: at most four evaluations of the target for ten tokens; also where a run finds its own tail."""
    result = decode(engine, prompt, "suffix")
    assert evaluations(result) <= most(engine)


def test_a_request_does_not_pay_for_the_one_before(engine: Engine) -> None:
    """25f: after a drafter that was never right, repeated text is drafted as well as before it."""
    before = decode(engine, COPY, "suffix")
    decode(engine, STORY, "wrong")
    after = decode(engine, COPY, "suffix")
    assert evaluations(after) <= most(engine)
    if engine.loop.policy.name == "adaptive":
        assert after.counts == before.counts
