"""Adapters in llama.cpp: what they compute, that it is the same each time, and that nothing else is taken for it."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from power_llamacpp import probe
from power_llamacpp.config import Choice, KvType, LlamaCppConfig, LoraFile
from power_llamacpp.context import ContextSettings, NativeContext, NativeModel
from power_llamacpp.gguf_check import check_gguf
from power_llamacpp.gguf_file import read_gguf
from power_llamacpp.lora import open_adapters
from power_llamacpp.target import LlamaCppBackend
from structlog.testing import capture_logs

from power_core.errors import BackendError
from power_core.target import SessionOptions
from power_core.testing.gguf import tiny_gemma3, tiny_hybrid, tiny_llama, tiny_recurrent
from power_core.testing.gguf_lora import TINY_LLAMA_SHAPES, tiny_lora

pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")

FACTORIES = [tiny_llama, tiny_gemma3, tiny_recurrent, tiny_hybrid]
SETTINGS = ContextSettings(context_size=64, batch_rows=8, kv_type=KvType.F32)
PLAIN = LlamaCppConfig(flash_attention=Choice.OFF, extra_buffers=Choice.OFF, prefill_rows=64)
Adapt = Callable[..., LoraFile]


def logits(model: Path, *files: LoraFile, extra_buffers: bool = False) -> NDArray[np.float32]:
    """float32[8, vocab] of eight tokens, in a process's own calls."""
    weights = NativeModel(model, extra_buffers=extra_buffers, adapters=[(each.file, each.scale) for each in files])
    with NativeContext(weights, SETTINGS) as context:
        context.batch.tokens[:8] = range(40, 48)
        context.batch.positions[:8] = range(8)
        context.batch.outputs[:8] = 1
        found = context.decode(8).copy()
    weights.close()
    return found


def merged(model: Path, path: Path, files: Sequence[LoraFile]) -> Path:
    """A copy of the F32 *model* whose matrices have the adapters added, in numpy."""
    shutil.copyfile(model, path)
    target = check_gguf(path)
    for file in files:
        info = read_gguf(file.file)
        alpha = float(info.metadata["adapter.lora.alpha"])
        for name in {name.rpartition(".")[0] for name in info.tensors}:
            a, b = info.read(f"{name}.lora_a").astype(float), info.read(f"{name}.lora_b").astype(float)
            change = (b @ a if name != "token_embd.weight" else a @ b.T) * file.scale * alpha / b.shape[1]
            whole = np.memmap(path, np.float32, "r+", target.tensors[name].offset, target.tensors[name].shape)
            whole += change
            whole.flush()
    return path


