"""The header of a DSpark drafter in a GGUF (architecture `dflash`, as llama.cpp reads it)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from power_core.artifacts.gguf import GgufFile
from power_core.artifacts.keys import check_keys
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

__all__ = ["read_gguf_header"]

_KEYS = Keys(
    hidden="embedding_length",
    feed_forward="feed_forward_length",
    heads="attention.head_count",
    kv_heads="attention.head_count_kv",
    head_dim="attention.key_length",
    blocks="block_count",
    confidence="has_confidence_head",
)
_U32, _F32, _BOOL, _TEXT = (frozenset([kind]) for kind in ("u32", "f32", "bool", "str"))
# Keys that are read, with the types that llama.cpp takes them in.
_READ: Mapping[str, Collection[str]] = {
    **dict.fromkeys(
        ("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "block_size",
         "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
         "rope.dimension_count"),
        _U32,
    ),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "rope.freq_base"), _F32),
    **dict.fromkeys(("sample_from_anchor", "has_confidence_head"), _BOOL),
    "target_layers": ("arr[i32]", "arr[u32]"),
}  # fmt: skip
# Keys that change the arithmetic, with their types and the values that leave it alone: llama.cpp would follow them, the
# torch executor would not, and nothing here was measured with them.
_NEUTRAL: Mapping[str, tuple[Collection[str], tuple[object, ...]]] = {
    "attention.causal": (_BOOL, (False,)),
    "hidden_activation": (_TEXT, ("silu",)),
    "rope.scaling.type": (_TEXT, ("none",)),
    **dict.fromkeys(("logit_scale", "rope.scaling.factor", "rope.scale_linear"), (_F32, (0.0, 1.0))),
    **dict.fromkeys(
        ("attention.scale", "attention.value_scale", "embedding_scale", "final_logit_softcapping"), (_F32, (0.0,))
    ),
    **dict.fromkeys(
        ("attention.sliding_window", "expert_count", "expert_used_count", "nextn_predict_layers"), (_U32, (0,))
    ),
}


def read_gguf_header(file: TensorFile) -> Header:
    """
    The header of the GGUF *file*.

    Raises:
        ArtifactError: A key is missing, of the wrong type, out of range, or contradicts the tensor table.
    """
    fields = _fields(file, "dflash.")
    known = {**_READ, **{key: kinds for key, (kinds, _) in _NEUTRAL.items()}}
    check_keys(file, "dflash.", known, plugin="dspark")
    for key, (_, values) in _NEUTRAL.items():
        fields.neutral(key, *values)
    vocab = _vocab(file, fields)
    # llama.cpp numbers a block's input, this is the output of the block before it.
    inputs = fields.integers("target_layers", least=1, most=MAX_LAYER)
    block_size = fields.integer("block_size", most=MAX_BLOCK_SIZE)
    dims = read_dims(file, fields, _KEYS, vocab=vocab, features=len(inputs))
    for key in ("attention.value_length", "rope.dimension_count"):
        size = fields.integer(key, default=dims.head_dim)
        if size != dims.head_dim:
            refuse(file.path, f"dflash.{key} is {size}", got=size, expected=f"{dims.head_dim}, the key length")
    return Header(
        dims=dims,
        hidden_layers=tuple(i - 1 for i in inputs),
        block_size=block_size,
        sample_from_anchor=read_anchor_first(file, fields, block_size, default=True),
        # Read from the file, because llama.cpp forgets it without a tokenizer.
        mask_id=_fields(file, "tokenizer.ggml.").integer("mask_token_id", least=0, most=vocab - 1),
        epsilon=fields.number("attention.layer_norm_rms_epsilon", *EPSILONS),
        rope_base=fields.number("rope.freq_base", *ROPE_BASES),
        context=fields.integer("context_length"),
    )


def _fields(file: TensorFile, prefix: str) -> Fields:
    kinds = file.value_types if isinstance(file, GgufFile) else None
    return Fields(file.path, file.metadata, prefix, kinds)


def _vocab(file: TensorFile, fields: Fields) -> int:
    """From `vocab_size` or the tokenizer's list; llama.cpp takes the list where there is one."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    model = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or (model == "none") != (tokens is None):
        there = "no tokens" if tokens is None else "tokens"
        expected = 'tokenizer.ggml.tokens, or tokenizer.ggml.model "none"'
        refuse(file.path, f"tokenizer.ggml.model is {model!r} and there are {there}", got=model, expected=expected)
    if tokens is None:
        return fields.integer("vocab_size", least=2)
    stated = fields.integer("vocab_size", least=2, default=len(tokens))
    if stated != len(tokens):
        refuse(file.path, f"dflash.vocab_size is {stated}", got=stated, expected=f"{len(tokens)}, one a token")
    return stated
