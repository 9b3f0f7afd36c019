"""Speculative against plain decoding in torch: identical, whatever is proposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.errors import ArtifactError, CapabilityError
from power_core.plugins import load_plugins
from power_core.runtime import Runtime
from power_core.shapes import ExactnessLevel

STRATEGIES = ("prompt-lookup", "suffix", "ngram-mod")
SAMPLINGS: tuple[dict[str, float], ...] = ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 11})
PROMPTS = (
    "The cat sat on the mat. The dog sat on the mat. The cat sat on the",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "1, 2, 3, 4, 5, 6,",
)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(PowerConfig(sections={"torch": {"prefill_rows": 32}}), load_plugins()) as runtime:
        if "torch" not in runtime.registry.targets.names():
            pytest.skip("power-torch is not installed")
        yield runtime


def compare(engine: Engine, max_tokens: int, samplings: tuple[dict[str, float], ...]) -> int:
    """Tokens accepted over all runs; every run's ids are those of plain decoding."""
    accepted = 0
    for prompt in PROMPTS:
        ids = engine.encode(prompt)
        for sampling in samplings:
            plain = engine.complete(ids, max_tokens=max_tokens, spec="off", **sampling)
            for strategy in STRATEGIES:
                result = engine.complete(ids, max_tokens=max_tokens, spec=strategy, **sampling)
                assert result.token_ids == plain.token_ids, (prompt, strategy, sampling)
                accepted += result.counts.accepted
    return accepted


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_tiny_models_decode_alike_with_and_without_speculation(
    architecture: str, tiny: Callable[[str], Path], runtime: Runtime
) -> None:
    """Greedy and seeded, past a window and past a span of the cache."""
    with runtime.open(
        tiny(architecture), backend="torch", spec="off", draft_max=5, context_size=256, threads=1
    ) as engine:
        assert engine.model.facts()["backend"] == "torch"
        compare(engine, 100, SAMPLINGS)


@pytest.mark.model
def test_smollm2_decodes_alike_with_and_without_speculation(smollm2: Path, runtime: Runtime) -> None:
    """Greedy and seeded in the machine's own element type, with proposals that are accepted."""
    with runtime.open(smollm2, backend="torch", spec="off", draft_max=7, context_size=512, threads=1) as engine:
        assert engine.profile.level in (ExactnessLevel.BITWISE, ExactnessLevel.PADDED)
        assert compare(engine, 24, SAMPLINGS) > 20


@pytest.mark.slow
@pytest.mark.model
def test_requests_beside_each_other_decode_as_alone(smollm2: Path, runtime: Runtime) -> None:
    """Three requests in one session give what each gives alone."""
    with runtime.open(
        smollm2, backend="torch", spec="off", draft_max=3, context_size=512, parallel=3, threads=1
    ) as engine:
        requests = [engine.request(prompt, max_tokens=32, spec="prompt-lookup") for prompt in PROMPTS]
        alone = [engine.complete(prompt, max_tokens=32, spec="off").token_ids for prompt in PROMPTS]
        assert [result.token_ids for result in engine.generate_many(requests)] == alone


def test_a_backend_is_chosen_by_name(tiny: Callable[[str], Path], runtime: Runtime) -> None:
    """A GGUF file goes to the first backend that knows it, unless one is named; an unknown name is refused."""
    with pytest.raises(
        CapabilityError, match=r"no installed plugin provides the target .*'torh'.*did you mean 'torch'"
    ):
        runtime.open(tiny("llama"), backend="torh")
    model = runtime.load_target(tiny("llama"))
    expected = "llama.cpp" if "llamacpp" in runtime.registry.targets.names() else "torch"
    assert model.facts()["backend"] == expected
    model.close()


def test_a_folder_is_opened_like_a_file(
    tiny: Callable[[str], Path], runtime: Runtime, write_folder: Any, write_tokenizer: Any, tmp_path: Path
) -> None:
    """A Hugging Face folder needs no backend name, and decodes as the GGUF file does."""
    from power_torch.weights import load_weights

    folder = write_folder(tmp_path / "model", load_weights(tiny("llama")))
    write_tokenizer(folder, tiny("llama"))
    options = {"spec": "off", "context_size": 128, "draft_max": 3, "threads": 1}
    results = []
    for path, backend in ((folder, None), (tiny("llama"), "torch")):
        with runtime.open(path, backend=backend, **options) as engine:
            results.append(engine.complete("again and again", max_tokens=20).token_ids)
    assert results[0] == results[1]
    with pytest.raises(ArtifactError, match="a directory"):
        runtime.open(tmp_path)