@pytest.mark.parametrize("factory", FACTORIES)
def test_an_adapter_is_what_its_factors_say(factory: Any, tmp_path: Path, adapt: Adapt) -> None:
    """Every matrix of each kind of memory, two adapters with scales: as a model whose weights hold the changes."""
    model = factory(tmp_path / "m.gguf")
    one, two = adapt(tmp_path, check_gguf(model)), adapt(tmp_path, check_gguf(model), seed=8, rank=3)
    files = [one, LoraFile(two.file, -0.5)]
    assert open_adapters(files, check_gguf(model))
    expected = logits(merged(model, tmp_path / "merged.gguf", files))
    assert np.allclose(logits(model, *files), expected, rtol=1e-3, atol=2e-3)
    assert not np.allclose(logits(model), expected, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("factory", FACTORIES)
def test_no_matrix_is_left_out(factory: Any, tmp_path: Path, adapt: Adapt) -> None:
    """Each matrix that is taken changes something on its own: llama.cpp would ignore others without a word."""
    model = factory(tmp_path / "m.gguf")
    info = check_gguf(model)
    everything, plain = read_gguf(adapt(tmp_path, info).file), logits(model)
    for name in sorted({name.rpartition(".")[0] for name in everything.tensors}):
        shapes = {name: info.tensors[name].shape}
        alone = LoraFile(tiny_lora(tmp_path / "one.gguf", architecture=info.architecture, shapes=shapes))
        assert open_adapters([alone], info)
        assert not np.allclose(logits(model, alone), plain, atol=1e-4), name


def test_two_adapters_give_the_same_bits_each_time(tmp_path: Path, adapt: Adapt) -> None:
    """Wherever llama.cpp puts them in memory: it keeps them in a table by address."""
    model = tiny_llama(tmp_path / "m.gguf")
    files = [adapt(tmp_path, check_gguf(model), seed=seed, rank=seed + 3) for seed in range(2)]
    expected, held = logits(model, *files), []
    for n in range(6):
        held.append(NativeModel(model, adapters=[(files[0].file, 1.0)] * n))  # moves what comes after
        assert np.array_equal(logits(model, *files), expected)
    for weights in held:
        weights.close()
    assert not np.array_equal(logits(model, *files[::-1]), expected)  # so the order is part of what an adapter set is


def test_repacked_weights_take_adapters_in_silence(tmp_path: Path) -> None:
    """The adapter itself is not repacked, which llama.cpp says of every tensor."""
    model = tiny_llama(tmp_path / "m.gguf", hidden_size=128, weights="Q4_0")
    shapes = {name: check_gguf(model).tensors[name].shape for name in TINY_LLAMA_SHAPES}
    file = LoraFile(tiny_lora(tmp_path / "a.gguf", shapes=shapes))
    with capture_logs() as logs:
        repacked = logits(model, file, extra_buffers=True)
    assert [entry["event"] for entry in logs if "lora" in entry["event"]] == []
    assert np.allclose(repacked, logits(model, file), atol=1e-2)
    assert not np.allclose(repacked, logits(model, extra_buffers=True), atol=0.5)


def test_an_adapter_that_llamacpp_refuses_frees_the_model(tmp_path: Path) -> None:
    """One line with its reason, although it was not checked here."""
    model, other = tiny_llama(tmp_path / "m.gguf"), tiny_lora(tmp_path / "a.gguf", architecture="gemma3")
    with pytest.raises(BackendError, match=r"cannot load the adapter: .*arch mismatch"):
        NativeModel(model, adapters=[(other, 1.0)])
    gc.collect()
    assert logits(model).any()


def test_a_scale_of_zero_is_the_model_itself(tmp_path: Path) -> None:
    """The same identity, and nothing is loaded; another scale, order or file is another identity."""
    path, one, two = (
        tiny_llama(tmp_path / "m.gguf"),
        tiny_lora(tmp_path / "a.gguf"),
        tiny_lora(tmp_path / "b.gguf", seed=1),
    )
    sets = [(), [(one, 0.0)], [(one, 1e-60)], [(one, 1.0)], [(one, 0.5)], [(two, 1.0)], [(one, 1.0), (two, 1.0)],
            [(two, 1.0), (one, 1.0)]]  # fmt: skip
    models = [LlamaCppBackend(LlamaCppConfig(lora=[LoraFile(*each) for each in lora])).load(path) for lora in sets]
    identities = [model.identity for model in models]
    assert identities[0] == identities[1] == identities[2]
    assert len(set(identities)) == len({each.adapter_digests for each in identities}) == len(identities) - 2
    assert len({identity.file_sha256 for identity in identities}) == 1  # what drafters are bound to
    sizes = [model.session_bytes(SessionOptions()) for model in models]
    assert sizes[0] == sizes[1] < sizes[3] < sizes[6]
    assert sizes[3] - sizes[0] > one.stat().st_size
    for model in models:
        model.close()


class TestProbe:
    """Widths are measured with the adapters on, and kept under them."""

    @pytest.fixture(autouse=True)
    def cache_dir(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POWER_CACHE_DIR", str(tmp_path / "cache"))

    def measure(self, path: Path, *files: LoraFile) -> probe.ProbeResult:
        info = check_gguf(path)
        return probe.measure(path, info, config=PLAIN, threads=1, max_rows=16, adapters=open_adapters(files, info))

    def test_what_is_known_of_the_model_is_not_taken_for_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another adapter or scale is another question with another shape; the same again starts no child."""
        model, file = tiny_llama(tmp_path / "m.gguf"), tiny_lora(tmp_path / "a.gguf")
        sets: list[list[LoraFile]] = [[], [LoraFile(file)], [LoraFile(file, 0.5)]]
        shapes = [self.measure(model, *files).profile.decode.identity for files in sets]
        assert len(set(shapes)) == 3
        monkeypatch.setattr(probe, "_child", lambda *_: pytest.fail("a child was started"))
        assert [self.measure(model, *files).profile.decode.identity for files in sets] == shapes

    def test_children_compute_with_the_adapter(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rows they compare are those of the adapted model."""
        model, file = tiny_llama(tmp_path / "m.gguf"), tiny_lora(tmp_path / "a.gguf")
        child, rows = probe._child, []

        def answer(task: Any, timeout: float) -> Any:
            result = child(task, timeout)
            rows.extend(result["widths"]["1"]["rows"].values() if "widths" in result else [])
            return result

        monkeypatch.setattr(probe, "_child", answer)
        self.measure(model)
        plain, rows = rows, []
        self.measure(model, LoraFile(file))
        assert plain
        assert len(rows) == len(plain)
        assert not set(rows) & set(plain)
