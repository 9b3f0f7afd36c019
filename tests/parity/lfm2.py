"""A tiny random LFM2: short convolutions, whose state cannot be cut freely, alternating with attention."""

from __future__ import annotations

from pathlib import Path

from power_core.testing.gguf import CHAT_TEMPLATE
from power_core.testing.gguf_writer import (
    GgufFile,
    add_attention,
    add_attention_metadata,
    add_embeddings,
    add_feed_forward,
    add_sizes,
    add_vocabulary,
)

__all__ = ["tiny_lfm2"]

HIDDEN, HEADS, KV_HEADS, TAPS, VOCAB = 64, 4, 2, 3, 320


def tiny_lfm2(path: Path, *, seed: int = 0, layers: int = 4) -> Path:
    """
    Write a random model of architecture `lfm2`: even blocks are gated short convolutions, odd ones attention.

    Args:
        path: The file to write.
        seed: Seed of the weights.
        layers: Blocks; at least 2 for both kinds to occur.

    Returns:
        *path*.
    """
    file = GgufFile("lfm2", seed, "F32")
    add_sizes(file, HIDDEN, layers, 2048)
    add_vocabulary(file, VOCAB, CHAT_TEMPLATE)
    add_attention_metadata(file, HEADS, KV_HEADS, HIDDEN // HEADS)
    file.set("attention.head_count_kv", [KV_HEADS if i % 2 else 0 for i in range(layers)])  # 0: a convolution
    file.set("shortconv.l_cache", TAPS)
    file.set("vocab_size", VOCAB)
    add_embeddings(file, VOCAB, HIDDEN)
    file.tensors["token_embd_norm.weight"] = file.tensors.pop("output_norm.weight")  # the name its files use
    for i in range(layers):
        block = f"blk.{i}"
        file.norms(block, ("attn_norm", "ffn_norm"), HIDDEN)
        add_feed_forward(file, i, HIDDEN)
        if i % 2:
            add_attention(file, i, HIDDEN, HEADS, KV_HEADS, HIDDEN // HEADS)
            file.norms(block, ("attn_q_norm", "attn_k_norm"), HIDDEN // HEADS)
        else:
            file.plain(f"{block}.shortconv.conv.weight", file.random((HIDDEN, TAPS), 0.5))
            file.matrix(f"{block}.shortconv.in_proj.weight", (3 * HIDDEN, HIDDEN))
            file.matrix(f"{block}.shortconv.out_proj.weight", (HIDDEN, HIDDEN))
    return file.write(path, None, ())
