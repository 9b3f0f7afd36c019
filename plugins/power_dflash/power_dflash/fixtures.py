"""Tiny random drafters of both kinds, for conformance runs: nothing has to be downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from power_core.artifacts import ArtifactContract, TensorFile
    from power_core.target import TargetModel

__all__ = ["published_config", "published_name", "tiny_v1", "tiny_v1_published", "tiny_v2", "tiny_v2_published"]

_TARGET_LAYERS = (1, 4)  # llama.cpp's ids: the outputs of blocks 0 and 3
_DRAFT_VOCAB = [*range(7, 300, 3), 5, 319]
_PUBLISHED = {
    "enc.output_norm": "hidden_norm", "output_norm": "norm", "output": "lm_head", "token_embd": "embed_tokens",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection", "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection", "selector_hidden": "candidate_selector.hidden_projection",
}  # fmt: skip
_CODEBOOKS = {
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
}
_CONFIG = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base", "vocab_size": "vocab_size", "block_size": "block_size",
}  # fmt: skip
_SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def tiny_v1(folder: Path) -> tuple[ArtifactContract, Path, TargetModel]:
    """A `dflash-v1` GGUF with a reduced vocabulary, and the llama it was made for."""
    from power_core.testing.gguf_drafts import tiny_dflash
    from power_dflash.artifact import BlockContract
    from power_dflash.header import DFLASH_V1

    target = _target(folder)
    path = tiny_dflash(
        folder / "drafter.gguf", target_layers=_TARGET_LAYERS, draft_vocab=_DRAFT_VOCAB, overrides=_bound(target)
    )
    return BlockContract(DFLASH_V1), path, target


def tiny_v2(folder: Path) -> tuple[ArtifactContract, Path, TargetModel]:
    """A `dflash2` GGUF, and the llama it was made for."""
    from power_core.testing.gguf_drafts import tiny_dflash2
    from power_dflash.artifact import BlockContract
    from power_dflash.header import DFLASH2

    target = _target(folder)
    path = tiny_dflash2(folder / "drafter.gguf", target_layers=_TARGET_LAYERS, overrides=_bound(target))
    return BlockContract(DFLASH2), path, target


def tiny_v1_published(folder: Path) -> tuple[ArtifactContract, Path, TargetModel]:
    """`tiny_v1` as its trainer publishes it."""
    contract, path, target = tiny_v1(folder)
    return contract, _publish(path, folder / "published", target), target


def tiny_v2_published(folder: Path) -> tuple[ArtifactContract, Path, TargetModel]:
    """`tiny_v2` as its trainer publishes it."""
    contract, path, target = tiny_v2(folder)
    return contract, _publish(path, folder / "published", target), target


def published_name(name: str) -> str:
    """
    The safetensors name of a GGUF tensor.

    >>> published_name("blk.1.attn_q.weight")
    'layers.1.self_attn.q_proj.weight'
    """
    if name in _CODEBOOKS or name == "d2t":
        return _CODEBOOKS.get(name, name)
    stem, suffix = name.removesuffix(".weight"), ".weight" if name.endswith(".weight") else ""
    prefix = ""
    if stem.startswith("blk."):
        _, layer, stem = stem.split(".")
        prefix = f"layers.{layer}."
    return prefix + _PUBLISHED.get(stem, stem) + suffix


def published_config(file: TensorFile) -> dict[str, Any]:
    """The config.json that says what the header of a GGUF drafter says."""
    meta = {key.removeprefix("dflash."): value for key, value in file.metadata.items()}
    inner = {
        "target_layer_ids": [int(i) - 1 for i in meta["target_layers"]],
        "mask_token_id": meta["tokenizer.ggml.mask_token_id"],
        **{key: meta[key] for key in _SELECTOR_KEYS if key in meta},
    }
    config = {key: meta[gguf_key] for key, gguf_key in _CONFIG.items()}
    name = "DFlash2DraftModel" if "selector_rank" in inner else "DFlashDraftModel"
    return {"architectures": [name], **config, "dflash_config": inner}


def _publish(source: Path, folder: Path, target: TargetModel) -> Path:
    from power_core.artifacts import open_tensors
    from power_core.testing.safetensors_writer import save_tensors

    file = open_tensors(source)
    config = {**published_config(file), "tokenizer_sha256": target.identity.tokenizer_sha256}
    return save_tensors(folder, {published_name(name): file.read(name) for name in file.tensors}, config)


def _bound(target: TargetModel) -> dict[str, Any]:
    return {"power.tokenizer_sha256": target.identity.tokenizer_sha256}


def _target(folder: Path) -> TargetModel:
    """By whichever installed backend loads GGUF files."""
    from power_core.runtime import Runtime
    from power_core.testing.gguf import tiny_llama

    with Runtime() as runtime:
        return runtime.load_target(tiny_llama(folder / "target.gguf", layers=5))
