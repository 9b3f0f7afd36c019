"""Requests that keep their prompts in a torch target: a hit is a miss bit for bit, with every strategy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.errors import TooLargeError
from power_core.plugins import load_plugins
from power_core.runtime import Runtime

PROMPT = "The keeper wound the clockwork and trimmed the wick. The keeper wrote the hour and the wind. " * 3
TAILS = ("The keeper wound", "The keeper wrote", "The keeper wound", "Nobody")
SAMPLINGS: tuple[dict[str, float], ...] = ({}, {"temperature": 0.8, "seed": 11})
OPTIONS: dict[str, Any] = {"backend": "torch", "spec": "off", "draft_max": 4, "threads": 1}
ZERO_WEIGHT = ("prompt-lookup", "suffix", "ngram-mod")
TRAINED = ("mtp", "dflash", "dflash2", "dspark")


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Callable[..., Runtime]]:
    """Makes runtimes with a prompt cache on the disk; those of one test share it."""
    pytest.importorskip("power_ngram", reason="pip install power-ngram")
    made: list[Runtime] = []

    def make(dtype: str = "fp32", **fields: Any) -> Runtime:
        config = PowerConfig(
            sections={"torch": {"prefill_rows": 32, "dtype": dtype}}, prompt_cache_dir=str(tmp_path / "kept"), **fields
        )
        made.append(Runtime(config, load_plugins()))
        return made[-1]

    yield make
    for each in made:
        each.close()


def compare(engine: Engine, strategies: tuple[str, ...], max_tokens: int, tails: tuple[str, ...] = TAILS) -> list[int]:
    """Tokens reused by each keyed request; every one has the ids of plain decoding without a cache."""
    reused = []
    for turn, tail in enumerate(tails):
        for sampling in SAMPLINGS:
            plain = engine.complete(PROMPT + tail, max_tokens=max_tokens, spec="off", **sampling)
            for strategy in strategies:
                result = engine.complete(
                    PROMPT + tail, max_tokens=max_tokens, spec=strategy, prompt_cache_key="log", **sampling
                )
                assert result.token_ids == plain.token_ids, (turn, strategy, sampling)
                assert result.text == plain.text
                reused.append(result.counts.reused)
    return reused


@pytest.mark.parametrize(("architecture", "dtype"), [("llama", "fp32"), ("llama", "bf16"), ("gemma3", "fp32")])
def test_tiny_models_decode_alike_from_kept_prompts(
    architecture: str, dtype: str, tiny: Callable[[str], Path], runtime: Callable[..., Runtime]
) -> None:
    """Cold and warm, greedy and seeded, past the window of gemma3; then in a new process, from the disk."""
    options = {**OPTIONS, "context_size": 512}
    with runtime(dtype).open(tiny(architecture), **options) as engine:
        length = len(engine.encode(PROMPT))
        first, *later = compare(engine, ("off", *ZERO_WEIGHT), 24)
        assert first == 0
        assert min(later) > length - 16  # less a last chunk of its class, and what the tokenizer joins
        assert engine.stats().cache.counters.hits == len(later)
    with runtime(dtype).open(tiny(architecture), **options) as engine:
        assert min(compare(engine, ("suffix",), 12)) > length - 16


def test_evicted_and_damaged_copies_are_misses(
    tiny: Callable[[str], Path], runtime: Callable[..., Runtime], tmp_path: Path
) -> None:
    """A bound for one copy alone, and a file with a changed byte: fewer hits, and the same ids."""
    with runtime(prompt_cache_bytes=250_000).open(tiny("llama"), **OPTIONS, context_size=512) as engine:
        compare(engine, ("prompt-lookup",), 20)
        assert engine.stats().cache.entries == 1
        for file in (tmp_path / "kept").iterdir():
            file.write_bytes(file.read_bytes()[:-1] + b"?")
    with runtime().open(tiny("llama"), **OPTIONS, context_size=512) as engine:
        assert compare(engine, ("prompt-lookup",), 20)[0] == 0
        assert engine.stats().cache.counters.damaged == 1


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("strategy", TRAINED)
def test_smollm2_decodes_alike_from_kept_prompts(strategy: str, smollm2: Path, runtime: Callable[..., Runtime]) -> None:
    """Trained drafters begin with the rows that are evaluated, and draft; zero-weight ones read the whole prompt."""
    pytest.importorskip("power_smollm2_drafters", reason="pip install power-smollm2-drafters")
    with runtime("auto").open(smollm2, **{**OPTIONS, "spec": strategy}, context_size=512) as engine:
        first, *later = compare(engine, (strategy, "suffix"), 16, TAILS[1:3])
        assert first == 0
        assert min(later) > len(engine.encode(PROMPT)) - 16
        assert engine.complete(PROMPT + TAILS[1], max_tokens=16, prompt_cache_key="log").counts.drafted > 0


def test_a_session_is_reserved_in_bytes(tiny: Callable[[str], Path], runtime: Callable[..., Runtime]) -> None:
    """A memory limit below what a session can take refuses it, one above it serves it."""
    with runtime(memory_limit=100_000_000).open(tiny("llama"), **OPTIONS, context_size=512) as engine:
        assert engine.complete(PROMPT, max_tokens=4).token_ids
    with pytest.raises(TooLargeError, match="raise memory_limit"):
        runtime(memory_limit=3_000_000).open(tiny("llama"), **OPTIONS, context_size=512)


@pytest.mark.slow
def test_a_session_takes_no_more_than_was_reserved(tmp_path: Path) -> None:
    """Weights, cache, probe and full sequences in a process of their own: its peak stays below, within a factor."""
    pytest.importorskip("resource", reason="peaks are counted on Unix")
    program = f"""
import resource, torch
from pathlib import Path
from power_torch.config import TorchConfig
from power_torch.target import TorchBackend
from power_core.target import RowBatch, SessionOptions
from power_core.testing.gguf import tiny_llama

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def use(path, **options):
    model = TorchBackend(TorchConfig(dtype="fp32", prefill_rows=64)).load(path)
    options = SessionOptions(threads=1, **options)
    reserved = model.session_bytes(options) + path.stat().st_size
    session = model.open_session(options)
    for seq in range(options.max_sequences):
        session.open(seq)
        for start in range(0, options.context_size, 64):
            batch = RowBatch(64)
            batch.add_chain(seq, start, list(range(3, 67)), 1)
            session.forward(batch, session.profile.prefill)
    model.close()
    return reserved

folder = Path({str(tmp_path)!r})
large = tiny_llama(folder / "large.gguf", hidden_size=256, layers=4, vocab_size=1200)
use(tiny_llama(folder / "small.gguf"), context_size=64)  # what libraries take once
before = peak()
print(use(large, context_size=1024, max_sequences=4), peak() - before)
"""
    environment = {**os.environ, "POWER_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    reserved, taken = map(int, done.stdout.split())
    assert reserved / 3 < taken < reserved
