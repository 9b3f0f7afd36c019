"""Writing a drafter: safetensors with a config.json, or GGUF in floats or quantized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

from power_core.types import JSON
from power_train.drafter_file import MTP, Drafter, Settings, gguf_name, published_name

__all__ = ["Quantization", "write_gguf", "write_safetensors"]

_BLOCK = 32  # values of one quantized block; rows of other lengths stay floats


class Quantization(StrEnum):
    """
    How a GGUF's matrices are stored. Norms and small vectors are F32 in all of them.

    `q4mix` holds the output matrix, the feed-forward, and the Markov and selector tables in 4 bits, attention and the
    fusion of the target's features in 5. Measured on an MTP head for SmolLM2-135M, tokens a target pass at K = 7:
    1.79 in floats, 1.78 to 1.79 in any mix of 4, 5 and 8 bits.
    """

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"
    Q4MIX = "q4mix"


_MIX = {
    "output": GGMLQuantizationType.Q4_0,
    "token_embd": GGMLQuantizationType.Q4_0,
    "markov_w1": GGMLQuantizationType.Q4_0,
    "markov_w2": GGMLQuantizationType.Q4_0,
    "predecessor": GGMLQuantizationType.Q4_0,
    "successor": GGMLQuantizationType.Q4_0,
    **dict.fromkeys(("fc", "feature_fc", "q", "k", "v", "o"), GGMLQuantizationType.Q5_0),
    "gate": GGMLQuantizationType.Q4_0,
    "up": GGMLQuantizationType.Q4_0,
    "down": GGMLQuantizationType.Q4_0,
}
_PLAIN = ("attn_conv_base", "ffn_conv_base", "confidence")  # kernels read these as floats whatever they are


def write_safetensors(folder: Path, drafter: Drafter) -> Path:
    """
    Write ``model.safetensors`` (matrices F16, vectors F32) and ``config.json`` into *folder*.

    Returns:
        The path of the former.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = drafter.settings.kind
    tensors = {published_name(name, kind): _half(name, value) for name, value in drafter.tensors.items()}
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.dumps(_config(drafter.settings, drafter.tensors), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
    return path


def _half(name: str, value: NDArray[np.generic]) -> NDArray[np.generic]:
    is_plain = value.ndim < 2 or value.dtype.kind != "f" or name.split(".")[-1] in _PLAIN
    return np.ascontiguousarray(value if is_plain else value.astype(np.float16))


def _config(settings: Settings, tensors: Mapping[str, NDArray[np.generic]]) -> dict[str, JSON]:
    sizes: dict[str, JSON] = {
        "hidden_size": settings.hidden, "intermediate_size": settings.ffn, "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads, "head_dim": settings.head_dim, "rms_norm_eps": settings.epsilon,
        "rope_theta": settings.rope_base, "vocab_size": settings.vocab, "max_position_embeddings": settings.context,
    }  # fmt: skip
    layers = list(settings.layers)
    digest = {"tokenizer_sha256": settings.tokenizer_sha256} if settings.tokenizer_sha256 else {}
    if settings.kind == MTP:
        passes = {"trained_steps": settings.block_size} if settings.block_size else {}
        return {"model_type": MTP, **sizes, "target_layer_ids": layers, **passes, **digest}
    sizes |= {"num_hidden_layers": settings.blocks, "block_size": settings.block_size, "is_causal": False}
    if settings.kind == "dspark":
        rank = int(tensors["markov_w1"].shape[1])
        reduced = {"draft_vocab_size": len(tensors["d2t"])} if "d2t" in tensors else {}
        return {
            "architectures": ["Qwen3DSparkModel"], **sizes, **reduced, "target_layer_ids": layers,
            "mask_token_id": settings.mask_id, "markov_rank": rank, "markov_head_type": "vanilla",
            "enable_confidence_head": settings.has_confidence, "sample_from_anchor": settings.from_anchor,
            **{f"power.{key}": value for key, value in digest.items()},
        }  # fmt: skip
    table: dict[str, JSON] = {"target_layer_ids": layers, "mask_token_id": settings.mask_id}
    if settings.kind == "dflash2":
        table |= {
            "conv_kernel_size": settings.kernel, "conv_group_size": settings.group,
            "selector_rank": settings.rank, "selector_top_k": settings.top_k,
        }  # fmt: skip
    name = "DFlash2DraftModel" if settings.kind == "dflash2" else "DFlashDraftModel"
    return {"architectures": [name], **sizes, "dflash_config": table, **digest}


def write_gguf(path: Path, drafter: Drafter, quantization: Quantization) -> Path:
    """Write *drafter* as one GGUF file, whole or not at all; returns *path*."""
    settings = drafter.settings
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.part")
    writer = GGUFWriter(draft, MTP if settings.kind == MTP else "dflash")
    _add_keys(writer, settings)
    for name, value in drafter.tensors.items():
        kind = _type_of(name, value, quantization)
        spelled = gguf_name(name, settings.kind)
        if kind is None:
            writer.add_tensor(spelled, np.ascontiguousarray(value))
        else:
            writer.add_tensor(spelled, quantize(value.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    draft.replace(path)
    return path


def _type_of(name: str, value: NDArray[np.generic], quantization: Quantization) -> GGMLQuantizationType | None:
    """The type a tensor is stored in; None leaves it as it is."""
    part = name.split(".")[-1]
    if value.dtype.kind != "f" or quantization is Quantization.F32 or value.ndim < 2 or part in _PLAIN:
        return None
    if quantization is Quantization.F16 or value.shape[-1] % _BLOCK:
        return GGMLQuantizationType.F16
    if quantization is Quantization.Q4MIX and part in _MIX:
        return _MIX[part]
    return GGMLQuantizationType.Q8_0


def _add_keys(writer: GGUFWriter, settings: Settings) -> None:
    prefix = MTP if settings.kind == MTP else "dflash"

    def count(key: str, value: int) -> None:
        writer.add_uint32(f"{prefix}.{key}", value)

    for key, value in (
        ("context_length", settings.context), ("embedding_length", settings.hidden), ("block_count", settings.blocks),
        ("feed_forward_length", settings.ffn), ("attention.head_count", settings.heads),
        ("attention.head_count_kv", settings.kv_heads), ("attention.key_length", settings.head_dim),
        ("attention.value_length", settings.head_dim), ("rope.dimension_count", settings.head_dim),
        ("vocab_size", settings.vocab),
    ):  # fmt: skip
        count(key, value)
    writer.add_float32(f"{prefix}.attention.layer_norm_rms_epsilon", settings.epsilon)
    writer.add_float32(f"{prefix}.rope.freq_base", settings.rope_base)
    if settings.kind == MTP:
        writer.add_array(f"{prefix}.target_layer_ids", list(settings.layers))
        if settings.block_size:
            count("trained_steps", settings.block_size)
        if settings.tokenizer_sha256:
            writer.add_string(f"{prefix}.tokenizer_sha256", settings.tokenizer_sha256)
        return
    count("block_size", settings.block_size)
    writer.add_bool(f"{prefix}.attention.causal", False)
    writer.add_array(f"{prefix}.target_layers", [layer + 1 for layer in settings.layers])  # a block's input
    writer.add_tokenizer_model("none")
    writer.add_mask_token_id(settings.mask_id)
    if settings.kind == "dspark":
        writer.add_bool(f"{prefix}.sample_from_anchor", settings.from_anchor)
        writer.add_bool(f"{prefix}.has_confidence_head", settings.has_confidence)
    if settings.kind == "dflash2":
        for key, value in (
            ("conv_kernel_size", settings.kernel), ("conv_group_size", settings.group),
            ("selector_rank", settings.rank), ("selector_top_k", settings.top_k),
        ):  # fmt: skip
            count(key, value)
    if settings.tokenizer_sha256:
        writer.add_string("power.tokenizer_sha256", settings.tokenizer_sha256)  # llama.cpp's own keys are a closed list
