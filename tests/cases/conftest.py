"""One engine for each context size, one raw loop, and the plain ids of the prompts that several files use."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from cases.lab import COPY, GREETING, fields_of
from parity.conftest import open_engine
from parity.reference import RawLoop
from power_core.config import PowerConfig
from power_core.request import Result
from power_core.runtime import Engine, Runtime
from power_core.shapes import ExactnessLevel

# The parity suite's, so that the measurement of the machine is shared.
OPTIONS = {"spec": "off", "draft_max": 15, "parallel": 4}


@pytest.fixture(scope="session")
def runtime() -> Iterator[Runtime]:
    with Runtime(PowerConfig()) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def engine(runtime: Runtime) -> Engine:
    """Room for everything but the long prompts."""
    return open_engine(runtime, "smollm2", context_size=2048, **OPTIONS)


@pytest.fixture(scope="session")
def narrow(runtime: Runtime) -> Engine:
    """A context of 64 positions."""
    return open_engine(runtime, "smollm2", context_size=64, **OPTIONS)


@pytest.fixture(scope="session")
def raw(engine: Engine) -> Iterator[RawLoop]:
    """One token a decode on llama.cpp alone, in the engine's settings."""
    facts = engine.model.facts()
    loop = RawLoop(
        facts["path"],
        extra_buffers=facts["extra_buffers"],
        flash_attention=facts["flash_attention"],
        threads=facts["threads"],
        pad=engine.profile.level is ExactnessLevel.PADDED,
    )
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
