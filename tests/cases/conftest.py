"""One engine for each context size, one raw loop, and the plain ids of the prompts that several files use."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner
from click.testing import Result as CliResult

from cases.lab import COPY, GREETING, fields_of
from parity.conftest import open_engine
from parity.reference import RawLoop, raw_loop
from power_core.cli import cli
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.request import Result
from power_core.runtime import Runtime

# Settings of the parity suite, so that the measurement of the machine is shared. Whatever a strategy proposes is
# verified: these tests are about right and wrong proposals, not about how many pay. One thread: beside another
# busy process two threads on two cores wait for each other.
OPTIONS = {"spec": "off", "draft_max": 15, "parallel": 4, "width_policy": "fixed", "threads": 1}
SECTIONS = {"llamacpp": {"flash_attention": "off"}}
SETTINGS = """
ctx = 64
parallel = 4
spec_draft_max = 15
threads = 1

[plugin.llamacpp]
flash_attention = "off"
"""


@pytest.fixture(scope="session")
def runtime() -> Iterator[Runtime]:
    with Runtime(PowerConfig(sections=SECTIONS)) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def engine(runtime: Runtime) -> Engine:
    """Room for everything but the long prompts."""
    return open_engine(runtime, "smollm2", context_size=2048, **OPTIONS)


@pytest.fixture(scope="session")
def narrow(runtime: Runtime) -> Engine:
    """A context of 64 positions."""
    return open_engine(runtime, "smollm2", context_size=64, **OPTIONS)


@pytest.fixture
def power(narrow: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., CliResult]:
    """Runs a command on the real model, in the settings of `narrow`: `power("generate", "hi")`."""
    for name in [name for name in os.environ if name.startswith("POWER_")]:
        monkeypatch.delenv(name)
    # What `narrow` measured is kept only where the machine was quiet: else a command measures again, and says so.
    monkeypatch.setattr("power_core.user_cache.misses_told", lambda _tell: nullcontext())
    config = tmp_path / "settings.toml"
    config.write_text(SETTINGS)
    return lambda *args: CliRunner().invoke(cli, ["--config", str(config), *map(str, args)])


@pytest.fixture(scope="session")
def raw(engine: Engine) -> Iterator[RawLoop]:
    """One token a decode on llama.cpp alone, in the engine's settings."""
    loop = raw_loop(engine)
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def copied(engine: Engine) -> Result:
    """48 plain tokens of the copy prompt."""
    return engine.complete(COPY, spec="off", max_tokens=48)


@pytest.fixture(scope="session")
def greeting(engine: Engine) -> Result:
    """One plain token: what `undisturbed` compares with."""
    return engine.complete(GREETING, spec="off", max_tokens=1, logprobs=4)


@pytest.fixture
def undisturbed(engine: Engine, greeting: Result) -> Iterator[None]:
    """After the test, the next request is served as it was before, and nothing is left running."""
    yield
    gc.collect()  # generations that were dropped are cancelled
    after = engine.complete(GREETING, spec="off", max_tokens=1, logprobs=4)
    assert fields_of(after) == fields_of(greeting)
    assert engine.loop.active == 0
