"""The width probe on real llama.cpp: what it claims holds, what dies is a no, what is known is not measured again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from power_llamacpp import probe, probe_child
from power_llamacpp.config import Choice, KvType, LlamaCppConfig
from power_llamacpp.context import ContextSettings, NativeContext, NativeModel
from power_llamacpp.gguf_check import check_gguf
from power_llamacpp.probe_choice import Measurement, ProbeSettings, width_classes

from power_core import user_cache
from power_core.errors import BackendError, ConfigError
from power_core.shapes import ExactnessLevel
from power_core.testing.gguf import tiny_gemma3, tiny_hybrid, tiny_llama, tiny_recurrent

pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")
pytest.importorskip("llama_cpp", reason="pip install power-llamacpp")

PLAIN = LlamaCppConfig(flash_attention=Choice.OFF, extra_buffers=Choice.OFF, prefill_rows=64)


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POWER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "t.gguf")


def measure(path: Path, config: LlamaCppConfig = PLAIN, *, threads: int = 1, max_rows: int = 16, **options):
    return probe.measure(path, check_gguf(path), config=config, threads=threads, max_rows=max_rows, **options)


def no_children(*args, **kwargs):
    raise AssertionError("a child was started")


def rows_by_width(path: Path, result: probe.ProbeResult, widths: list[int], *, start: int, count: int) -> list[bytes]:
    """Logits of positions start .. start+count-1 at each width, by plain calls that share nothing with the probe."""
    weights = NativeModel(path, extra_buffers=result.settings.extra_buffers)
    threads = int(result.profile.evidence["threads"])
    settings = ContextSettings(1024, threads=threads, flash_attention=result.settings.flash_attention, max_outputs=64)
    outcomes = []
    for width in widths:
        with NativeContext(weights, settings) as context:
            context.batch.tokens[:] = np.arange(context.batch_rows) * 7 % 300
            context.batch.positions[:] = np.arange(context.batch_rows)
            context.batch.outputs[:] = 0
            context.decode(start)
            context.batch.outputs[:] = 1
            found = []
            for first in range(start, start + count, width):
                context.batch.positions[:width] = np.arange(first, first + width)
                context.batch.tokens[:width] = np.arange(first, first + width) * 7 % 300
                found += [row.tobytes() for row in context.decode(width)]
            outcomes.append(b"".join(found[:count]))
    weights.close()
    return outcomes


@pytest.mark.parametrize("factory", [tiny_llama, tiny_gemma3, tiny_recurrent, tiny_hybrid])
def test_each_kind_of_memory(factory, tmp_path: Path) -> None:
    """Every kind of memory can be probed, and the decode class's claim holds in an independent loop."""
    path = factory(tmp_path / "t.gguf", weights="Q8_0")
    result = measure(path)
    assert result.profile.level in (ExactnessLevel.BITWISE, ExactnessLevel.PADDED)
    widths = result.profile.decode.widths
    first, last = rows_by_width(path, result, [widths[0], widths[-1]], start=248, count=16)
    assert first == last
    assert result.profile.prefill.max_rows == 64
    assert all(cost > 0 for cost in result.profile.decode.costs)


def test_flash_attention_claim_holds_where_kernels_split(model: Path) -> None:
    """Forced fused attention, whose kernel for single rows differs from 512 positions on, is not called one class."""
    result = measure(model, LlamaCppConfig(flash_attention=Choice.ON, extra_buffers=Choice.OFF), threads=2)
    widths = result.profile.decode.widths
    one, first, last = rows_by_width(model, result, [1, widths[0], widths[-1]], start=510, count=16)
    assert first == last
    assert (one == first) == (widths[0] == 1)


def test_config_decides_what_is_tried(model: Path) -> None:
    """Fixed settings are the only ones tried; `auto` tries both and never takes an inexact one over an exact one."""
    fixed = measure(model)
    assert [tried["flash_attention"] for tried in fixed.profile.evidence["tried"]] == [False]
    auto = measure(model, LlamaCppConfig(prefill_rows=64))
    tried = {(one["extra_buffers"], one["flash_attention"]) for one in auto.profile.evidence["tried"]}
    assert {(False, False), (True, False)} <= tried
    assert any(flash for _, flash in tried)
    assert auto.profile.level is fixed.profile.level


