"""The forward pass against llama.cpp on files of plain float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from power_torch.config import TorchConfig
from power_torch.drafting import load_backbone
from power_torch.linear import make_linear
from power_torch.target import TorchBackend
from torch.nn import functional

from power_core.artifacts.gguf import GgufFile, StringArray
from power_core.errors import BackendError, CapabilityError, ConfigError
from power_core.target import RowBatch, SessionOptions
from power_core.testing import gguf_writer as writer
from power_core.testing.profiles import one_class

Logits = NDArray[np.float32]
TEXT = 60  # past the tiny gemma3's window of 32


def llamacpp_logits(path: Path, tokens: list[int]) -> Logits:
    """float32[len(tokens), vocab] as llama.cpp computes them with no half precision in attention."""
    pytest.importorskip("power_llamacpp", reason="pip install power-llamacpp")
    from power_llamacpp.config import LlamaCppConfig
    from power_llamacpp.gguf_check import check_gguf
    from power_llamacpp.target import LlamaCppModel

    config = LlamaCppConfig(kv_type="f32", flash_attention="off", extra_buffers="off")
    options = SessionOptions(context_size=128, max_rows=8, threads=1)
    # Rounding is far below what is compared here, so that widths need not be measured.
    model = LlamaCppModel(path, check_gguf(path), config, profile=one_class()(options))
    try:
        session = model.open_session(options)
        session.open(0)
        batch, rows = RowBatch(8), []
        for start in range(0, len(tokens), 4):
            batch.clear()
            batch.add_chain(0, start, tokens[start : start + 4], 4)
            result = session.forward(batch, session.profile.decode)
            rows += [result.logits(i).copy() for i in range(4)]
        return np.stack(rows)
    finally:
        model.close()


def float32_file(source: Path, path: Path) -> Path:
    """A copy of the GGUF file *source* whose tensors are all float32, dequantized."""
    file, copy = GgufFile.open(source), writer.GgufFile("", 0, "F32")
    for key, value in file.metadata.items():
        if isinstance(value, np.ndarray):
            value = value.tolist()
        copy.metadata[key] = list(value) if isinstance(value, StringArray) else value
    for name in file.tensors:
        copy.plain(name, file.read(name))
    return copy.write(path, None, ())


def half_gelu(x: torch.Tensor) -> torch.Tensor:
    """llama.cpp's GELU: looked up in a table from half precision to half precision."""
    return functional.gelu(x.half().float(), approximate="tanh").half().float()


