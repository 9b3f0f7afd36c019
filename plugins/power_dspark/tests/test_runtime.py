"""From the file to the answer, on a tiny llama model: admitted, found, drafting natively and in torch, exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from power_dspark.artifact import read_header
from power_dspark.choice import open_executor
from power_dspark.config import DsparkConfig
from power_dspark.drafter import DsparkDrafter
from power_dspark.executor import Executor, Round
from power_dspark.header import Header
from power_dspark.native import NativeExecutor
from power_dspark.testing import NumpyDspark, assert_follows, save_published

from power_core.artifacts import TensorFile, open_tensors
from power_core.cli import cli
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.errors import ArtifactError, CapabilityError
from power_core.request import GenerationRequest, Result, SamplingSpec
from power_core.runtime import Runtime
from power_core.target import RowBatch
from power_core.testing.gguf import tiny_llama
from power_core.testing.gguf_drafts import tiny_dspark

pytest.importorskip("power_llamacpp")
pytest.importorskip("gguf")
PROMPT = tuple(range(20, 44))
TOKENS = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the target and a store of its own for admitted drafters."""
    folder = tmp_path_factory.mktemp("dspark")
    tiny_llama(folder / "target.gguf", layers=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POWER_ARTIFACTS_DIR", str(folder / "store"))
        yield folder


@pytest.fixture(scope="module")
def text(folder: Path) -> tuple[int, ...]:
    """What the target says to `PROMPT`, undrafted."""
    with Runtime(PowerConfig()) as runtime, open_engine(runtime, folder, spec="off") as engine:
        return engine.complete(PROMPT, max_tokens=TOKENS).token_ids


def open_engine(runtime: Runtime, folder: Path, **options: Any) -> Engine:
    return runtime.open(
        folder / "target.gguf", context_size=256, parallel=2, threads=1, draft_max=8, width_policy="fixed", **options
    )


def knowing_drafter(path: Path, text: Sequence[int]) -> Path:
    """A drafter whose Markov head holds the successors in *text*: most of what it proposes is right."""
    rng = np.random.default_rng(3)
    codes = rng.standard_normal((320, 256), np.float32)
    successors = np.zeros_like(codes)
    for token, following in dict(pairwise([PROMPT[-1], *text])).items():
        successors[following] += codes[token] / 4
    return tiny_dspark(path, rank=256, replace={"markov_w1.weight": codes, "markov_w2.weight": successors})


@pytest.fixture(scope="module")
def admitted(folder: Path, text: tuple[int, ...]) -> Path:
    """Both containers of one drafter, admitted for the target through the command line."""
    path = knowing_drafter(folder / "drafter.gguf", text)
    published = save_published(open_tensors(path), folder / "published")
    for name, file in (("native", path), ("published", published)):
        arguments = ["artifacts", "admit", str(file), "--target", str(folder / "target.gguf"), "--name", name]
        arguments += ["--source", "a test", "--revision", "1", "--license", "Apache-2.0"]
        outcome = CliRunner().invoke(cli, arguments)
        assert outcome.exit_code == 0, outcome.output
        assert f"admitted {name}: dspark" in outcome.output
    return folder


@pytest.fixture(scope="module", params=["native", "published"])
def engine(request: pytest.FixtureRequest, admitted: Path) -> Iterator[Engine]:
    """An engine that drafts natively, and one that drafts with the published file in torch."""
    if request.param == "published":
        pytest.importorskip("power_torch")
        pytest.importorskip("torch").set_num_threads(1)
    with Runtime(PowerConfig()) as runtime, open_engine(runtime, admitted, spec="dspark", artifact=request.param) as it:
        yield it


def assert_same(result: Result, expected: Result) -> None:
    assert result.token_ids == expected.token_ids
    assert result.text == expected.text
    assert result.finish_reason == expected.finish_reason
    assert result.logprobs == expected.logprobs


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_a_drafter_that_knows_the_text_makes_it_faster_and_no_different(engine: Engine, k: int) -> None:
    """Right proposals are accepted, several a pass; the tokens are those of plain decoding."""
    plain = engine.complete(PROMPT, spec="off", max_tokens=TOKENS)
    result = engine.complete(PROMPT, spec="dspark", draft_max=k, max_tokens=TOKENS)
    assert_same(result, plain)
    assert result.counts.accepted > TOKENS // 4
    assert result.counts.target_passes < plain.counts.target_passes


SAMPLINGS = {
    "greedy": SamplingSpec(),
    "seeded": SamplingSpec(temperature=0.9, top_k=40, seed=7),
    "hot": SamplingSpec(temperature=1.5, seed=3, logprobs=2),
    "penalties": SamplingSpec(repeat_penalty=1.3, presence_penalty=0.3),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_other_prompts_and_samplings_equal_off(engine: Engine, name: str) -> None:
    """Where most proposals are wrong, and where the target draws."""
    for prompt in ((5,), tuple(range(100, 140)), (60, 61) * 30):
        request = GenerationRequest(prompt, sampling=SAMPLINGS[name], max_tokens=32)
        result = engine.complete(request.with_(spec="dspark", draft_max=4))
        assert_same(result, engine.complete(request.with_(spec="off")))
        assert result.counts.drafted > 0


def test_two_requests_of_a_batch_equal_their_solo_runs(engine: Engine) -> None:
    """Drafts of sequences that are decoded together, of other lengths and widths, leave each other alone."""
    requests = [
        GenerationRequest(PROMPT, spec="dspark", draft_max=8, max_tokens=40),
        GenerationRequest(tuple(range(200, 209)), spec="dspark", draft_max=3, max_tokens=30, sampling=SAMPLINGS["hot"]),
    ]
    alone = [engine.complete(request.with_(spec="off")) for request in requests]
    for result, expected in zip(engine.generate_many(requests), alone, strict=True):
        assert_same(result, expected)


def test_a_request_that_fills_the_context_ends_as_off_does(engine: Engine) -> None:
    """Near the end the block no longer fits; the last legal token is still there."""
    prompt = tuple(50 + i % 200 for i in range(240))
    result = engine.complete(prompt, spec="dspark", max_tokens=100)
    assert_same(result, engine.complete(prompt, spec="off", max_tokens=100))
    assert result.counts.drafted > 0


def features_of(engine: Engine, tokens: Sequence[int], seq: int) -> NDArray[np.float32]:
    """The outputs of blocks 0 and 2 for *tokens*, from a forward of the session's own."""
    session = engine.session
    session.open(seq)
    batch = RowBatch(64)
    batch.add_chain(seq, 0, list(tokens), 1)
    rows = session.forward(batch, session.profile.prefill)
    features = np.concatenate([rows.hidden(slice(0, len(tokens)), layer) for layer in (0, 2)], axis=1)
    session.close(seq)
    return features


@pytest.fixture(scope="module")
def beside(admitted: Path) -> Iterator[Engine]:
    """An engine for executors that are opened by hand."""
    with Runtime(PowerConfig()) as runtime, open_engine(runtime, admitted, spec="dspark", artifact="native") as engine:
        yield engine


def both_executors(engine: Engine, file: TensorFile) -> dict[str, Executor]:
    found: dict[str, Executor] = {}
    host: Any = engine.session
    found["native"] = NativeExecutor(host.open_draft_context(file.path), file, read_header(file))
    pytest.importorskip("torch").set_num_threads(1)
    module = pytest.importorskip("power_dspark.torch_executor")
    found["torch"] = module.TorchExecutor(
        DsparkConfig(dtype="fp32"), file, read_header(file), engine.model, engine.session
    )
    return found


@pytest.mark.parametrize("rows", [3, 8])
def test_native_and_torch_draft_what_the_equations_give(
    beside: Engine, make: Callable[..., TensorFile], shape: dict[str, Any], rows: int
) -> None:
    """The same file, the target's own features and matrices: two sequences, rolled back and continued."""
    file = make(**shape)
    model: Any = beside.model
    shared = {which: model.matrix(which) for which in ("token_embd", "output")}
    reference = NumpyDspark(file, read_header(file), shared)
    features = [features_of(beside, PROMPT, 0), features_of(beside, PROMPT[5:19], 1)]
    for name, executor in both_executors(beside, file).items():
        rounds = []
        for seq, held in enumerate(features):
            executor.open(seq)
            executor.inject(seq, 3 * seq, held[:10])
            executor.truncate(seq, 3 * seq + 6)
            executor.inject(seq, 3 * seq + 6, held[6:])
            rounds.append(Round(seq, 3 * seq + len(held), 70 + seq))
        for drafted, each in zip(executor.draft(rounds, rows, chances=True), rounds, strict=True):
            expected = reference.draft(features[each.seq], 3 * each.seq, each.anchor, rows)
            # Native K/V are F16.
            assert_follows(drafted, expected, atol=1e-2 if name == "native" else 1e-4, decided=0.05)
        assert executor.end_position(0) == len(features[0])  # no row of the block is left
        executor.shutdown()


def test_auto_is_native_for_a_gguf_and_torch_for_the_rest(beside: Engine, make: Callable[..., TensorFile]) -> None:
    """Where the target evaluates drafters itself, a GGUF goes there; a published file never can."""
    native = open_executor(DsparkConfig(), *pair(make()), beside.model, beside.session)
    assert isinstance(native, NativeExecutor)
    native.shutdown()
    module = pytest.importorskip("power_dspark.torch_executor")
    for file, config in (
        (make("safetensors"), DsparkConfig(dtype="fp32")),
        (make(), DsparkConfig(executor="torch", dtype="fp32")),
    ):
        assert isinstance(open_executor(config, *pair(file), beside.model, beside.session), module.TorchExecutor)


def pair(file: TensorFile) -> tuple[TensorFile, Header]:
    return file, read_header(file)


def test_a_changed_file_is_refused(admitted: Path, text: tuple[int, ...]) -> None:
    """One byte of an admitted drafter changed: its digest says so before anything is loaded."""
    drafter = next((admitted / "store" / "native").glob("*.gguf"))
    good = drafter.read_bytes()
    drafter.chmod(0o644)
    drafter.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        with Runtime(PowerConfig()) as runtime, pytest.raises(ArtifactError):
            open_engine(runtime, admitted, spec="dspark", artifact="native")
    finally:
        drafter.write_bytes(good)


def test_an_executor_that_cannot_be_had_is_an_error_with_a_way_out(
    beside: Engine, make: Callable[..., TensorFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native asked for a published file; torch needed and not installed: never a silent substitute."""
    published = DsparkDrafter(DsparkConfig(executor="native"), make("safetensors"))
    with pytest.raises(CapabilityError, match="convert-drafter"):
        published.open(beside.model, beside.session)
    monkeypatch.setattr("power_dspark.choice.find_spec", lambda name: None)
    absent = DsparkDrafter(DsparkConfig(), make("safetensors"))
    with pytest.raises(CapabilityError, match="pip install power-torch"):
        absent.open(beside.model, beside.session)
