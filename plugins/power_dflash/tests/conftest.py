"""Tiny drafters of both kinds in both containers, with the same weights, and the target they were made for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from power_dflash.artifact import BlockContract
from power_dflash.config import DFlash2Config, DFlashConfig
from power_dflash.drafter import BlockDrafter
from power_dflash.header import DFLASH2, DFLASH_V1
from safetensors.numpy import save_file

from power_core.artifacts import Artifact, ArtifactManifest, Provenance, TensorFile, open_tensors
from power_core.runtime import Runtime
from power_core.target import TargetModel
from power_core.testing.gguf import tiny_llama
from power_core.testing.gguf_drafts import tiny_dflash, tiny_dflash2

TARGET_LAYERS = (1, 4)  # llama.cpp's ids: the outputs of blocks 0 and 3
MAKERS: dict[str, Callable[..., Path]] = {DFLASH_V1: tiny_dflash, DFLASH2: tiny_dflash2}
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


def published_name(name: str) -> str:
    """The safetensors name of a GGUF tensor."""
    if name in _CODEBOOKS or name == "d2t":
        return _CODEBOOKS.get(name, name)
    stem, suffix = name.removesuffix(".weight"), ".weight" if name.endswith(".weight") else ""
    prefix = ""
    if stem.startswith("blk."):
        _, layer, stem = stem.split(".")
        prefix = f"layers.{layer}."
    return prefix + _PUBLISHED.get(stem, stem) + suffix


def config_of(file: TensorFile) -> dict[str, Any]:
    """The published config.json that says what a GGUF header says."""
    meta, get = file.metadata, lambda key: file.metadata.get(f"dflash.{key}")
    inner = {"target_layer_ids": [int(i) - 1 for i in get("target_layers")]}
    inner["mask_token_id"] = meta["tokenizer.ggml.mask_token_id"]
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if get(key) is not None:
            inner[key] = get(key)
    return {
        "architectures": ["DFlash2DraftModel" if "selector_rank" in inner else "DFlashDraftModel"],
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "vocab_size": get("vocab_size"),
        "block_size": get("block_size"),
        "num_target_layers": 5,
        "dflash_config": inner,
    }


def to_safetensors(source: Path, folder: Path, *, prefix: str = "", **changes: Any) -> Path:
    """Write the drafter *source* in the published layout."""
    folder.mkdir()
    file = open_tensors(source)
    save_file(
        {prefix + published_name(name): np.ascontiguousarray(file.read(name)) for name in file.tensors},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({**config_of(file), **changes}))
    return folder / "model.safetensors"


@pytest.fixture(scope="session")
def published() -> Callable[..., Path]:
    return to_safetensors


@pytest.fixture(scope="session")
def make_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A drafter of a kind; what it is made with can be changed."""

    def make(kind: str, **changes: Any) -> Path:
        return MAKERS[kind](
            tmp_path_factory.mktemp("draft") / "draft.gguf", **{"target_layers": TARGET_LAYERS, **changes}
        )

    return make


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random llama of five blocks, loaded."""
    path = tiny_llama(tmp_path_factory.mktemp("target") / "target.gguf", layers=5)
    with Runtime() as runtime:
        model = runtime.load_target(path)
        yield model
        model.close()


@pytest.fixture
def target(tiny_target: TargetModel) -> TargetModel:
    return tiny_target


@pytest.fixture(scope="session")
def admitted() -> Callable[[Path, TargetModel], Artifact]:
    """A file checked in full against a target, as the core would hand it to a factory."""

    def admit(path: Path, target: TargetModel) -> Artifact:
        file = open_tensors(path)
        contract = next(each for kind in MAKERS if (each := BlockContract(kind)).matches(file))
        facts = contract.check(file)
        contract.check_payload(file)
        contract.check_target(file, facts, target)
        return Artifact(
            ArtifactManifest("tiny", contract.kind, (), target.identity, facts, Provenance("test", "0", "none")), file
        )

    return admit


@pytest.fixture(scope="session")
def drafter_of() -> Callable[..., BlockDrafter]:
    """The drafter of an artifact, with options."""

    def make(artifact: Artifact, **options: Any) -> BlockDrafter:
        config = DFlashConfig if artifact.manifest.kind == DFLASH_V1 else DFlash2Config
        return BlockDrafter(config(**options), artifact)

    return make
