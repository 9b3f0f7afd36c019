"""Refusing bad adapters: one clear error, before llama.cpp sees the file."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from power_llamacpp.config import LlamaCppConfig, LoraFile
from power_llamacpp.gguf_check import check_gguf
from power_llamacpp.gguf_file import read_gguf
from power_llamacpp.lora import check_lora
from power_llamacpp.target import LlamaCppBackend

from power_core.config import PowerConfig
from power_core.errors import ArtifactError, ConfigError, PowerError
from power_core.plugins import load_plugins
from power_core.target import SessionOptions
from power_core.testing.gguf import tiny_hybrid, tiny_llama
from power_core.testing.gguf_lora import tiny_lora

pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")

Q, EMBEDDING = "blk.0.attn_q.weight", "token_embd.weight"
ALPHA = "adapter.lora.alpha"


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


def load(target: Path, *adapters: LoraFile) -> Any:
    return LlamaCppBackend(LlamaCppConfig(lora=adapters)).load(target)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    return {
        "llama": tiny_llama(folder / "llama.gguf"),
        "tied": tiny_llama(folder / "tied.gguf", omit=["output.weight"]),
        "hybrid": tiny_hybrid(folder / "hybrid.gguf", nextn_layers=1),
    }


@pytest.fixture
def no_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("power_llamacpp.target.NativeModel", lambda *_, **__: pytest.fail("native code"))


@pytest.mark.parametrize("weights", ["F32", "F16", "BF16", "Q8_0"])
def test_sound_adapters_pass(targets: dict[str, Path], tmp_path: Path, weights: str) -> None:
    """Of every type that the converter writes; what is recorded of one is its digest and its scale."""
    path = tiny_lora(tmp_path / "a.gguf", rank=32, weights=weights, shapes={Q: (64, 64), EMBEDDING: (320, 64)})
    model = load(targets["llama"], LoraFile(path, 0.5))
    [adapter] = model.adapters
    assert adapter.identity in model.identity.adapters
    assert model.facts()["lora"] == {adapter.sha256[:12]: "a.gguf * 0.5"}
    model.close()


# What is wrong with an otherwise good adapter for `tiny_llama`, and what is said of it.
DEADLY = {  # llama.cpp ends the process
    "key type": ({"overrides": {"general.type": 8}}, "general.type is 8 .expected 'adapter'"),
    "alpha type": ({"overrides": {ALPHA: 8}}, "adapter.lora.alpha is of type u32"),
    "integers": ({"replace": {f"{Q}.lora_a": zeros(4, 64, dtype=np.int32)}}, "attn_q.weight.lora_a is I32"),
    "doubles": ({"replace": {f"{Q}.lora_b": zeros(64, 4, dtype=np.float64)}}, "attn_q.weight.lora_b is F64"),
    "three sizes": ({"replace": {f"{Q}.lora_b": zeros(2, 64, 4)}}, r"lora_b has shape \(2, 64, 4\)"),
    "embedding's rank": (
        {"shapes": {EMBEDDING: (320, 64)}, "replace": {f"{EMBEDDING}.lora_b": zeros(64, 8)}},
        r"token_embd.weight.lora_b has shape \(64, 8\) .expected \(64, 4\)",
    ),
    "tied": ({"target": "tied", "shapes": {EMBEDDING: (320, 64)}}, "is the target's output matrix as well"),
}
SILENT = {  # llama.cpp computes something else
    "nan": ({"replace": {f"{Q}.lora_a": np.full((4, 64), np.nan, np.float32)}}, "not finite, at index 0"),
    "infinite scale": ({"scale": 3e38}, "a scale of 3e.38 with adapter.lora.alpha = 8.0 is no finite factor"),
    "no alpha": ({"overrides": {ALPHA: None}}, "the key adapter.lora.alpha is missing"),
    "zero alpha": ({"overrides": {ALPHA: 0.0}}, "adapter.lora.alpha is 0.0 .expected a finite number above 0"),
    "nan alpha": ({"overrides": {ALPHA: float("nan")}}, "adapter.lora.alpha is nan"),
    "norm": ({"replace": {"blk.0.attn_norm.weight": np.ones(64, np.float32)}}, "replaces a norm, which llama.cpp"),
    "pair for a norm": ({"shapes": {"blk.0.attn_norm.weight": (1, 64)}}, "llama.cpp adapts blk.0.attn_norm.weight"),
    "empty": ({"shapes": {}}, "the file has no tensors"),
    "activated": (
        {"overrides": {"adapter.alora.invocation_tokens": [1, 2]}},
        "adapter.alora.invocation_tokens makes it an activated LoRA",
    ),
    "unknown key": ({"overrides": {"adapter.lora.magnitude": 1.0}}, "the key adapter.lora.magnitude is unknown"),
}
REFUSED = {  # llama.cpp says so, too
    "no adapter": ({"overrides": {"general.type": "model"}}, "general.type is 'model'"),
    "untyped": ({"overrides": {"adapter.type": None}}, "the key adapter.type is missing"),
    "control vector": ({"overrides": {"adapter.type": "cvec"}}, "adapter.type is 'cvec' .expected 'lora'"),
    "architecture": ({"architecture": "gemma3"}, "is for architecture 'gemma3' .expected the target's 'llama'"),
    "half a pair": ({"omit": [f"{Q}.lora_b"]}, "the tensor blk.0.attn_q.weight.lora_b is missing"),
    "other half": ({"omit": [f"{Q}.lora_a"]}, "the tensor blk.0.attn_q.weight.lora_a is missing"),
    "pair of a pair": ({"replace": {f"{Q}.lora_b.lora_a": zeros(4, 64)}}, "attn_q.weight.lora_b is unknown"),
    "stray tensor": ({"replace": {"x.weight": zeros(4)}}, "tensor x.weight is unknown"),
    "stray block": ({"shapes": {"blk.2.attn_q.weight": (64, 64)}}, "the target has no tensor blk.2.attn_q.weight"),
    "inputs": ({"shapes": {Q: (64, 32)}}, r"lora_a has shape \(4, 32\) .expected \(4, 64\)"),
    "outputs": ({"shapes": {Q: (32, 64)}}, r"lora_b has shape \(32, 4\) .expected \(64, 4\)"),
    "ranks": ({"replace": {f"{Q}.lora_b": zeros(64, 8)}}, r"lora_b has shape \(64, 8\) .expected \(64, 4\)"),
    "part of several": ({"overrides": {"split.count": 2}}, "the file is one of 2 parts"),
    "prediction layer": (
        {"target": "hybrid", "architecture": "qwen35", "shapes": {"blk.4.attn_q.weight": (128, 64)}},
        "blk.4.attn_q.weight belongs to a prediction layer .expected blocks 0 to 3",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("no_native_code")
@pytest.mark.parametrize("name", [*DEADLY, *SILENT, *REFUSED])
def test_bad_adapters_never_reach_native_code(targets: dict[str, Path], tmp_path: Path, name: str) -> None:
    """One line: the file, what was found, what was expected and what to do; also with a scale of 0."""
    made, message = (DEADLY | SILENT | REFUSED)[name]
    made = dict(made)
    target, scale = targets[made.pop("target", "llama")], made.pop("scale", 1.0)
    path = tiny_lora(tmp_path / "bad.gguf", **made)
    for each in (scale, 0.0) if scale == 1.0 else (scale,):
        with pytest.raises(ArtifactError, match=message) as caught:
            load(target, LoraFile(path, each))
        assert str(caught.value).startswith(f"plugin 'llamacpp': {path}: ")
        assert "\n" not in str(caught.value)
        assert caught.value.fix


def test_architectures_whose_graphs_leave_adapters_out(targets: dict[str, Path], tmp_path: Path) -> None:
    """Some multiply their matrices without a look at adapters: where that was not read, none are taken."""
    path = tiny_lora(tmp_path / "a.gguf", architecture="deepseek2")
    with pytest.raises(ArtifactError, match="may leave out adapters of architecture 'deepseek2'"):
        check_lora(read_gguf(path), evolve(check_gguf(targets["llama"]), architecture="deepseek2"), 1.0)


@pytest.mark.usefixtures("no_native_code")
def test_an_adapter_in_the_place_of_the_model_is_told_its_own(tmp_path: Path) -> None:
    """It says what the file is and where it belongs, not which of a model's keys it lacks."""
    with pytest.raises(ArtifactError, match=r"the file is an adapter .*under lora in \[plugin\.llamacpp\]"):
        load(tiny_lora(tmp_path / "lora.gguf"))


