"""From an admitted file to text, through the runtime: the tokens are those of plain decoding."""

from __future__ import annotations

import pytest
from power_dflash.chains import Chain
from power_dflash.header import DFLASH2, DFLASH_V1
from power_dflash.native import NativeExecutor

from power_core.artifacts import Provenance
from power_core.artifacts.admission import admit
from power_core.artifacts.matching import installed_contracts
from power_core.config import PowerConfig
from power_core.errors import CapabilityError
from power_core.request import SamplingSpec
from power_core.runtime import Runtime
from power_core.testing.gguf import tiny_llama

STRATEGIES = {"dflash": DFLASH_V1, "dflash2": DFLASH2}
PROMPTS = ("The quick brown fox", "one two three one two", "a")
LENGTH = 40


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model") / "target.gguf", layers=5)


@pytest.fixture
def runtime(tmp_path, monkeypatch, path, make_gguf):
    """A runtime whose folder of artifacts holds a drafter of each kind for the target."""
    monkeypatch.setenv("POWER_ARTIFACTS_DIR", str(tmp_path / "store"))
    with Runtime(PowerConfig(threads=1, ctx=256, spec_width_policy="fixed")) as runtime:
        model = runtime.load_target(path)
        for name, kind in STRATEGIES.items():
            admit(
                make_gguf(kind), name=f"tiny-{name}", target=model, provenance=Provenance("test", "0", "none"),
                contracts=installed_contracts(runtime.registry),
            )  # fmt: skip
        model.close()
        yield runtime


def texts(engine, spec, **fields):
    """Ids of every prompt's answer, greedy and seeded."""
    samplings = (SamplingSpec(), SamplingSpec(temperature=0.9, seed=7))
    answers = [
        engine.complete(prompt, sampling=sampling, spec=spec, max_tokens=LENGTH, **fields)
        for prompt in PROMPTS
        for sampling in samplings
    ]
    return [list(answer.token_ids) for answer in answers], answers


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_output_is_that_of_plain_decoding_for_every_k(strategy, runtime, path):
    """Random drafters are wrong nearly always; nothing of what they propose is in the output."""
    with runtime.open(path, spec=strategy, parallel=2) as engine:
        plain, _ = texts(engine, "off")
        for k in (1, 3, 7):
            drafted, answers = texts(engine, strategy, draft_max=k)
            assert drafted == plain
            assert sum(answer.counts.drafted for answer in answers) > 100


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accepted_rows_become_features_like_any_other(strategy, runtime, path, monkeypatch):
    """With drafts that are right up to a point, several rows a step are accepted, and later ones are taken back."""
    with runtime.open(path, spec=strategy) as engine:
        prompt = engine.model.tokenizer.encode(PROMPTS[0])
        plain = list(engine.complete(PROMPTS[0], spec="off", max_tokens=LENGTH).token_ids)
        truth = [*prompt, *plain, *[0] * 16]
        draft = NativeExecutor.draft

        def oracle(self, rounds):
            draft(self, rounds)  # the real round: positions and features must fit
            chains = []
            for each in rounds:
                tokens = truth[each.position + 1 : each.position + 1 + each.wanted]
                wrong = each.position % 5
                tokens[wrong:] = [(token + 1) % 320 for token in tokens[wrong:]]
                chains.append(Chain(tokens, [0.5] * len(tokens), [0.5] * len(tokens)))
            return chains

        monkeypatch.setattr(NativeExecutor, "draft", oracle)
        answer = engine.complete(PROMPTS[0], max_tokens=LENGTH, draft_max=7)
        assert list(answer.token_ids) == plain
        assert answer.counts.accepted >= LENGTH // 2


def test_an_artifact_of_another_kind_is_no_substitute(runtime, path, monkeypatch, tmp_path):
    """With no artifact of the strategy's kind the strategy is refused, and the error says what to admit."""
    monkeypatch.setenv("POWER_ARTIFACTS_DIR", str(tmp_path / "empty"))
    with pytest.raises(CapabilityError, match="dflash2"):
        runtime.open(path, spec="dflash2")
