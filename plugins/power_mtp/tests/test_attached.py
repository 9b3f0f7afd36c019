"""Attached heads on a real session: admitted, found by the strategy, computed by torch; no token changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from power_mtp.testing import head_config, random_tensors, tiny_shape, write_gguf, write_safetensors

from power_core.artifacts import Provenance
from power_core.artifacts.admission import admit
from power_core.artifacts.matching import installed_contracts
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.errors import ArtifactError, PowerError
from power_core.runtime import Runtime
from power_core.testing.gguf import tiny_llama

pytest.importorskip("power_llamacpp")
pytest.importorskip("power_torch.drafting")
PROMPTS = ("Once upon a time there was", "x", "alpha beta gamma " * 20)
SECTIONS = {"llamacpp": {"flash_attention": "off"}}
SHAPES = {
    "two features": tiny_shape(target_layers=(2, 0), fuses=True),
    "reduced": tiny_shape(target_layers=(1,), has_output=True, is_reduced=True, draft_vocab=150),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target") / "llama.gguf", layers=4)


@pytest.fixture
def opened(target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """``opened(head)``: admits the head's file, then an engine that drafts with `mtp`."""
    monkeypatch.setenv("POWER_ARTIFACTS_DIR", str(tmp_path / "artifacts"))
    runtimes = []

    def call(head: Path, section: dict[str, Any] | None = None, **options: Any) -> Engine:
        runtime = Runtime(PowerConfig(sections=SECTIONS | {"mtp": section or {}}))
        runtimes.append(runtime)
        model = runtime.load_target(target)
        contracts = installed_contracts(runtime.registry)
        admit(head, name="head", target=model, provenance=Provenance("made here", "1", "CC0"), contracts=contracts)
        model.close()
        options = {"spec": "mtp", "width_policy": "fixed", "threads": 1, "context_size": 512} | options
        return runtime.open(str(target), **options)

    yield call
    for runtime in runtimes:
        runtime.close()


def written(folder: Path, name: str, container: str = "safetensors", **config: Any) -> Path:
    shape = SHAPES[name]
    keys = head_config(shape) | config
    if container == "gguf":
        return write_gguf(folder / "head.gguf", random_tensors(shape), keys)
    return write_safetensors(folder / "head", random_tensors(shape), keys)


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
@pytest.mark.parametrize(("name", "k"), [("two features", 3), ("reduced", 7), ("reduced", 12)])
def test_attached_heads_change_no_token(
    opened: Callable[..., Engine], tmp_path: Path, name: str, container: str, k: int
) -> None:
    """Greedy ids and seeded streams equal those of plain decoding; the ring is smaller than the prompt."""
    engine = opened(written(tmp_path, name, container), {"ring": 32}, draft_max=k)
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        drafted = [engine.complete(prompt, max_tokens=40, **options) for prompt in PROMPTS]
        plain = [engine.complete(prompt, max_tokens=40, spec="off", **options) for prompt in PROMPTS]
        assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
        assert all(result.counts.drafted > result.counts.rounds for result in drafted)


def test_a_second_request_drafts_as_the_first(opened: Callable[..., Engine], tmp_path: Path) -> None:
    """No state of a request is left: the same prompt gives the same counts after another one."""
    engine = opened(written(tmp_path, "reduced"), draft_max=5)
    first = engine.complete(PROMPTS[0], max_tokens=40)
    engine.complete(PROMPTS[2], max_tokens=40)
    again = engine.complete(PROMPTS[0], max_tokens=40)
    assert (again.counts.drafted, again.counts.accepted) == (first.counts.drafted, first.counts.accepted)


def test_a_head_for_another_tokenizer_is_not_admitted(opened: Callable[..., Engine], tmp_path: Path) -> None:
    """The same sizes prove nothing."""
    with pytest.raises(ArtifactError, match="made for tokenizer"):
        opened(written(tmp_path, "reduced", tokenizer_sha256="0" * 64))


@pytest.mark.parametrize("section", [{"executor": "native"}, {"device": "abacus"}])
def test_what_cannot_compute_it_is_refused_in_one_line(
    opened: Callable[..., Engine], tmp_path: Path, section: dict[str, Any]
) -> None:
    """Fail closed before anything is decoded."""
    head = written(tmp_path, "reduced")
    with pytest.raises(PowerError) as caught:
        opened(head, section).complete("x", max_tokens=2)
    assert "\n" not in str(caught.value)
    assert next(iter(section)) in str(caught.value)
