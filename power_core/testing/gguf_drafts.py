"""
Tiny GGUF drafters with random weights, made for the targets of `power_core.testing.gguf`.

======================  ============  =================================================================
factory                 architecture  what a round gives
======================  ============  =================================================================
`tiny_dflash`           dflash        logits of a block of masked rows
`tiny_dflash2`          dflash        a lattice of candidates and transition scores
`tiny_dspark`           dflash        logits with a Markov bias, and a confidence for each row
`tiny_mtp`              qwen35        the next token's logits and the state for the one after it
======================  ============  =================================================================

The same arguments give the same bytes. Token embedding and output matrix are left out where llama.cpp takes the
target's. Needs the `gguf` package (`pip install "power-core[testing]"`), imported when a factory is called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from power_core.testing.gguf_writer import (
    GgufFile,
    MetadataValue,
    add_attention,
    add_attention_metadata,
    add_embeddings,
    add_feed_forward,
    add_hybrid_metadata,
    add_nextn,
    add_sizes,
    add_vocabulary,
)

__all__ = ["tiny_dflash", "tiny_dflash2", "tiny_dspark", "tiny_mtp"]

MASK_KEY = "tokenizer.ggml.mask_token_id"


def tiny_dflash(
    path: Path,
    *,
    seed: int = 100,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    target_layers: Sequence[int] = (1, 3),
    block_size: int = 8,
    mask_id: int = 0,
    draft_vocab: Sequence[int] | None = None,
    own_matrices: bool = False,
    context: int = 2048,
    weights: str = "F32",
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
    replace: Mapping[str, NDArray[np.generic]] | None = None,
) -> Path:
    """
    Write a random DFlash v1 drafter.

    Args:
        path: The file to write.
        seed: Seed of the weights.
        vocab_size: The target's vocabulary.
        hidden_size: The target's hidden size.
        layers: Blocks.
        heads: Query heads.
        kv_heads: Key and value heads.
        target_layers: llama.cpp's layer ids: id i is the input of block i, the output of block i - 1.
        block_size: Rows of a round, the anchor's included.
        mask_id: Id of the rows behind the anchor.
        draft_vocab: The ids of a reduced vocabulary (`d2t`), with an output matrix of its own; None for all.
        own_matrices: Whether the file has a token embedding and an output matrix of its own.
        context: The context length the file declares.
        weights: ggml type of the matrices.
        overrides: Metadata keys to replace or add; None leaves a key out. For tests of refusals.
        omit: Tensors to leave out. For tests of refusals.
        replace: Tensors to replace or add, in their numpy type. For tests of refusals.

    Returns:
        *path*.
    """
    file = _backbone(
        seed=seed, weights=weights, vocab_size=vocab_size, hidden_size=hidden_size, layers=layers, heads=heads,
        kv_heads=kv_heads, target_layers=target_layers, block_size=block_size, mask_id=mask_id, context=context,
    )  # fmt: skip
    if own_matrices:
        file.matrix("token_embd.weight", (vocab_size, hidden_size))
    _output(file, vocab_size, hidden_size, draft_vocab, own=own_matrices)
    return file.write(path, overrides, omit, replace)


def tiny_dflash2(
    path: Path,
    *,
    seed: int = 200,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    target_layers: Sequence[int] = (1, 3),
    block_size: int = 8,
    mask_id: int = 0,
    rank: int = 8,
    top_k: int = 4,
    kernel: int = 3,
    group: int = 16,
    context: int = 2048,
    weights: str = "F32",
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
    replace: Mapping[str, NDArray[np.generic]] | None = None,
) -> Path:
    """
    Write a random DFlash2 drafter: DFlash with dynamic convolutions and a selector.

    Args:
        path: The file to write.
        seed: As for `tiny_dflash`.
        vocab_size: As for `tiny_dflash`.
        hidden_size: As for `tiny_dflash`; at least top_k * (top_k + 1), where llama.cpp puts the lattice.
        layers: As for `tiny_dflash`.
        heads: As for `tiny_dflash`.
        kv_heads: As for `tiny_dflash`.
        target_layers: As for `tiny_dflash`.
        block_size: As for `tiny_dflash`.
        mask_id: As for `tiny_dflash`.
        rank: Width of the selector's factors.
        top_k: Candidates of a position.
        kernel: Taps of the convolutions.
        group: Channels that share a dynamic coefficient.
        context: As for `tiny_dflash`.
        weights: As for `tiny_dflash`.
        overrides: As for `tiny_dflash`.
        omit: As for `tiny_dflash`.
        replace: As for `tiny_dflash`.

    Returns:
        *path*.
    """
    file = _backbone(
        seed=seed, weights=weights, vocab_size=vocab_size, hidden_size=hidden_size, layers=layers, heads=heads,
        kv_heads=kv_heads, target_layers=target_layers, block_size=block_size, mask_id=mask_id, context=context,
    )  # fmt: skip
    for key, value in (("selector_rank", rank), ("selector_top_k", top_k)):
        file.set(key, value)
    file.set("conv_kernel_size", kernel)
    file.set("conv_group_size", group)
    for i in range(layers):
        for side in ("attn", "ffn"):
            base = file.random((2, kernel, hidden_size), 0.2)
            base[:, 0] += 1  # close to no convolution, as a trained one starts
            file.plain(f"blk.{i}.{side}_conv_base", base)
            file.matrix(f"blk.{i}.{side}_conv_proj.weight", (2 * kernel * (hidden_size // group), hidden_size), 0.3)
    file.matrix("selector_predecessor.weight", (vocab_size, rank))
    file.matrix("selector_successor.weight", (vocab_size, rank))
    file.matrix("selector_hidden.weight", (rank, hidden_size))
    return file.write(path, overrides, omit, replace)


def tiny_dspark(
    path: Path,
    *,
    seed: int = 300,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    target_layers: Sequence[int] = (1, 3),
    block_size: int = 8,
    mask_id: int = 0,
    rank: int = 8,
    anchor_first: bool = True,
    confidence: bool = True,
    draft_vocab: Sequence[int] | None = None,
    context: int = 2048,
    weights: str = "F32",
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
    replace: Mapping[str, NDArray[np.generic]] | None = None,
) -> Path:
    """
    Write a random DSpark drafter: DFlash with a Markov head and a confidence head.

    Args:
        path: The file to write.
        seed: As for `tiny_dflash`.
        vocab_size: As for `tiny_dflash`.
        hidden_size: As for `tiny_dflash`.
        layers: As for `tiny_dflash`.
        heads: As for `tiny_dflash`.
        kv_heads: As for `tiny_dflash`.
        target_layers: As for `tiny_dflash`.
        block_size: As for `tiny_dflash`.
        mask_id: As for `tiny_dflash`.
        rank: Width of the Markov head's factors.
        anchor_first: Whether the anchor's row drafts the first token, else it gives the bonus token only.
        confidence: Whether there is a confidence head.
        draft_vocab: As for `tiny_dflash`.
        context: As for `tiny_dflash`.
        weights: As for `tiny_dflash`.
        overrides: As for `tiny_dflash`.
        omit: As for `tiny_dflash`.
        replace: As for `tiny_dflash`.

    Returns:
        *path*.
    """
    file = _backbone(
        seed=seed, weights=weights, vocab_size=vocab_size, hidden_size=hidden_size, layers=layers, heads=heads,
        kv_heads=kv_heads, target_layers=target_layers, block_size=block_size, mask_id=mask_id, context=context,
    )  # fmt: skip
    file.set("sample_from_anchor", anchor_first)
    file.set("has_confidence_head", confidence)
    _output(file, vocab_size, hidden_size, draft_vocab)
    file.matrix("markov_w1.weight", (vocab_size, rank), gain=3.0)
    file.matrix("markov_w2.weight", (len(draft_vocab or range(vocab_size)), rank), gain=3.0)
    if confidence:
        file.matrix("conf_proj.weight", (1, hidden_size + rank))
        file.plain("conf_proj.bias", file.random((1,), 0.5))
    return file.write(path, overrides, omit, replace)


def tiny_mtp(
    path: Path,
    *,
    seed: int = 400,
    vocab_size: int = 320,
    hidden_size: int = 64,
    trunk_layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 2048,
    weights: str = "F32",
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
    replace: Mapping[str, NDArray[np.generic]] | None = None,
) -> Path:
    """
    Write a random prediction layer in a file of its own: architecture `qwen35` without its trunk.

    Args:
        path: The file to write.
        seed: As for `tiny_dflash`.
        vocab_size: As for `tiny_dflash`.
        hidden_size: As for `tiny_dflash`.
        trunk_layers: Blocks that the file says are before its own, and does not hold.
        heads: Query heads, 4 or more.
        kv_heads: Key and value heads.
        context: As for `tiny_dflash`.
        weights: As for `tiny_dflash`.
        overrides: As for `tiny_dflash`.
        omit: As for `tiny_dflash`.
        replace: As for `tiny_dflash`.

    Returns:
        *path*.
    """
    file = GgufFile("qwen35", seed, weights)
    head = hidden_size // heads
    add_sizes(file, hidden_size, trunk_layers + 1, context)
    add_vocabulary(file, vocab_size, None)
    add_hybrid_metadata(file, heads, kv_heads, head, 1)
    add_embeddings(file, vocab_size, hidden_size)
    add_nextn(file, trunk_layers, hidden_size, heads, kv_heads, head)
    return file.write(path, overrides, omit, replace)


def _backbone(
    *,
    seed: int,
    weights: str,
    vocab_size: int,
    hidden_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    target_layers: Sequence[int],
    block_size: int,
    mask_id: int,
    context: int,
) -> GgufFile:
    """What the three block drafters have in common."""
    file = GgufFile("dflash", seed, weights)
    head = hidden_size // heads
    add_sizes(file, hidden_size, layers, context)
    add_attention_metadata(file, heads, kv_heads, head)
    file.set("attention.causal", False)
    file.set("rope.dimension_count", head)
    file.set("vocab_size", vocab_size)
    file.set("block_size", block_size)
    file.set("target_layers", list(target_layers))
    file.metadata |= {"tokenizer.ggml.model": "none", MASK_KEY: mask_id}
    file.matrix("fc.weight", (hidden_size, len(target_layers) * hidden_size))
    for name in ("enc.output_norm", "output_norm"):
        file.plain(f"{name}.weight", 1 + file.random((hidden_size,), 0.1))
    for i in range(layers):
        file.norms(f"blk.{i}", ("attn_norm", "ffn_norm"), hidden_size)
        file.norms(f"blk.{i}", ("attn_q_norm", "attn_k_norm"), head)
        add_attention(file, i, hidden_size, heads, kv_heads, head)
        add_feed_forward(file, i, hidden_size)
    return file


def _output(
    file: GgufFile, vocab_size: int, hidden_size: int, draft_vocab: Sequence[int] | None, *, own: bool = False
) -> None:
    """An output matrix of its own where there must be one, with the ids its rows stand for."""
    if draft_vocab is not None:
        file.integers("d2t", np.asarray(draft_vocab, np.int64))
    if own or draft_vocab is not None:
        rows = vocab_size if draft_vocab is None else len(draft_vocab)
        file.matrix("output.weight", (rows, hidden_size), gain=4.0)