def test_inexact_flash_attention_is_never_worth_its_speed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to the probe, fused attention that is not one class is given up at once, however fast it is."""
    child = probe._child

    def answer(asked: probe_child.ProbeTask, timeout: float):
        result = child(asked, timeout)
        for width in result.get("widths", {}).values():
            width["ms"] *= 0.01 if asked.flash_attention else 1
            width["rows"] |= {key: f"single {key}" for key in width["rows"] if width is result["widths"]["1"]}
        return result

    monkeypatch.setattr(probe, "_child", answer)
    # two threads: with one, the fused kernel does not split a single row's work and is one class
    result = measure(model, LlamaCppConfig(extra_buffers=Choice.OFF, prefill_rows=64), threads=2)
    assert result.profile.level is ExactnessLevel.PADDED
    assert not result.settings.flash_attention


def test_quantized_cache_needs_flash_attention(tmp_path: Path) -> None:
    """A quantized cache takes the fused kernel; to switch that off as well is a contradiction."""
    model = tiny_llama(tmp_path / "t.gguf", hidden_size=128)  # heads of 32 values, a block of the cache type
    result = measure(model, LlamaCppConfig(kv_type=KvType.Q8_0, extra_buffers=Choice.OFF, prefill_rows=64))
    assert result.settings.flash_attention
    with pytest.raises(ConfigError, match="needs flash attention"):
        measure(model, LlamaCppConfig(kv_type=KvType.Q8_0, flash_attention=Choice.OFF))


def test_known_results_start_no_child(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start reads the same result from the cache; another thread count is another question."""
    first = measure(model)
    monkeypatch.setattr(subprocess, "run", no_children)
    again = measure(model, max_rows=3)  # within what was measured
    assert again == first
    assert again.profile.mixable == first.profile.mixable
    with pytest.raises(AssertionError, match="child"):
        measure(model, threads=2)
    with pytest.raises(AssertionError, match="child"):
        measure(tiny_llama(model, seed=1))


def test_doctor_can_have_it_measured_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where documents of this kind are found again, children are started, though the result is kept."""
    first = measure(model)
    with user_cache.found_again(user_cache.PROBES):
        again = measure(model)
        monkeypatch.setattr(subprocess, "run", no_children)
        with pytest.raises(AssertionError, match="child"):
            measure(model)
    assert again.profile.decode.identity == first.profile.decode.identity
    assert measure(model) == again  # what is kept now


@pytest.mark.parametrize("damage", ["{", '{"content": {}, "sha256": ""}'])
def test_damaged_cache_is_a_miss(damage: str, model: Path, cache_dir: Path) -> None:
    """A damaged cache file leads to a new measurement with the same classes."""
    first = measure(model)
    (kept,) = (cache_dir / "probes").iterdir()
    kept.write_text(damage)
    again = measure(model)
    assert again.profile.decode.identity == first.profile.decode.identity
    assert again.profile.decode.widths == first.profile.decode.widths
    assert json.loads(kept.read_text())["content"]["level"] == first.profile.level


def test_cache_directory_of_the_configuration(model: Path, tmp_path: Path) -> None:
    """`probe_cache_dir` takes the place of the user's cache directory."""
    measure(model, LlamaCppConfig(Choice.OFF, Choice.OFF, prefill_rows=64, probe_cache_dir=tmp_path / "mine"))
    assert list((tmp_path / "mine" / "probes").iterdir())


def test_death_of_every_child_is_one_error(model: Path, tmp_path: Path) -> None:
    """A file that llama.cpp aborts on kills the child only, and the signal is named."""
    deadly = tiny_llama(tmp_path / "deadly.gguf", overrides={"llama.block_count": 0})
    with pytest.raises(BackendError, match="died of SIGABRT") as caught:
        probe.measure(deadly, check_gguf(model), config=PLAIN, threads=1, max_rows=16)
    assert "\n" not in str(caught.value)
    assert caught.value.fix


def test_refusal_of_the_library_is_passed_on(model: Path, tmp_path: Path) -> None:
    """What llama.cpp itself refuses is an error with its reason, told once though every setting meets it."""
    broken = tiny_llama(tmp_path / "broken.gguf", omit={"blk.0.attn_q.weight"})
    with pytest.raises(BackendError, match="attn_q") as caught:
        probe.measure(broken, check_gguf(model), config=LlamaCppConfig(), threads=1, max_rows=16)
    assert len(caught.value.got) > 1
    assert str(caught.value).count("attn_q") == 1


