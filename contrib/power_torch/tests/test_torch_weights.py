"""Weights from both layouts, and files that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from power_torch.hf_config import HfConfig
from power_torch.weights import load_weights
from safetensors.torch import load_file, save_file

from power_core.errors import ArtifactError
from power_core.testing import gguf

ARCHITECTURES = ("llama", "qwen3", "gemma3")
Tiny = Callable[[str], Path]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_layouts_give_the_same_weights(
    architecture: str, tiny: Tiny, tmp_path: Path, write_folder: Callable[..., Path]
) -> None:
    """A model written as a folder of safetensors loads as its GGUF file does: sizes, constants, every tensor."""
    from_gguf = load_weights(tiny(architecture))
    from_folder = load_weights(write_folder(tmp_path / "model", from_gguf))
    assert from_folder.hparams == from_gguf.hparams
    for a, b in zip(from_folder.blocks, from_gguf.blocks, strict=True):
        for name in ("attn_qkv", "attn_output", "ffn_gate_up", "ffn_down"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        for name in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffn_norm"):
            left, right = getattr(a, name), getattr(b, name)
            assert (left is None) == (right is None), name
            assert left is None or torch.allclose(left, right, atol=1e-6), name  # Gemma's are stored minus one
    assert torch.equal(from_folder.token_embd, from_gguf.token_embd)
    assert torch.equal(from_folder.output, from_gguf.output)


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    """A file without an output matrix uses the embedding, and holds it once."""
    weights = load_weights(gguf.tiny_llama(tmp_path / "tied.gguf", omit=["output.weight"]))
    assert weights.is_tied
    assert weights.output.data_ptr() == weights.token_embd.data_ptr()


def test_quantized_weights_are_dequantized(tmp_path: Path) -> None:
    """Q8_0 weights are those of the F32 file to within a step of their blocks."""
    exact = load_weights(gguf.tiny_llama(tmp_path / "f32.gguf"))
    coarse = load_weights(gguf.tiny_llama(tmp_path / "q8.gguf", weights="Q8_0"), torch.bfloat16)
    assert coarse.dtype is coarse.token_embd.dtype is torch.bfloat16
    assert coarse.blocks[0].attn_norm.dtype is torch.float32
    difference = (coarse.blocks[1].attn_qkv.float() - exact.blocks[1].attn_qkv).abs().max()
    assert 0 < difference < 0.02


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"omit": ["blk.1.ffn_up.weight"]}, "blk.1.ffn_up.weight is missing"),
        ({"overrides": {"llama.block_count": 1}}, "blk.1.attn_k.weight is not one of"),
        ({"overrides": {"llama.block_count": 3}}, "blk.2.attn_q.weight is missing"),
        ({"overrides": {"llama.feed_forward_length": 130}}, "ffn_gate.weight has shape"),
        ({"overrides": {"llama.attention.head_count_kv": 3}}, "4 query heads on 3 key heads"),
        ({"overrides": {"llama.attention.key_length": 15}}, "a head is 15 wide"),
        ({"overrides": {"llama.rope.dimension_count": 8}}, "rope.dimension_count is 8"),
        ({"overrides": {"llama.rope.freq_base": float("nan")}}, "rope.freq_base is nan"),
        ({"overrides": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type is 'yarn'"),
        ({"overrides": {"llama.attention.layer_norm_rms_epsilon": None}}, "layer_norm_rms_epsilon is missing"),
        ({"overrides": {"llama.expert_count": 4}}, "a mixture of experts"),
        ({"overrides": {"general.architecture": "mamba"}}, "architecture 'mamba' is not supported"),
        ({"overrides": {"tokenizer.ggml.tokens": None}}, "tokenizer.ggml.tokens is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gguf_files_that_are_refused(settings: dict[str, Any], found: str, tmp_path: Path) -> None:
    """What the forward pass would compute wrongly, or not at all, is refused in one line that names it."""
    path = gguf.tiny_llama(tmp_path / "bad.gguf", **settings)
    with pytest.raises(ArtifactError, match=r"bad\.gguf") as caught:
        load_weights(path)
    assert found in str(caught.value)


def test_a_number_that_is_not_finite_is_found(tmp_path: Path, tiny: Tiny) -> None:
    """NaN in the last value of a matrix is an error, not a token."""
    path = tmp_path / "nan.gguf"
    data = bytearray(tiny("llama").read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="not finite, at index"):
        load_weights(path)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"num_key_value_heads": 3}, "4 query heads on 3 key heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"hidden_act": "relu"}, "the activation is 'relu'"),
        ({"num_hidden_layers": 1}, "blk.1.attn_k.weight is not one of"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "the rope type is 'yarn'"),
        ({"layer_types": ["full_attention"]}, "layer_types is"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "a block is sliding_attention"),
        ({"vocab_size": 321}, "token_embd.weight has shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_folders_that_are_refused(
    config: dict[str, Any], found: str, tiny: Tiny, tmp_path: Path, write_folder: Callable[..., Path]
) -> None:
    """The same for `config.json`."""
    folder = write_folder(tmp_path / "model", load_weights(tiny("llama")), **config)
    with pytest.raises(ArtifactError) as caught:
        load_weights(folder)
    assert found in str(caught.value)


def test_tensors_of_a_folder_are_checked(tiny: Tiny, tmp_path: Path, write_folder: Callable[..., Path]) -> None:
    """A bias is refused, since the forward pass adds none; so are integers, a cut file and an empty folder."""
    folder = write_folder(tmp_path / "model", load_weights(tiny("llama")))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for extra, found in (
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, "q_proj.bias is not one of"),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.int32)}, "is I32"),
    ):
        save_file({**tensors, **extra}, file)
        with pytest.raises(ArtifactError, match=found):
            load_weights(folder)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ArtifactError, match=r"model\.safetensors: it cannot be read"):
        load_weights(folder)
    file.unlink()
    with pytest.raises(ArtifactError, match="there is no model here"):
        load_weights(folder)


def test_a_sharded_folder_is_read_through_its_index(
    tiny: Tiny, tmp_path: Path, write_folder: Callable[..., Path]
) -> None:
    """Two files and an index are one model; an index that leaves the folder is refused."""
    weights = load_weights(tiny("llama"))
    folder = write_folder(tmp_path / "model", weights)
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / part)
    whole.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: part for part, names in parts.items() for name in names}}))
    assert torch.equal(load_weights(folder).blocks[1].attn_qkv, weights.blocks[1].attn_qkv)
    index.write_text(json.dumps({"weight_map": {"x": "../model/a.safetensors"}}))
    with pytest.raises(ArtifactError, match="a file beside it"):
        load_weights(folder)


def test_llama3_frequencies(tmp_path: Path) -> None:
    """Short wavelengths keep their frequency, long ones are divided by the factor, those between are mixed."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    document = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": rope,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(document))
    factors = HfConfig(tmp_path / "config.json").hyper_parameters().rope_scaling.factors
    assert len(factors) == 64
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(8.0)
    assert list(factors) == sorted(factors)
    assert any(1.5 < factor < 7 for factor in factors)
