"""The header of a DSpark drafter in safetensors with a config.json, as DeepSpec and speculators publish it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from power_core.artifacts.tensors import TensorFile
from power_dspark.fields import Fields, refuse
from power_dspark.header import (
    EPSILONS,
    MAX_BLOCK_SIZE,
    MAX_LAYER,
    ROPE_BASES,
    Header,
    Keys,
    read_anchor_first,
    read_dims,
)
from power_dspark.layout import Dims

__all__ = ["ARCHITECTURES", "is_speculators", "read_published_header"]

# A tuple, for what a list of a config.json holds may not be hashable.
ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator")
"""Values of `architectures` in a config.json whose backbone is a Qwen3-style block."""

_KEYS = Keys(
    hidden="hidden_size",
    feed_forward="intermediate_size",
    heads="num_attention_heads",
    kv_heads="num_key_value_heads",
    head_dim="head_dim",
    blocks="num_hidden_layers",
    confidence="enable_confidence_head",
)
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "markov_head_type": ("vanilla",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "is_causal": (False,),
    "use_sliding_window": (False,),
    "hidden_act": ("silu",),
    "rope_is_neox_style": (True,),
}
_AUX = "aux_hidden_state_layer_ids"


def read_published_header(file: TensorFile) -> Header:
    """
    The header of the safetensors *file* and the config.json beside it.

    Raises:
        ArtifactError: A key is missing, of the wrong type, out of range, or contradicts the tensor table.
    """
    config = _flat(file.metadata)
    fields = Fields(file.path, config)
    _check_architecture(file, config)
    for key, values in _NEUTRAL.items():
        fields.neutral(key, *values)
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        refuse(file.path, f"layer_types is {kinds!r:.60}", got=kinds, expected="full_attention only")
    layers = _layers(fields)
    vocab, block_size = fields.integer("vocab_size", least=2), fields.integer("block_size", most=MAX_BLOCK_SIZE)
    with_markov = fields.flag("confidence_head_with_markov", default=True)
    dims = read_dims(
        file, fields, _KEYS, vocab=vocab, features=len(layers), confidence_with_markov=with_markov
    )  # fmt: skip
    _check_repeated_sizes(file, fields, dims)
    return Header(
        dims=dims,
        hidden_layers=layers,
        block_size=block_size,
        sample_from_anchor=read_anchor_first(file, fields, block_size, default=not is_speculators(config)),
        mask_id=fields.integer("mask_token_id", least=0, most=vocab - 1),
        epsilon=fields.number("rms_norm_eps", *EPSILONS),
        rope_base=_rope_base(file, config),
        context=fields.integer("max_position_embeddings"),
    )


def is_speculators(config: Mapping[str, Any]) -> bool:
    """
    Whether *config* is of the speculators library, of EAGLE-3's lineage.

    There the anchor's row is kept for the bonus token unless the config says otherwise, and `d2t` holds id - row.
    """
    return "transformer_layer_config" in config or _AUX in config or any(k.startswith("speculators_") for k in config)


def _flat(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json; speculators keeps the block's sizes in a record of their own."""
    nested = metadata.get("transformer_layer_config")
    return {**metadata, **nested} if isinstance(nested, Mapping) else dict(metadata)


def _check_architecture(file: TensorFile, config: Mapping[str, Any]) -> None:
    named = config.get("architectures")
    if not isinstance(named, list | tuple) or len(named) != 1 or named[0] not in ARCHITECTURES:
        expected = "one of " + ", ".join(sorted(ARCHITECTURES))
        fix = "put the drafter's own config.json beside the file"
        refuse(file.path, f"architectures is {named!r:.60}", got=named, expected=expected, fix=fix)


def _layers(fields: Fields) -> tuple[int, ...]:
    if _AUX not in fields:
        return fields.integers("target_layer_ids", least=0, most=MAX_LAYER)
    # These count hidden states, the first of which is the embedding.
    return tuple(i - 1 for i in fields.integers(_AUX, least=1, most=MAX_LAYER))


def _check_repeated_sizes(file: TensorFile, fields: Fields, dims: Dims) -> None:
    """Sizes that the config states and the tensor table decides."""
    for key, size, least in (("markov_rank", dims.rank, 0), ("draft_vocab_size", dims.draft_vocab, 1)):
        stated = fields.integer(key, least=least, default=size)
        if stated != size:
            refuse(file.path, f"{key} is {stated}", got=stated, expected=f"{size}, as in the tensor table")


def _rope_base(file: TensorFile, config: Mapping[str, Any]) -> float:
    """`rope_theta`, alone or inside `rope_parameters`; no scaling."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        refuse(file.path, f"the rope parameters are {scaling!r:.60}", got=scaling, expected="an object")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        refuse(file.path, f"the rope scaling is {kind!r:.60}", got=kind, expected="default: none")
    return Fields(file.path, {**scaling, **config}).number("rope_theta", *ROPE_BASES)