@pytest.mark.usefixtures("no_native_code")
def test_files_that_are_no_gguf_are_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    """A missing file, a folder, another format, the target itself."""
    (tmp_path / "text.gguf").write_text("hello")
    for path in (tmp_path / "none.gguf", tmp_path, tmp_path / "text.gguf", targets["llama"]):
        with pytest.raises(ArtifactError) as caught:
            load(targets["llama"], LoraFile(path))
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(("value", "message"), [
    ("a.gguf", "lora is 'a.gguf' .expected a list of tables such as"),
    (["a.gguf"], r"lora\[0\] is 'a.gguf' .expected a list of tables such as"),
    ([{"scale": 1.0}], r"lora\[0\] is .'scale': 1.0. .expected a list of tables such as"),
    ([{"file": "a"}, {"file": "b", "scal": 2}], r"lora\[1\]: unknown key 'scal'.*; did you mean 'scale'"),
    ([{"file": "a", "scale": "1"}], r"lora\[0\]: scale is '1' .expected a number"),
    ([{"file": 3}], r"lora\[0\]: file is 3 .expected a path"),
    ([{"file": "a", "scale": float("nan")}], r"lora\[0\]: scale is nan .expected a finite number of single"),
    ([{"file": "a", "scale": 1e39}], r"lora\[0\]: scale is 1e.39"),
    ([{"file": name} for name in "abc"], "lora has 3 adapters with a scale other than 0 .expected at most 2"),
])  # fmt: skip
def test_settings_that_make_no_sense(value: Any, message: str) -> None:
    """The error names the entry and the key, before any file is looked at."""
    config = PowerConfig(sections={"llamacpp": {"lora": value}})
    with pytest.raises(ConfigError, match=message) as caught:
        config.plugin(load_plugins(environ={}).registry.targets.get("llamacpp"))
    assert "\n" not in str(caught.value)


