"""Hyper-parameters of the llama family: one record for every architecture, read by the forward pass alone."""

from __future__ import annotations

from attrs import field, frozen

__all__ = ["ARCHITECTURES", "GEMMA3", "LLAMA", "QWEN3", "HyperParameters", "RopeScaling"]

LLAMA, QWEN3, GEMMA3 = "llama", "qwen3", "gemma3"
ARCHITECTURES = (LLAMA, QWEN3, GEMMA3)


@frozen
class RopeScaling:
    """
    How rotary frequencies of the full-attention blocks differ from base^(-2i/d).

    Args:
        factor: Every frequency is divided by it: linear scaling; 1 for none.
        factors: Frequency i is divided by `factors[i]` too (Llama 3); empty for none.
    """

    factor: float = 1.0
    factors: tuple[float, ...] = field(default=(), repr=False)


@frozen
class HyperParameters:
    """
    Sizes and constants of one model.

    Args:
        architecture: One of `ARCHITECTURES`.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        num_layers: Blocks, numbered from 0.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; query head h reads head h // (num_heads // num_kv_heads).
        head_dim: Width of a head.
        ffn_size: Width of the feed-forward.
        trained_context: Positions the model was trained for.
        norm_epsilon: Of every RMSNorm.
        rope_base: Base of the full-attention blocks' rotary frequencies.
        rope_scaling: Their scaling.
        rope_base_window: Base of the windowed blocks, which are never scaled.
        sliding_window: Positions a windowed block sees, its own included; 0 where there is none.
        windowed: For each block whether it is windowed.
        attention_scale: Factor of query-key products.
        embedding_scale: Factor of token embeddings.
        logit_softcap: c where logits are c * tanh(logits / c); 0 for none.
        activation: Of the gate: `silu` or `gelu` (its tanh approximation).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    trained_context: int
    norm_epsilon: float
    rope_base: float
    rope_scaling: RopeScaling = RopeScaling()
    rope_base_window: float = 10000.0
    sliding_window: int = 0
    windowed: tuple[bool, ...] = field(default=(), repr=False)
    attention_scale: float = 0.0
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    activation: str = "silu"

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def is_windowed(self, block: int) -> bool:
        return bool(self.windowed) and self.windowed[block]
