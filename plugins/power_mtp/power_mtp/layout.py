"""An attached head's sizes and tensor names, in both containers."""

from __future__ import annotations

from attrs import frozen

__all__ = ["GGUF_KEYS", "KIND", "MODEL_TYPE_KEYS", "TENSORS", "HeadShape", "tensor_name"]

KIND = "mtp-head"
MODEL_TYPE_KEYS = {"safetensors": "model_type", "gguf": "general.architecture"}

TENSORS = {
    "feature_fc": ("feature_fc.weight", "feature_fc.weight"),
    "hidden_norm": ("hidden_norm.weight", "hidden_norm.weight"),
    "embed_norm": ("embed_norm.weight", "embed_norm.weight"),
    "fc": ("fc.weight", "fc.weight"),
    "attn_norm": ("layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
    "q": ("layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
    "k": ("layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight"),
    "v": ("layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
    "o": ("layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight"),
    "q_norm": ("layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"),
    "k_norm": ("layers.0.self_attn.k_norm.weight", "blk.0.attn_k_norm.weight"),
    "ffn_norm": ("layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
    "gate": ("layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight"),
    "up": ("layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"),
    "down": ("layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    "norm": ("norm.weight", "output_norm.weight"),
    "output": ("lm_head.weight", "output.weight"),
    "d2t": ("d2t", "d2t"),
}
"""Short name -> (safetensors name, GGUF name)."""

GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""Key of config.json -> GGUF key after the prefix; keys that are not here have one name in both."""


def tensor_name(short: str, container: str) -> str:
    """
    What a container calls a tensor.

    >>> tensor_name("q", "gguf")
    'blk.0.attn_q.weight'
    """
    return TENSORS[short][container == "gguf"]


@frozen
class HeadShape:
    """
    Sizes and constants of an attached head; see `power_mtp.artifact` for what they mean.

    Args:
        hidden: H.
        feed_forward: F.
        heads: A.
        kv_heads: B.
        head_dim: D.
        eps: Epsilon of every norm.
        rope_theta: Rotation base.
        vocab: V.
        draft_vocab: V', equal to *vocab* without an output matrix of its own.
        target_layers: Blocks whose outputs are read.
        fuses: Whether the file has `feature_fc`.
        has_output: Whether the file has an output matrix.
        is_reduced: Whether the file has `d2t`.
    """

    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    vocab: int
    draft_vocab: int
    target_layers: tuple[int, ...]
    fuses: bool
    has_output: bool
    is_reduced: bool

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Short name -> shape of every tensor the file must have, and of no other."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "hidden_norm": (self.hidden,),
            "embed_norm": (self.hidden,),
            "fc": (self.hidden, 2 * self.hidden),
            "attn_norm": (self.hidden,),
            "q": (queries, self.hidden),
            "k": (keys, self.hidden),
            "v": (keys, self.hidden),
            "o": (self.hidden, queries),
            "q_norm": (self.head_dim,),
            "k_norm": (self.head_dim,),
            "ffn_norm": (self.hidden,),
            "gate": (self.feed_forward, self.hidden),
            "up": (self.feed_forward, self.hidden),
            "down": (self.hidden, self.feed_forward),
            "norm": (self.hidden,),
        }
        if self.fuses:
            shapes["feature_fc"] = (self.hidden, len(self.target_layers) * self.hidden)
        if self.has_output:
            shapes["output"] = (self.draft_vocab, self.hidden)
        if self.is_reduced:
            shapes["d2t"] = (self.draft_vocab,)
        return shapes