def test_child_that_hangs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that does not answer in time is ended and counts as a no."""
    monkeypatch.setattr(probe, "_TIMEOUT_S", 0.01)
    with pytest.raises(BackendError, match="no answer within"):
        measure(model)


def test_what_a_busy_machine_left_open_is_not_remembered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that was too slow says nothing of the settings: the level is not promised now, and measured next time."""
    child, is_busy = probe._child, True

    def slow(task: probe.ProbeTask, timeout: float) -> dict:
        if is_busy and task.chunks:
            raise subprocess.TimeoutExpired("child", timeout)
        return child(task, timeout)

    monkeypatch.setattr(probe, "_child", slow)
    assert measure(model).profile.level is ExactnessLevel.UNVERIFIED
    is_busy = False
    assert measure(model).profile.level is ExactnessLevel.BITWISE


def test_identity_is_the_numeric_path(model: Path) -> None:
    """Measuring further widths does not change what a class is; other weights do."""
    narrow, wide = measure(model), measure(model, max_rows=20)
    assert wide.profile.decode.max_rows == 20
    assert wide.profile.decode.identity == narrow.profile.decode.identity
    other = measure(tiny_llama(model, seed=1))
    assert other.profile.decode.identity != narrow.profile.decode.identity


def task(path: Path, **changes) -> probe_child.ProbeTask:
    facts = {
        "path": str(path), "extra_buffers": False, "flash_attention": False, "kv_type": "f16", "swa_full": True,
        "rollback_rows": 0, "threads": 1, "batch_rows": 256, "widest": 16, "widths": list(range(1, 17)),
    }  # fmt: skip
    return probe_child.ProbeTask(**{**facts, **changes})


def disturb(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Let *change*(rows, logits) edit a copy of every decode's logits."""
    decode = NativeContext.decode

    def disturbed(context: NativeContext, rows: int):
        logits = decode(context, rows).copy()
        change(rows, logits)
        return logits

    monkeypatch.setattr(NativeContext, "decode", disturbed)


def measured_here(path: Path) -> Measurement:
    return Measurement.of(ProbeSettings(False, False), probe_child.run_task(task(path)))


def test_smallest_difference_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One last bit of one logit, from 5 rows on, splits a class between 4 and 5."""

    def last_bit(rows: int, logits) -> None:
        if rows >= 5:
            logits[:, 100] = np.nextafter(logits[:, 100], np.float32(np.inf))

    whole = measured_here(model)
    disturb(monkeypatch, last_bit)
    split = measured_here(model)
    assert any({4, 5} <= set(widths) for widths in width_classes(whole))
    assert not any(min(widths) < 5 <= max(widths) for widths in width_classes(split))
    assert all(split.stable.values())
    assert max(split.difference.values()) > 0


def test_library_that_does_not_repeat_itself(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that differ from run to run are unstable at every width, and nothing is promised."""
    noise = iter(range(10**6))

    def drift(rows: int, logits) -> None:
        logits += np.float32(1e-4) * next(noise)

    disturb(monkeypatch, drift)
    assert not any(measured_here(model).stable.values())


def test_chunks_that_disagree_are_left_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt chunks count up to the last size that agrees with decode forwards."""

    def wide_is_different(rows: int, logits) -> None:
        if rows > 40:
            logits += np.float32(1e-3)

    chunks = [17, 33, 64]
    whole = probe_child.run_task(task(model, chunks=chunks))
    disturb(monkeypatch, wide_is_different)
    assert whole == {"agreeing": 64, "steady": True}
    assert probe_child.run_task(task(model, chunks=chunks)) == {"agreeing": 33, "steady": True}


def test_rare_rounding_of_a_rest_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repacked weights whose rest rows differ for one input in ten are not called steady."""
    class_task = task(model, extra_buffers=True, chunks=[17])
    undisturbed = probe_child.run_task(class_task)["steady"]

    def rare(rows: int, logits) -> None:
        rest = logits[rows - rows % 4 :] if len(logits) == rows > 4 else logits[:0]
        rest[:, 100] += np.where(rest[:, 7] > np.quantile(rest, 0.9), np.float32(1e-3), 0) if len(rest) else 0

    disturb(monkeypatch, rare)
    assert undisturbed
    assert not probe_child.run_task(class_task)["steady"]
