"""Kept prompts on real files: on, off and evicted, by every strategy, never another model's (case 22)."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cases.conftest import SECTIONS
from cases.lab import STORY, asked_after, check_kept, fields_of, plain_fields
from parity.conftest import STRATEGIES, gemma, open_engine
from power_core.cli import cli
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.errors import CapabilityError
from power_core.request import GenerationRequest
from power_core.runtime import Runtime
from power_core.testing import gguf
from power_core.testing.gguf_lora import tiny_lora

OPTIONS: dict[str, Any] = {"draft_max": 7, "threads": 1, "context_size": 512, "parallel": 2}
ENDS = ("One day", "One day", "In the morning the keeper wrote", "Nobody")
KINDS = ("llama", "gemma3", "recurrent", "hybrid")
Open = Callable[..., Engine]


def tokens(seed: int, count: int) -> tuple[int, ...]:
    """Ids with passages that come again, so that drafters have something to say."""
    draw = random.Random(seed)
    passage = [draw.randrange(3, 320) for _ in range(20)]
    return tuple(draw.choice(passage) if n % 3 else passage[n % 20] for n in range(count))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")
    folder = tmp_path_factory.mktemp("models")

    def file(kind: str) -> Path:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            getattr(gguf, f"tiny_{kind}")(path)
        return path

    return file


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens a model in a runtime of its own: `opened(path, prompt_cache_bytes=..., sections=...)`."""
    runtimes = []

    def open_(path: Path, sections: Any = None, options: Any = None, **keys: Any) -> Engine:
        sections = {**SECTIONS, "llamacpp": {**SECTIONS["llamacpp"], **(sections or {})}}
        runtimes.append(Runtime(PowerConfig(sections=sections, **keys)))
        return runtimes[-1].open(path, spec="off", **{**OPTIONS, **(options or {})})

    yield open_
    for runtime in runtimes:
        runtime.close()


def questions(spec: str) -> list[GenerationRequest]:
    """The same text twice, then with other ends, greedy and seeded."""
    text = tokens(1, 150)
    return asked_after(text, [tokens(n, tail) for n, tail in ((2, 5), (2, 5), (3, 9), (4, 3))], spec=spec)


@pytest.mark.parametrize("kind", KINDS)
def test_on_off_and_evicted_are_the_same(files: Callable[[str], Path], opened: Open, kind: str) -> None:
    """Every field, with plain decoding and with every zero-weight strategy."""
    engine = opened(files(kind))
    plain = plain_fields(engine, questions("off"))
    for spec in ("off", *STRATEGIES):
        warm = check_kept(engine, questions(spec), plain)
        assert min(result.counts.reused for result in warm) >= (32 if kind == "gemma3" else 120)


def test_what_is_kept_on_disk_is_never_anothers(files: Callable[[str], Path], opened: Open, tmp_path: Path) -> None:
    """Another context size, cache type or file at the same path: a miss with the right text; the same again: a hit."""
    same, other = tmp_path / "same.gguf", tmp_path / "other.gguf"
    shutil.copyfile(files("llama"), same)
    gguf.tiny_llama(other, seed=99)
    keys = {"prompt_cache_dir": str(tmp_path / "cache")}
    [request, *_] = questions("off")

    def run(sections: Any = None, **options: Any) -> tuple[Any, int]:
        engine = opened(same, sections, options, **keys)
        cold = engine.complete(request.with_(prompt_cache_key=None))
        result = engine.complete(request)
        assert fields_of(result) == fields_of(cold)
        engine.close()
        return fields_of(result), result.counts.reused

    first, reused = run()
    assert reused == 0
    assert run({"kv_type": "f32"})[1] == run(context_size=384)[1] == 0
    assert run() == (first, 154)
    shutil.copyfile(other, same)
    changed, reused = run()
    assert (changed != first, reused) == (True, 0)


def test_what_is_kept_on_disk_is_never_another_adapters(
    files: Callable[[str], Path], opened: Open, tmp_path: Path
) -> None:
    """The model alone, its adapters, their scales and order, other bytes at the same path: each has its own entries."""
    one, two = tiny_lora(tmp_path / "one.gguf"), tiny_lora(tmp_path / "two.gguf", seed=2)
    keys = {"prompt_cache_dir": str(tmp_path / "cache")}
    [request, *_] = questions("off")

    def run(*lora: tuple[Path, float]) -> tuple[Any, int]:
        section = {"lora": [{"file": str(file), "scale": scale} for file, scale in lora]}
        engine = opened(files("llama"), section, **keys)
        cold = engine.complete(request.with_(prompt_cache_key=None))
        result = engine.complete(request)
        assert fields_of(result) == fields_of(cold)
        engine.close()
        return fields_of(result), result.counts.reused

    sets = [(), [(one, 1.0)], [(one, 0.5)], [(one, 1.0), (two, 1.0)], [(two, 1.0), (one, 1.0)]]
    first = [run(*lora) for lora in sets]
    assert [reused for _, reused in first] == [0] * len(sets)
    assert len({token_ids for (token_ids, *_), _ in first}) >= len(sets) - 1  # the order changes the last bits only
    for lora, (fields, _) in zip(sets, first, strict=True):
        assert run(*lora) == (fields, 154)
    assert run((one, 0.0)) == (first[0][0], 154)
    shutil.copyfile(two, one)
    changed, reused = run((one, 1.0))
    assert (changed != first[1][0], reused) == (True, 0)
    assert run((one, 1.0)) == (changed, 154)