def test_one_adapter_twice_is_a_mistake(targets: dict[str, Path], tmp_path: Path) -> None:
    """By content: llama.cpp would add it twice."""
    one, copy = tiny_lora(tmp_path / "a.gguf"), tiny_lora(tmp_path / "b.gguf")
    with pytest.raises(ConfigError, match="one adapter twice"):
        load(targets["llama"], LoraFile(one), LoraFile(copy))
    model = load(targets["llama"], LoraFile(one), LoraFile(copy, 0.0), LoraFile(tiny_lora(tmp_path / "c.gguf", seed=1)))
    assert [adapter.path.name for adapter in model.adapters] == ["a.gguf", "c.gguf"]
    model.close()


# Checks each file, and uses what is accepted, in a process of its own; prints how many were, and what died.
CHILD = """
import os, sys
from pathlib import Path
import numpy as np
from power_core.errors import PowerError
from power_llamacpp.config import LoraFile
from power_llamacpp.context import ContextSettings, NativeContext, NativeModel
from power_llamacpp.gguf_check import check_gguf
from power_llamacpp.lora import open_adapters
from power_llamacpp.native import library
library()
target, accepted = Path(sys.argv[1]), 0
info = check_gguf(target)
for path in sorted(Path(sys.argv[2]).iterdir()):
    try:
        open_adapters([LoraFile(path)], info)
    except PowerError:
        continue
    accepted += 1
    if not (child := os.fork()):
        model = NativeModel(target, adapters=[(path, 1.0)])
        context = NativeContext(model, ContextSettings(context_size=16, batch_rows=8))
        context.batch.tokens[:4], context.batch.positions[:4], context.batch.outputs[:4] = 5, range(4), 1
        os._exit(0 if np.isfinite(context.decode(4)).all() else 9)
    status = os.waitpid(child, 0)[1]
    if status:
        print(path.name, status)
print("accepted", accepted)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process for each file needs fork")
def test_damaged_files_are_refused_or_harmless(targets: dict[str, Path], tmp_path: Path) -> None:
    """Bits flipped in the header, and cuts: what is accepted decodes to finite logits."""
    data = tiny_lora(tmp_path / "good.gguf", shapes={Q: (64, 64)}).read_bytes()
    folder, draw = tmp_path / "damaged", random.Random(1)
    folder.mkdir()
    header = data.index(b"lora_b") + 40
    for n in range(150):
        damaged = bytearray(data)
        damaged[draw.randrange(header)] ^= 1 << draw.randrange(8)
        (folder / f"flip{n}").write_bytes(damaged)
    for n in range(10):
        (folder / f"cut{n}").write_bytes(data[: draw.randrange(len(data))])
    (folder / "good").write_bytes(data)
    command = [sys.executable, "-c", CHILD, str(targets["llama"]), str(folder)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr
    [*died, summary] = child.stdout.splitlines()
    assert died == []
    assert 1 <= int(summary.split()[1]) < 100


def test_a_file_that_changed_since_is_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    """Between the check and the first session: llama.cpp would read what nobody has checked."""
    path = tiny_lora(tmp_path / "a.gguf")
    model = load(targets["llama"], LoraFile(path))
    tiny_lora(path, seed=4, rank=8)
    with pytest.raises(PowerError, match="changed after it was opened"):
        model.open_session(SessionOptions(threads=1))
    model.close()
