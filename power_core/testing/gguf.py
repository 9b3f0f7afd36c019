"""
Tiny GGUF models with random weights, for tests of targets and drafters.

Each factory writes one complete file of a few hundred kilobytes that llama.cpp loads and decodes: own
byte-level tokenizer (any text can be encoded), end-of-generation ids, a chat template. The same
arguments give the same bytes. Four kinds of target memory are covered:

========================  ===========  ==========================================================
factory                   architecture  memory
========================  ===========  ==========================================================
`tiny_llama`              llama        attention; any suffix can be dropped
`tiny_gemma3`             gemma3       sliding-window layers alternating with full ones
`tiny_recurrent`          mamba        recurrent only; llama.cpp keeps no snapshots of it
`tiny_hybrid`             qwen35       recurrent and attention layers; bounded snapshots
========================  ===========  ==========================================================

The weights are scaled so that greedy text wanders, and the output rows of the control ids are zero: a
greedy run never ends on its own, so its length is the test's choice. Needs the `gguf` package
(`pip install "power-core[testing]"`), imported when a factory is called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from power_core.testing.gguf_writer import (
    CHAT_TEMPLATE,
    GgufFile,
    MetadataValue,
    add_attention,
    add_attention_metadata,
    add_delta_net,
    add_embeddings,
    add_feed_forward,
    add_hybrid_metadata,
    add_nextn,
    add_sizes,
    add_vocabulary,
)

__all__ = ["CHAT_TEMPLATE", "MetadataValue", "tiny_gemma3", "tiny_hybrid", "tiny_llama", "tiny_recurrent"]


def tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 2048,
    weights: str = "F32",
    chat_template: str | None = CHAT_TEMPLATE,
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
) -> Path:
    """
    Write a random model of architecture `llama`: grouped-query attention, memory that can be cut anywhere.

    Args:
        path: The file to write.
        seed: Seed of the weights.
        vocab_size: Ids, 259 (three control ids and one id a byte) or more; the rest are merges.
        hidden_size: Width of the residual stream, a multiple of `heads`.
        layers: Blocks.
        heads: Query heads.
        kv_heads: Key and value heads, a divisor of `heads`.
        context: The context length the file declares.
        weights: ggml type of the matrices: "F32", "F16", "BF16" or a block type the `gguf` package can
            quantize to, such as "Q8_0"; norms stay F32.
        chat_template: Jinja template to store, or None for a file without one.
        overrides: Metadata keys to replace or add; None leaves a key out. For tests of refusals.
        omit: Tensors to leave out. For tests of refusals.

    Returns:
        *path*.
    """
    file = GgufFile("llama", seed, weights)
    add_sizes(file, hidden_size, layers, context)
    add_vocabulary(file, vocab_size, chat_template)
    add_attention_metadata(file, heads, kv_heads, hidden_size // heads)
    file.set("rope.dimension_count", hidden_size // heads)
    add_embeddings(file, vocab_size, hidden_size)
    for i in range(layers):
        add_attention(file, i, hidden_size, heads, kv_heads, hidden_size // heads)
        add_feed_forward(file, i, hidden_size)
        file.norms(f"blk.{i}", ("attn_norm", "ffn_norm"), hidden_size)
    return file.write(path, overrides, omit)


def tiny_gemma3(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    sliding_window: int = 32,
    context: int = 2048,
    weights: str = "F32",
    chat_template: str | None = CHAT_TEMPLATE,
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
) -> Path:
    """
    Write a random model of architecture `gemma3`: even blocks attend to a window, odd blocks to everything.

    Args:
        path: The file to write.
        seed: Seed of the weights.
        vocab_size: As for `tiny_llama`.
        hidden_size: As for `tiny_llama`.
        layers: Blocks; at least 2 for both kinds to occur.
        heads: Query heads.
        kv_heads: Key and value heads.
        sliding_window: Positions the even blocks see.
        context: The context length the file declares.
        weights: As for `tiny_llama`.
        chat_template: As for `tiny_llama`.
        overrides: As for `tiny_llama`.
        omit: As for `tiny_llama`.

    Returns:
        *path*.
    """
    file = GgufFile("gemma3", seed, weights)
    add_sizes(file, hidden_size, layers, context)
    add_vocabulary(file, vocab_size, chat_template)
    add_attention_metadata(file, heads, kv_heads, hidden_size // heads)
    file.set("attention.sliding_window", sliding_window)
    file.set("attention.sliding_window_pattern", 2)
    add_embeddings(
        file, vocab_size, hidden_size, gain=3.0
    )  # block outputs are normalized here, the embedding must match
    for i in range(layers):
        add_attention(file, i, hidden_size, heads, kv_heads, hidden_size // heads)
        add_feed_forward(file, i, hidden_size)
        file.norms(f"blk.{i}", ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), hidden_size)
        file.norms(f"blk.{i}", ("attn_q_norm", "attn_k_norm"), hidden_size // heads)
    return file.write(path, overrides, omit)


def tiny_recurrent(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 2,
    state_size: int = 16,
    context: int = 2048,
    weights: str = "F32",
    chat_template: str | None = CHAT_TEMPLATE,
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
) -> Path:
    """
    Write a random model of architecture `mamba`: recurrent state only, which llama.cpp cannot roll back.

    Args:
        path: The file to write.
        seed: Seed of the weights.
        vocab_size: As for `tiny_llama`.
        hidden_size: Width of the residual stream; the inner width is twice that.
        layers: Blocks.
        state_size: State values per inner channel.
        context: The context length the file declares.
        weights: As for `tiny_llama`.
        chat_template: As for `tiny_llama`.
        overrides: As for `tiny_llama`.
        omit: As for `tiny_llama`.

    Returns:
        *path*.
    """
    file = GgufFile("mamba", seed, weights)
    inner, rank, kernel = 2 * hidden_size, max(1, hidden_size // 16), 4
    add_sizes(file, hidden_size, layers, context)
    add_vocabulary(file, vocab_size, chat_template)
    for key, value in (("conv_kernel", kernel), ("inner_size", inner), ("state_size", state_size)):
        file.set(f"ssm.{key}", value)
    file.set("ssm.time_step_rank", rank)
    add_embeddings(file, vocab_size, hidden_size)
    for i in range(layers):
        block = f"blk.{i}"
        file.norms(block, ("attn_norm",), hidden_size)
        file.matrix(f"{block}.ssm_in.weight", (2 * inner, hidden_size))
        file.plain(f"{block}.ssm_conv1d.weight", file.random((inner, kernel), 0.5))
        file.plain(f"{block}.ssm_conv1d.bias", file.random((inner,), 0.1))
        file.matrix(f"{block}.ssm_x.weight", (rank + 2 * state_size, inner))
        file.plain(f"{block}.ssm_dt.weight", file.random((inner, rank), 1.0))
        file.plain(f"{block}.ssm_dt.bias", file.random((inner,), 1.0) - 2)
        file.plain(f"{block}.ssm_a", -np.exp(file.random((inner, state_size), 1.0)))  # negative: the state decays
        file.plain(f"{block}.ssm_d", file.random((inner,), 1.0))
        file.matrix(f"{block}.ssm_out.weight", (hidden_size, inner))
    return file.write(path, overrides, omit)


def tiny_hybrid(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 4,
    nextn_layers: int = 0,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 2048,
    weights: str = "F32",
    chat_template: str | None = CHAT_TEMPLATE,
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
) -> Path:
    """
    Write a random model of architecture `qwen35`: even blocks are a gated delta net, odd blocks full attention.

    llama.cpp keeps snapshots of its recurrent state (`n_rs_seq`), so a bounded suffix can be dropped.

    Args:
        path: The file to write.
        seed: Seed of the weights.
        vocab_size: As for `tiny_llama`.
        hidden_size: As for `tiny_llama`.
        layers: Blocks; at least 2 for both kinds to occur.
        nextn_layers: Prediction (NextN) blocks behind the trunk; llama.cpp runs one.
        heads: Query heads of the attention blocks, 4 or more (llama.cpp aborts on 2); also the delta
            net's value heads.
        kv_heads: Key and value heads; also the delta net's key heads.
        context: The context length the file declares.
        weights: As for `tiny_llama`.
        chat_template: As for `tiny_llama`.
        overrides: As for `tiny_llama`.
        omit: As for `tiny_llama`.

    Returns:
        *path*.
    """
    file = GgufFile("qwen35", seed, weights)
    head = hidden_size // heads
    add_sizes(file, hidden_size, layers + nextn_layers, context)
    add_vocabulary(file, vocab_size, chat_template)
    add_hybrid_metadata(file, heads, kv_heads, head, nextn_layers)
    add_embeddings(file, vocab_size, hidden_size)
    for i in range(layers):
        file.norms(f"blk.{i}", ("attn_norm", "post_attention_norm"), hidden_size)
        add_feed_forward(file, i, hidden_size)
        if i % 2:
            add_attention(file, i, hidden_size, heads, kv_heads, head, gated=True)
            file.norms(f"blk.{i}", ("attn_q_norm", "attn_k_norm"), head)
        else:
            add_delta_net(file, i, hidden_size, heads, kv_heads, head)
    for i in range(layers, layers + nextn_layers):
        add_nextn(file, i, hidden_size, heads, kv_heads, head)
    return file.write(path, overrides, omit)