def test_what_is_kept_in_memory_is_never_another_adapters(
    files: Callable[[str], Path], opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cache under a model, the model with an adapter, and the model again, though their widths had one identity."""
    lora = {"lora": [{"file": str(tiny_lora(tmp_path / "a.gguf"))}]}
    base = opened(files("llama"))
    monkeypatch.setattr("power_core.scheduler.reuse._settings_digest", lambda *_: "the same")
    monkeypatch.setattr("power_core.engine.make_cache", lambda *_, **__: base.cache)
    base, adapted, again = opened(files("llama")), opened(files("llama"), lora), opened(files("llama"), lora)
    [request, *_] = questions("suffix")
    plain = {id(engine): plain_fields(engine, [request]) for engine in (base, adapted, again)}
    assert plain[id(base)] != plain[id(adapted)] == plain[id(again)]
    for engine, reused in ((base, 0), (adapted, 0), (base, 154), (again, 154), (adapted, 154)):
        result = engine.complete(request)
        assert [fields_of(result)] == plain[id(engine)]
        assert result.counts.reused == reused


@pytest.mark.parametrize("damage", ["truncated", "flipped", "header"])
def test_a_damaged_file_is_a_miss(files: Callable[[str], Path], opened: Open, tmp_path: Path, damage: str) -> None:
    """With a warning, the right text, and a good file in its place afterwards."""
    keys = {"prompt_cache_dir": str(tmp_path)}
    [request, *_] = questions("suffix")
    with opened(files("llama"), **keys) as engine:
        expected = fields_of(engine.complete(request))
    [file] = tmp_path.glob("*.powercache")
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
    else:
        data[8:12] = struct.pack("<I", 1 << 31)
    file.write_bytes(data)
    for reused in (0, 154):
        with opened(files("llama"), **keys) as engine:
            result = engine.complete(request)
            assert fields_of(result) == expected
            assert result.counts.reused == reused


def test_the_command_line_says_that_a_file_was_damaged(
    files: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cold, warm, damaged and warm again: one text; a line on standard error where a file was of no use."""
    monkeypatch.setenv("POWER_PROMPT_CACHE_DIR", str(tmp_path))
    arguments = [
        "generate", "--raw", "the wind and the hour and the ships " * 8, "--model", str(files("llama")), "--threads",
        "1", "--max-tokens", "6", "--prompt-cache-key", "k", "--stats",
    ]  # fmt: skip
    ends = []
    for turn in range(4):
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.stderr
        ends.append((result.stdout, "hits 1" in result.stderr, "1 files of kept prompts were damaged" in result.stderr))
        if turn == 1:
            [file] = tmp_path.glob("*.powercache")
            file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert {text for text, *_ in ends} == {ends[0][0]}
    assert [told for _, *told in ends] == [[False, False], [True, False], [False, True], [True, False]]


def test_a_window_that_forgets_refuses_the_key(files: Callable[[str], Path], opened: Open) -> None:
    """Its copies cannot be proved: one line says so, and a request without a key is served."""
    with opened(files("gemma3"), {"swa_full": False}) as engine:
        [request, *_] = questions("off")
        with pytest.raises(CapabilityError, match="cannot be kept"):
            engine.complete(request)
        assert engine.complete(request.with_(prompt_cache_key=None)).token_ids


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_on_off_and_evicted_are_the_same_on_real_models(
    runtime: Runtime, pytestconfig: pytest.Config, model: str
) -> None:
    """Both real models: a story that is asked about, by every zero-weight strategy."""
    path = model if model == "smollm2" else gemma(Path(pytestconfig.cache.mkdir("models")))
    drafted = 0
    with open_engine(runtime, path, spec="off", width_policy="fixed", **OPTIONS) as engine:
        text, ends = engine.encode(STORY * 4), [engine.encode(f" {end}") for end in ENDS]
        plain = plain_fields(engine, asked_after(text, ends))
        for spec in ("off", *STRATEGIES):
            warm = check_kept(engine, asked_after(text, ends, spec=spec), plain)
            assert min(result.counts.reused for result in warm) > len(text) - 16
            drafted += sum(result.counts.drafted for result in warm)
        assert drafted > 0


@pytest.mark.model
def test_the_default_model(engine: Engine) -> None:
    """SmolLM2: a hit under one strategy of what another kept; drafting switched off and on in between."""
    text = STORY * 12
    cold = engine.complete(text + "One day", max_tokens=10)
    for spec in ("suffix", "off", "prompt-lookup"):
        result = engine.complete(text + "One day", max_tokens=10, spec=spec, prompt_cache_key="lighthouse")
        assert fields_of(result) == fields_of(cold)
    assert result.counts.reused > 100
