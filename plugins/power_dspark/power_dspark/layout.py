"""Tensors of a DSpark drafter: one set of names and shapes for both containers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from attrs import frozen

__all__ = ["DSPARK_TENSORS", "UNUSED_TENSORS", "Dims", "canonical_name", "published_name", "shapes"]

DSPARK_TENSORS = frozenset({"markov_w1.weight", "markov_w2.weight", "conf_proj.weight", "conf_proj.bias"})
"""What a DSpark file has and no other file of the DFlash family."""

UNUSED_TENSORS = frozenset({"t2d"})
"""Published beside the weights and read by nobody: the inverse of `d2t`."""

_PUBLISHED = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "d2t": "d2t",
}
_PUBLISHED_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CANONICAL = {published: name for name, published in _PUBLISHED.items()}
_CANONICAL_BLOCK = {published: part for part, published in _PUBLISHED_BLOCK.items()}
_BLOCK_NAME = re.compile(r"layers\.(\d+)\.([a-z_.]+)\.weight")


@frozen
class Dims:
    """
    Sizes that decide every shape.

    Args:
        hidden: Width of the residual stream, the target's.
        feed_forward: Width of the feed-forward part.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of one head.
        blocks: Transformer blocks of the drafter.
        features: Target blocks whose outputs are read.
        vocab: The target's vocabulary.
        draft_vocab: Rows of the drafter's output; *vocab* without a reduced vocabulary.
        rank: Rank of the Markov head.
        confidence: Columns of the confidence projection, or 0 without one.
    """

    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: int
    features: int
    vocab: int
    draft_vocab: int
    rank: int
    confidence: int


def published_name(name: str) -> str:
    """
    The safetensors spelling of the GGUF tensor *name*, without the prefix ``model.`` that some exports add.

    >>> published_name("blk.0.attn_q.weight"), published_name("enc.output_norm.weight")
    ('layers.0.self_attn.q_proj.weight', 'hidden_norm.weight')
    """
    if name in _PUBLISHED:
        return _PUBLISHED[name]
    _, index, part, suffix = name.split(".")
    return f"layers.{index}.{_PUBLISHED_BLOCK[part]}.{suffix}"


def canonical_name(name: str) -> str:
    """
    The GGUF spelling of the published tensor *name*; a name nobody knows comes back as it is.

    >>> canonical_name("model.layers.3.mlp.up_proj.weight"), canonical_name("markov_head.markov_w1.weight")
    ('blk.3.ffn_up.weight', 'markov_w1.weight')
    """
    bare = name.removeprefix("model.")
    if bare in _CANONICAL:
        return _CANONICAL[bare]
    match = _BLOCK_NAME.fullmatch(bare)
    part = _CANONICAL_BLOCK.get(match[2]) if match else None
    return f"blk.{match[1]}.{part}.weight" if match and part else name


def shapes(dims: Dims) -> dict[str, tuple[int, ...]]:
    """GGUF name -> shape (outermost first) of every tensor that *dims* allow; both containers have these shapes."""
    return dict(chain(_outer(dims), *(_block(dims, i) for i in range(dims.blocks))))


def _outer(dims: Dims) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "fc.weight", (dims.hidden, dims.features * dims.hidden)
    yield "enc.output_norm.weight", (dims.hidden,)
    yield "output_norm.weight", (dims.hidden,)
    yield "token_embd.weight", (dims.vocab, dims.hidden)
    yield "output.weight", (dims.draft_vocab, dims.hidden)
    yield "markov_w1.weight", (dims.vocab, dims.rank)
    yield "markov_w2.weight", (dims.draft_vocab, dims.rank)
    if dims.confidence:
        yield "conf_proj.weight", (1, dims.confidence)
        yield "conf_proj.bias", (1,)
    if dims.draft_vocab != dims.vocab:
        yield "d2t", (dims.draft_vocab,)


def _block(dims: Dims, i: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "attn_norm": (dims.hidden,),
        "attn_q": (queries, dims.hidden),
        "attn_k": (keys, dims.hidden),
        "attn_v": (keys, dims.hidden),
        "attn_output": (dims.hidden, queries),
        "attn_q_norm": (dims.head_dim,),
        "attn_k_norm": (dims.head_dim,),
        "ffn_norm": (dims.hidden,),
        "ffn_gate": (dims.feed_forward, dims.hidden),
        "ffn_up": (dims.feed_forward, dims.hidden),
        "ffn_down": (dims.hidden, dims.feed_forward),
    }
    for part, shape in sizes.items():
        yield f"blk.{i}.{part}.weight", shape
