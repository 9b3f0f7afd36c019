"""
Weights of llama-family models as plain torch tensors, from a GGUF file or a folder of safetensors.

What the formats do differently is undone here: GGUF's quantization, its interleaved rotary order of `llama`
queries and keys, and Gemma's norms, which its own checkpoints store minus one. Rotary embeddings are the
half-split form ("NeoX") for every architecture.
"""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import field, frozen

from power_torch.hparams import HyperParameters

__all__ = ["BlockWeights", "ModelWeights", "load_weights"]


@frozen(eq=False)
class BlockWeights:
    """
    One block. Matrices are [out, in] in the asked dtype, norms and biases float32.

    Args:
        attn_norm: [hidden]; before attention.
        attn_qkv: [(heads + 2 * kv_heads) * head_dim, hidden]; queries, keys and values stacked.
        attn_output: [hidden, heads * head_dim].
        ffn_norm: [hidden]; before the feed-forward.
        ffn_gate_up: [2 * ffn, hidden]; gate and up stacked.
        ffn_down: [hidden, ffn].
        attn_q_norm: [head_dim], over each query head, or None.
        attn_k_norm: [head_dim], over each key head, or None.
        post_attention_norm: [hidden], over the attention's output before it is added, or None.
        post_ffn_norm: [hidden], the same for the feed-forward.
    """

    attn_norm: torch.Tensor = field(repr=False)
    attn_qkv: torch.Tensor = field(repr=False)
    attn_output: torch.Tensor = field(repr=False)
    ffn_norm: torch.Tensor = field(repr=False)
    ffn_gate_up: torch.Tensor = field(repr=False)
    ffn_down: torch.Tensor = field(repr=False)
    attn_q_norm: torch.Tensor | None = field(default=None, repr=False)
    attn_k_norm: torch.Tensor | None = field(default=None, repr=False)
    post_attention_norm: torch.Tensor | None = field(default=None, repr=False)
    post_ffn_norm: torch.Tensor | None = field(default=None, repr=False)


@frozen(eq=False)
class ModelWeights:
    """
    A whole model on the CPU.

    Args:
        hparams: Sizes and constants.
        dtype: Of the matrices.
        token_embd: [vocab, hidden]; not scaled.
        output: [vocab, hidden]; the same tensor as `token_embd` where the weights are tied.
        output_norm: float32[hidden].
        blocks: In order.
    """

    hparams: HyperParameters
    dtype: torch.dtype
    token_embd: torch.Tensor = field(repr=False)
    output: torch.Tensor = field(repr=False)
    output_norm: torch.Tensor = field(repr=False)
    blocks: tuple[BlockWeights, ...] = field(repr=False)

    @property
    def is_tied(self) -> bool:
        return self.output is self.token_embd


def load_weights(path: str | Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    """
    Load a model of architecture llama, qwen3 or gemma3.

    Args:
        path: A GGUF file of any type the `gguf` package dequantizes; a safetensors file, or a folder of them, in
            Hugging Face's layout with its `config.json`.
        dtype: Of the matrices.

    Raises:
        ArtifactError: The file is damaged, of another architecture, incomplete, or holds a number that is not finite.
    """
    from power_torch import weights_gguf, weights_hf

    file = Path(path)
    if file.suffix.lower() == ".gguf" or weights_gguf.has_magic(file):
        return weights_gguf.load(file, dtype)
    return weights_hf.load(file, dtype)
