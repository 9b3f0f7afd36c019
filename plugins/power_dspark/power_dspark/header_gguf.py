"""The header of a DSpark drafter in a GGUF (architecture `dflash`, as llama.cpp reads it)."""

from __future__ import annotations

from power_core.artifacts.gguf import GgufFile
from power_core.artifacts.tensors import TensorFile
from power_dspark.fields import Fields, refuse
from power_dspark.header import MAX_BLOCK_SIZE, MAX_LAYER, Header, Keys, read_anchor_first, read_dims

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
# Keys that change the arithmetic, with the values that leave it alone: llama.cpp would follow them, the torch
# executor would not, and nothing here was measured with them.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (False,),
    "attention.sliding_window": (0,),
    "attention.scale": (0.0,),
    "attention.value_scale": (0.0,),
    "embedding_scale": (0.0,),
    "hidden_act": ("silu",),
    "logit_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.dimension_sections": (),
    **dict.fromkeys(("hyper_connection_count", "expert_count", "expert_used_count", "nextn_predict_layers"), (0,)),
    **dict.fromkeys(("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"), (0,)),
}


def read_gguf_header(file: TensorFile) -> Header:
    """
    The header of the GGUF *file*.

    Raises:
        ArtifactError: A key is missing, of the wrong type, out of range, or contradicts the tensor table.
    """
    fields = _fields(file, "dflash.")
    for key, values in _NEUTRAL.items():
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
        mask_id=_mask(file, fields, vocab),
        epsilon=fields.number("attention.layer_norm_rms_epsilon", above=0.0),
        rope_base=fields.number("rope.freq_base", above=0.0),
        context=fields.integer("context_length"),
    )


def _fields(file: TensorFile, prefix: str) -> Fields:
    kinds = file.value_types if isinstance(file, GgufFile) else None
    return Fields(file.path, file.metadata, prefix, kinds)


def _vocab(file: TensorFile, fields: Fields) -> int:
    """From `vocab_size` or the tokenizer's list; llama.cpp takes the list where there is one."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        model = file.metadata.get("tokenizer.ggml.model")
        if model != "none":
            expected = 'tokenizer.ggml.tokens, or tokenizer.ggml.model "none"'
            refuse(
                file.path, f"tokenizer.ggml.model is {model!r} and there are no tokens", got=model, expected=expected
            )
        return fields.integer("vocab_size", least=2)
    stated = fields.integer("vocab_size", least=2, default=len(tokens))
    if stated != len(tokens):
        refuse(file.path, f"dflash.vocab_size is {stated}", got=stated, expected=f"{len(tokens)}, one a token")
    return stated


def _mask(file: TensorFile, fields: Fields, vocab: int) -> int:
    """`tokenizer.ggml.mask_token_id`; read from the file, because llama.cpp forgets it without a tokenizer."""
    mask = _fields(file, "tokenizer.ggml.").integer("mask_token_id", least=0, most=vocab - 1)
    other = fields.integer("mask_token_id", least=0, most=vocab - 1, default=mask)
    if other != mask:
        refuse(file.path, f"dflash.mask_token_id is {other}", got=other, expected=f"{mask}, as under tokenizer.ggml")
    return mask
