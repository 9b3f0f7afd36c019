"""
A drafter in memory, under one set of names, and the names both containers have for it.

The layouts are those the contracts of the kinds document: published safetensors (z-lab DFlash, DeepSpec DSpark,
Power's attached MTP head) and llama.cpp's architecture `dflash`, with `mtp-head` as Power's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

__all__ = ["MTP", "Drafter", "Settings", "gguf_name", "plain_names", "published_name"]

MTP = "mtp-head"

_OUTER = {  # name here -> (safetensors, GGUF); for the block kinds
    "fc": ("fc.weight", "fc.weight"),
    "hidden_norm": ("hidden_norm.weight", "enc.output_norm.weight"),
    "norm": ("norm.weight", "output_norm.weight"),
    "token_embd": ("embed_tokens.weight", "token_embd.weight"),
    "output": ("lm_head.weight", "output.weight"),
    "d2t": ("d2t", "d2t"),
    "markov_w1": ("markov_head.markov_w1.weight", "markov_w1.weight"),
    "markov_w2": ("markov_head.markov_w2.weight", "markov_w2.weight"),
    "confidence": ("confidence_head.proj.weight", "conf_proj.weight"),
    "confidence_bias": ("confidence_head.proj.bias", "conf_proj.bias"),
    "predecessor": ("candidate_selector.predecessor_codebook", "selector_predecessor.weight"),
    "successor": ("candidate_selector.successor_codebook", "selector_successor.weight"),
    "selector": ("candidate_selector.hidden_projection.weight", "selector_hidden.weight"),
}
_OUTER_MTP = {
    "feature_fc": ("feature_fc.weight", "feature_fc.weight"),
    "fc": ("fc.weight", "fc.weight"),
    "hidden_norm": ("hidden_norm.weight", "hidden_norm.weight"),
    "embed_norm": ("embed_norm.weight", "embed_norm.weight"),
    "norm": ("norm.weight", "output_norm.weight"),
    "output": ("lm_head.weight", "output.weight"),
    "d2t": ("d2t", "d2t"),
}
_BLOCK = {
    "attn_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "q": ("self_attn.q_proj.weight", "attn_q.weight"),
    "k": ("self_attn.k_proj.weight", "attn_k.weight"),
    "v": ("self_attn.v_proj.weight", "attn_v.weight"),
    "o": ("self_attn.o_proj.weight", "attn_output.weight"),
    "q_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "ffn_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "up": ("mlp.up_proj.weight", "ffn_up.weight"),
    "down": ("mlp.down_proj.weight", "ffn_down.weight"),
    "attn_conv_base": ("attention_conv.base_kernel", "attn_conv_base"),
    "attn_conv": ("attention_conv.kernel_projection.weight", "attn_conv_proj.weight"),
    "ffn_conv_base": ("mlp_conv.base_kernel", "ffn_conv_base"),
    "ffn_conv": ("mlp_conv.kernel_projection.weight", "ffn_conv_proj.weight"),
}
_INDEXED = re.compile(r"(\d+)\.(.+)")


@frozen
class Settings:
    """
    What a drafter's metadata says.

    Args:
        kind: `dflash-v1`, `dflash2`, `dspark` or `mtp-head`.
        hidden: Width, the target's.
        ffn: Width of the feed-forward.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        blocks: Decoder layers.
        epsilon: Of every norm.
        rope_base: Rotary base.
        vocab: Ids of the target.
        context: Positions.
        layers: Target blocks whose output is read, numbered from 0.
        block_size: Rows of a round; for MTP the recurrent passes trained, 0 where not said.
        mask_id: Token of the rows after the anchor; not of MTP.
        tokenizer_sha256: Digest of the target's tokenizer, or "".
        from_anchor: DSpark: whether the anchor's row predicts.
        has_confidence: DSpark: whether there is a confidence head.
        rank: DFlash2: of the codebooks.
        top_k: DFlash2: candidates.
        kernel: DFlash2: taps.
        group: DFlash2: channels that share a coefficient.
    """

    kind: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: int
    epsilon: float
    rope_base: float
    vocab: int
    context: int
    layers: tuple[int, ...]
    block_size: int
    mask_id: int = 0
    tokenizer_sha256: str = ""
    from_anchor: bool = False
    has_confidence: bool = False
    rank: int = 0
    top_k: int = 0
    kernel: int = 0
    group: int = 0


@frozen(eq=False)
class Drafter:
    """
    A drafter in memory.

    Args:
        settings: Its metadata.
        tensors: float32 or int64 (`d2t`, absolute ids) by name: ``fc``, ``0.q``, ...; shapes outermost first.
    """

    settings: Settings
    tensors: Mapping[str, NDArray[np.generic]]


def published_name(name: str, kind: str) -> str:
    """
    The safetensors name of *name*.

    >>> published_name("0.q", "dspark"), published_name("fc", "mtp-head")
    ('layers.0.self_attn.q_proj.weight', 'fc.weight')
    """
    return _spelled(name, kind, 0, "layers")


def gguf_name(name: str, kind: str) -> str:
    """
    The GGUF name of *name*.

    >>> gguf_name("0.q", "dspark"), gguf_name("hidden_norm", "dspark")
    ('blk.0.attn_q.weight', 'enc.output_norm.weight')
    """
    return _spelled(name, kind, 1, "blk")


def _spelled(name: str, kind: str, container: int, prefix: str) -> str:
    match = _INDEXED.fullmatch(name)
    if match:
        return f"{prefix}.{match[1]}.{_BLOCK[match[2]][container]}"
    return (_OUTER_MTP if kind == MTP else _OUTER)[name][container]


def plain_names(kind: str, blocks: int) -> list[str]:
    """Every name a drafter of *kind* may have."""
    inner = [f"{index}.{part}" for index in range(blocks) for part in _BLOCK]
    return [*(_OUTER_MTP if kind == MTP else _OUTER), *inner]
