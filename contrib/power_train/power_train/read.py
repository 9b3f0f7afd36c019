"""Reading a drafter of either container; its contract has checked the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from power_core.artifacts import ArtifactFacts, TensorFile
from power_core.errors import ArtifactError
from power_train.drafter_file import MTP, Drafter, Settings, gguf_name, plain_names, published_name

__all__ = ["read_drafter"]

# Keys that change a drafter's arithmetic and that have no place in the other container as this package writes it.
_FOREIGN = (
    "sliding_window", "attention.sliding_window", "use_sliding_window", "rope_scaling", "embedding_scale",
    "input_embedding_scale", "logit_scale", "output_multiplier", "final_logit_softcapping", "speculators_model_type",
)  # fmt: skip


def read_drafter(file: TensorFile, kind: str, facts: ArtifactFacts) -> Drafter:
    """
    The drafter *file* holds, with its metadata.

    Args:
        file: Approved by the contract of *kind*.
        kind: Of the contract.
        facts: What the contract read off it.

    Raises:
        ArtifactError: It has a setting that conversion would lose.
    """
    is_gguf = file.format == "gguf"
    keys = _gguf_keys(file, kind) if is_gguf else _config_keys(file.metadata)
    for key in _FOREIGN:
        if keys(key, None):
            raise ArtifactError(
                f"{key} is {keys(key, None)!r:.40}", who="power-train", where=str(file.path), got=keys(key, None),
                expected="a drafter without it: conversion would lose it",
            )  # fmt: skip
    settings = _settings(keys, kind, facts, is_gguf=is_gguf)
    spell = gguf_name if is_gguf else published_name
    tensors: dict[str, NDArray[np.generic]] = {}
    for name in plain_names(kind, settings.blocks):
        found = _found(file, spell(name, kind))
        if found is not None:
            tensors[name] = file.read(found)
    if "d2t" in tensors:
        tensors["d2t"] = np.array(tensors["d2t"], np.int64)
    return Drafter(settings, tensors)


def _found(file: TensorFile, name: str) -> str | None:
    """The name as the file spells it: published ones may have a prefix, and the codebooks a suffix."""
    return next((each for each in (name, f"model.{name}", f"{name}.weight") if each in file.tensors), None)


def _gguf_keys(file: TensorFile, kind: str) -> Callable[[str, Any], Any]:
    prefix = MTP if kind == MTP else "dflash"

    def get(key: str, default: Any) -> Any:
        return file.metadata.get(f"{prefix}.{key}", file.metadata.get(key, default))

    return get


def _config_keys(config: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    flat = {**config, **(config.get("dflash_config") or {}), **(config.get("rope_parameters") or {})}
    return lambda key, default: flat.get(key, default)


def _settings(keys: Callable[[str, Any], Any], kind: str, facts: ArtifactFacts, *, is_gguf: bool) -> Settings:
    def pick(config_key: str, gguf_key: str, default: Any = 0) -> Any:
        return keys(gguf_key if is_gguf else config_key, default)

    heads = int(pick("num_attention_heads", "attention.head_count"))
    passes = pick("trained_steps", "trained_steps")
    return Settings(
        kind=kind,
        hidden=facts.hidden_size,
        ffn=int(pick("intermediate_size", "feed_forward_length")),
        heads=heads,
        kv_heads=int(pick("num_key_value_heads", "attention.head_count_kv", heads)),
        head_dim=int(pick("head_dim", "attention.key_length", facts.hidden_size // heads)),
        blocks=1 if kind == MTP else int(pick("num_hidden_layers", "block_count")),
        epsilon=float(pick("rms_norm_eps", "attention.layer_norm_rms_epsilon")),
        rope_base=float(pick("rope_theta", "rope.freq_base", 10000.0)),
        vocab=facts.vocab_size,
        context=int(pick("max_position_embeddings", "context_length", 4096)),
        layers=facts.hidden_layers,
        block_size=int(passes if kind == MTP else pick("block_size", "block_size")),
        mask_id=int(pick("mask_token_id", "tokenizer.ggml.mask_token_id")),
        tokenizer_sha256=str(keys("tokenizer_sha256", "") or keys("power.tokenizer_sha256", "")),
        from_anchor=bool(pick("sample_from_anchor", "sample_from_anchor", default=kind == "dspark")),
        has_confidence=bool(pick("enable_confidence_head", "has_confidence_head", default=False)),
        rank=int(pick("selector_rank", "selector_rank")),
        top_k=int(pick("selector_top_k", "selector_top_k")),
        kernel=int(pick("conv_kernel_size", "conv_kernel_size")),
        group=int(pick("conv_group_size", "conv_group_size")),
    )