# Where a last-bit difference crosses a step of llama.cpp's table, the two sides look up neighbouring entries.
@pytest.mark.parametrize(("architecture", "tolerance"), [("llama", 1e-3), ("qwen3", 1e-3), ("gemma3", 3e-3)])
def test_logits_are_those_of_llamacpp(
    architecture: str,
    tolerance: float,
    tiny: Callable[[str], Path],
    model: Any,
    open_session: Any,
    feed: Any,
    words: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every row of a text that is longer than the window agrees, once both compute the same GELU."""
    monkeypatch.setattr("power_torch.network._gelu", half_gelu)
    text = words(1, TEXT)
    expected = llamacpp_logits(tiny(architecture), text)
    session = open_session(model(architecture), hidden_layers=(0,))
    session.open(0)
    logits = feed(session, 0, text)
    difference = np.abs(logits - expected)
    assert difference.max() < tolerance
    assert np.median(difference.max(axis=1)) < 1e-3
    assert np.array_equal(logits.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_in_float32_is_that_of_llamacpp(smollm2: Path, open_session: Any, feed: Any, tmp_path: Path) -> None:
    """The dequantized file: logits of a text and of what follows it greedily agree, and so every greedy token."""
    path = float32_file(smollm2, tmp_path / "float32.gguf")
    model = TorchBackend(TorchConfig(dtype="fp32", prefill_rows=16)).load(path)
    session = open_session(model)
    session.open(0)
    text = model.tokenizer.encode("The old lighthouse keeper climbed the stairs every evening, and the lamp")
    rows = [*feed(session, 0, text)]
    while (len(text) + 1) % 4 or len(text) < 75:  # the other side evaluates fours
        text.append(int(rows[-1].argmax()))
        rows += [*feed(session, 0, text[-1:])]
    model.close()
    expected = llamacpp_logits(path, [*text, int(rows[-1].argmax())])[: len(text)]
    difference = np.abs(np.stack(rows) - expected)
    print(f"largest logit {np.abs(expected).max():.1f}, largest difference {difference.max():.2e}")
    assert difference.max() < 1e-3
    assert np.array_equal(np.argmax(rows, axis=1), expected.argmax(axis=1))


def test_a_folder_decodes_as_its_gguf_file(
    tiny: Callable[[str], Path],
    model: Any,
    open_session: Any,
    feed: Any,
    words: Any,
    write_folder: Any,
    write_tokenizer: Any,
    tmp_path: Path,
) -> None:
    """Safetensors and `tokenizer.json` give the ids and, bit for bit, the logits of their GGUF file."""
    from power_torch.weights import load_weights

    folder = write_folder(tmp_path / "model", load_weights(tiny("llama")))
    write_tokenizer(folder, tiny("llama"))
    first = model("llama", prefill_rows=32)
    second = TorchBackend(TorchConfig(dtype="fp32", prefill_rows=32)).load(folder)
    text = "The quick brown fox <|im_end|> jumps, again\n\n  and 123 times."
    ids = first.tokenizer.encode(text)
    assert second.tokenizer.encode(text) == ids
    assert b"".join(map(second.tokenizer.token_bytes, ids)).decode() == text
    assert second.tokenizer.end_ids == {0, 2}
    results = []
    for each in (first, second):
        session = open_session(each)
        session.open(0)
        results.append(feed(session, 0, ids))
    second.close()
    assert np.array_equal(*results)
    assert first.identity.file_sha256 != second.identity.file_sha256


def test_hidden_states_are_block_outputs(model: Any, open_session: Any, words: Any) -> None:
    """The last block's rows give the logits through final norm and output matrix; slices and rows agree."""
    loaded = model("llama")
    session = open_session(loaded, hidden_layers=(0, 1))
    session.open(0)
    batch = RowBatch(8)
    batch.add_chain(0, 0, words(2, 6), 6)
    rows = session.forward(batch, session.profile.decode)
    last = rows.hidden(slice(0, 6), 1)
    norm = loaded._weights().output_norm.numpy()
    normed = last / np.sqrt((last**2).mean(-1, keepdims=True) + 1e-6) * norm
    expected = normed @ loaded.matrix("output").T
    assert np.allclose(expected, np.stack([rows.logits(i) for i in range(6)]), atol=1e-4)
    assert np.array_equal(rows.hidden(3, 0), rows.hidden(slice(2, 5), 0)[1])
    assert not rows.hidden(0, 0).flags.writeable
    with pytest.raises(CapabilityError, match="was not kept"):
        open_session(loaded).open(0) or rows.hidden(0, 7)
    with pytest.raises(BackendError, match="there is no row 6"):
        rows.hidden(6, 0)


def test_options_that_cannot_be_served(model: Any, open_session: Any) -> None:
    """Bounds are checked before anything is allocated, and the error names the key to change."""
    loaded = model("llama")
    for options, kind, found in (
        ({"context_size": 4096}, ConfigError, "set another ctx"),
        ({"max_sequences": 0}, ConfigError, "set another parallel"),
        ({"max_sequences": 9}, ConfigError, "a row for each of 9 sequences"),
        ({"max_rows": 2000}, ConfigError, "set another spec_draft_max"),
        ({"threads": 1000}, ConfigError, "set another threads"),
        ({"hidden_layers": (2,)}, CapabilityError, "there is no block 2"),
        ({"hidden_layers": (-1,)}, CapabilityError, "there is no block -1"),
    ):
        with pytest.raises(kind, match=found):
            open_session(loaded, **options)


def test_a_device_that_is_not_there(model: Any) -> None:
    """CUDA is an option: where there is none, asking for it is one line that says so."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        model("llama", device="cuda")
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        load_backbone(None, None, device="cuda:0")  # a drafter's device; nothing is read before
    with pytest.raises(ConfigError, match="expected cpu, cuda or cuda:N"):
        model("llama", device="tpu")


def test_a_processor_without_bf16_computes_in_float32(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless bf16 is asked for, which works there and which doctor advises against."""
    monkeypatch.setattr("power_torch.device._cpu_has_bf16", lambda: False)
    monkeypatch.setattr("power_torch.linear.has_packed_kernels", lambda: False)
    assert model("llama", dtype="auto").dtype is torch.float32
    assert "advice" not in model("llama", dtype="auto").facts()
    emulated = model("llama", dtype="bf16")
    assert "bf16 is emulated here" in emulated.facts()["advice"][0]
    linear = make_linear(torch.ones((4, 8), dtype=torch.bfloat16))
    assert linear(torch.ones((3, 8), dtype=torch.bfloat16)).tolist() == [[8.0] * 4] * 3
    monkeypatch.setattr("power_torch.device._cpu_has_bf16", lambda: True)
    assert model("llama", dtype="auto").dtype is torch.bfloat16
    assert "advice" not in emulated.facts()


def test_shared_matrices_are_kept_and_read_only(model: Any, tmp_path: Path) -> None:
    """`matrix` gives one array again and again; tied matrices are one; a closed model gives none."""

    from power_core.target import SharedWeights
    from power_core.testing import gguf

    loaded = model("llama", dtype="bf16")
    assert isinstance(loaded, SharedWeights)
    matrix = loaded.matrix("token_embd")
    assert matrix.dtype == np.float32
    assert matrix.shape == (320, 64)
    assert loaded.matrix("token_embd") is matrix
    assert not np.array_equal(loaded.matrix("output"), matrix)
    with pytest.raises(ValueError, match="read-only"):
        matrix[0, 0] = 1
    tied = TorchBackend(TorchConfig(dtype="fp32")).load(gguf.tiny_llama(tmp_path / "t.gguf", omit=["output.weight"]))
    assert tied.matrix("output") is tied.matrix("token_embd")
    tied.close()
    with pytest.raises(BackendError, match="the model is closed"):
        tied.matrix("output")
