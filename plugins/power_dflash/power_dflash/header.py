"""What a DFlash file's metadata says, in one record for both containers and both kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import frozen

from power_core.artifacts import TensorFile
from power_dflash.gguf_keys import check_gguf_keys
from power_dflash.keys import Keys, deny

__all__ = ["DFLASH2", "DFLASH_V1", "Header", "Selector", "read_header"]

DFLASH_V1 = "dflash-v1"
DFLASH2 = "dflash2"

# Bounds that no real drafter comes near; they keep products of sizes within 64 bits.
_MOST = 1 << 20
_MOST_IDS = 1 << 24
_MOST_BLOCKS = 512  # llama.cpp's own bound, of both models
_MOST_ROWS = 256
# Of float constants: published epsilons are 1e-12 to 1e-5, rope bases 1e4 to 3.6e9, scales 0.06 to 80, caps 30 and 50.
_EPS = (1e-12, 0.1)
_ROPE_BASE = (2.0, 1e12)
_SCALE = (1e-6, 1e6)
_LAYER_TYPES = ("full_attention", "sliding_attention")


@frozen
class Selector:
    """
    What DFlash2 has beyond v1.

    Args:
        rank: Width of the predecessor and successor codebooks.
        top_k: Candidates of a position.
        conv_kernel: Taps of the convolutions.
        conv_group: Channels that share a dynamic coefficient.
    """

    rank: int
    top_k: int
    conv_kernel: int
    conv_group: int


@frozen
class Header:
    """
    Sizes and settings of a file.

    Args:
        hidden_size: H.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Size of a head.
        ffn_size: F.
        eps: Of every norm.
        rope_base: Frequency base.
        windows: For each layer its attention window, or None.
        vocab_size: V.
        block_size: Rows of a round.
        mask_id: Of the rows behind the anchor.
        target_blocks: Blocks whose output is read, numbered from 0.
        anchor_drafts: Whether the anchor's row drafts the first token: `block_size` tokens a round, not one less.
        selector: Of DFlash2, else None.
        embedding_scale: Factor of the block's embeddings.
        logit_scale: Factor of the logits (DFlash2's candidates).
        softcap: Where positive, logits are softcap * tanh(logits / softcap) (DFlash2's candidates).
        target_layers: Blocks the target must have, or None where the file does not say.
        tokenizer_sha256: Digest the target's tokenizer must have, or None where the file does not say.
        has_offsets: Whether `d2t` holds id - row.
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    eps: float
    rope_base: float
    windows: tuple[int | None, ...]
    vocab_size: int
    block_size: int
    mask_id: int
    target_blocks: tuple[int, ...]
    anchor_drafts: bool
    selector: Selector | None
    embedding_scale: float
    logit_scale: float
    softcap: float
    target_layers: int | None
    tokenizer_sha256: str | None
    has_offsets: bool

    @property
    def drafts(self) -> int:
        """Tokens of a round."""
        return self.block_size if self.anchor_drafts else self.block_size - 1


def read_header(file: TensorFile, kind: str) -> Header:
    """
    Read and check the metadata of *file* as one of *kind*.

    Raises:
        ArtifactError: The first key found wrong.
    """
    header = _read_gguf(file, kind) if file.format == "gguf" else _read_config(file, kind)
    if header.heads % header.kv_heads:
        pair = f"{header.heads} query and {header.kv_heads} key/value heads"
        deny(file, f"{pair} cannot be grouped", got=header.kv_heads, expected=f"a divisor of {header.heads}")
    if header.head_dim % 2:
        deny(file, f"heads of size {header.head_dim} cannot rotate", got=header.head_dim, expected="an even size")
    if not 0 <= header.mask_id < header.vocab_size:
        deny(file, f"the mask id is {header.mask_id}", got=header.mask_id, expected=f"below {header.vocab_size}")
    if header.drafts < 1:
        deny(file, "a block of one row drafts nothing", got=header.block_size, expected="2 or more")
    if header.selector is not None:
        _check_selector(file, header.hidden_size, header.selector)
    return header


def _read_gguf(file: TensorFile, kind: str) -> Header:
    keys = Keys(file, file.metadata, "dflash.")
    check_gguf_keys(file, keys)
    keys.whole("context_length", 1, 1 << 31)
    heads = keys.whole("attention.head_count", 1, _MOST)
    hidden = keys.whole("embedding_length", 1, _MOST)
    head_dim = keys.whole("attention.key_length", 1, _MOST, max(hidden // heads, 1))
    if keys.whole("attention.value_length", 1, _MOST, max(hidden // heads, 1)) != head_dim:
        keys.refuse("attention.value_length", keys.get("attention.value_length"), f"the key length, {head_dim}")
    if keys.whole("rope.dimension_count", 1, _MOST, head_dim) != head_dim:
        keys.refuse("rope.dimension_count", keys.get("rope.dimension_count"), f"the head's size, {head_dim}")
    _check_sections(keys, head_dim)
    layers = keys.whole("block_count", 1, _MOST_BLOCKS)
    vocab_size = _gguf_vocabulary(file, keys)
    return Header(
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=keys.whole("attention.head_count_kv", 1, heads, heads),
        head_dim=head_dim,
        ffn_size=keys.whole("feed_forward_length", 1, _MOST),
        eps=keys.number("attention.layer_norm_rms_epsilon", *_EPS),
        rope_base=keys.number("rope.freq_base", *_ROPE_BASE, 10000.0),
        windows=_gguf_windows(keys, layers),
        vocab_size=vocab_size,
        block_size=keys.whole("block_size", 1, _MOST_ROWS),
        mask_id=Keys(file, file.metadata).whole("tokenizer.ggml.mask_token_id", 0, _MOST_IDS),
        target_blocks=tuple(layer - 1 for layer in keys.wholes("target_layers", 1, _MOST_BLOCKS)),
        anchor_drafts=False,  # llama.cpp takes the key for DSpark's
        selector=_selector(keys, kind),
        embedding_scale=keys.number("embedding_scale", *_SCALE, 1.0),
        logit_scale=keys.number("logit_scale", *_SCALE, 1.0),
        softcap=_softcap(keys),
        target_layers=None,
        tokenizer_sha256=Keys(file, file.metadata).text("power.tokenizer_sha256"),
        has_offsets=False,
    )


def _read_config(file: TensorFile, kind: str) -> Header:
    """`config.json` in the layouts of z-lab (a table `dflash_config`), DeepSpec (flat) and speculators (nested)."""
    config = file.metadata
    sizes = Keys(file, {**config, **_table(file, config, "transformer_layer_config")})
    keys = Keys(file, {**config, **_table(file, config, "dflash_config")})
    if not config.get("architectures") and config.get("hidden_size") is None and not sizes.table.get("hidden_size"):
        deny(file, "there is no config.json beside the file", expected="the drafter's config.json", fix="copy it there")
    rope = _table(file, sizes.table, "rope_parameters")
    for key, neutral in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        sizes.absent(key, f"absent or {neutral!r}", neutral)
    for key in ("is_causal", "causal"):
        keys.absent(key, "absent or false", False)
    sizes.absent("rope_scaling", "absent: only plain rotation is computed")
    Keys(file, rope).absent("rope_type", "'default': only plain rotation is computed", "default")
    Keys(file, rope).absent("partial_rotary_factor", "absent or 1", 1, 1.0)
    keys.absent("rope_is_neox_style", "absent or true: convert interleaved heads first", True)
    heads, hidden = sizes.whole("num_attention_heads", 1, _MOST), sizes.whole("hidden_size", 1, _MOST)
    layers = sizes.whole("num_hidden_layers", 1, _MOST_BLOCKS)
    base = rope if "rope_theta" in rope else sizes.table
    return Header(
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=sizes.whole("num_key_value_heads", 1, heads, heads),
        head_dim=sizes.whole("head_dim", 1, _MOST, max(hidden // heads, 1)),
        ffn_size=sizes.whole("intermediate_size", 1, _MOST),
        eps=sizes.number("rms_norm_eps", *_EPS),
        rope_base=Keys(file, base).number("rope_theta", *_ROPE_BASE, 10000.0),
        windows=_config_windows(sizes, keys, layers),
        vocab_size=sizes.whole("vocab_size", 1, _MOST_IDS),
        block_size=keys.whole("block_size", 1, _MOST_ROWS),
        mask_id=keys.whole("mask_token_id", 0, _MOST_IDS),
        target_blocks=_config_blocks(keys),
        anchor_drafts=keys.flag("sample_from_anchor", default="num_anchors" in config),  # DeepSpec's trainer
        selector=_selector(keys, kind),
        embedding_scale=keys.number("input_embedding_scale", *_SCALE, 1.0),
        logit_scale=keys.number("output_multiplier", *_SCALE, 1.0),
        softcap=_softcap(keys),
        target_layers=None
        if keys.get("num_target_layers") is None
        else keys.whole("num_target_layers", 1, _MOST_BLOCKS),
        tokenizer_sha256=keys.text("tokenizer_sha256"),
        has_offsets="speculators_model_type" in config,
    )


def _softcap(keys: Keys) -> float:
    """0 for none: some files say so, others leave the key out."""
    key = "final_logit_softcapping"
    return 0.0 if keys.get(key) is None or keys.is_zero(key) else keys.number(key, *_SCALE)


def _selector(keys: Keys, kind: str) -> Selector | None:
    """Of DFlash2; in a v1 file its keys would draft token 0 from a lattice of zeros."""
    names = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
    if kind == DFLASH_V1:
        for name in names:
            keys.absent(name, "absent in a DFlash v1 file: the selector's tensors are missing")
        return None
    keys.absent("sample_from_anchor", "absent or false: the lattice begins behind the anchor", False)
    return Selector(*(keys.whole(name, 1, _MOST) for name in names))


def _check_selector(file: TensorFile, hidden_size: int, selector: Selector) -> None:
    top_k, group = selector.top_k, selector.conv_group
    if top_k * (top_k + 1) > hidden_size:  # llama.cpp hands the lattice out in rows of that size
        deny(
            file, f"a lattice of {top_k} candidates does not fit {hidden_size} channels",
            got=top_k, expected="top_k * (top_k + 1) at most the hidden size",
        )  # fmt: skip
    if hidden_size % group:
        deny(file, f"groups of {group} channels do not divide {hidden_size}", got=group, expected="a divisor")


def _check_sections(keys: Keys, head_dim: int) -> None:
    """Sections of a drafter for M-RoPE targets; with all dimensions in the first they are plain rotation."""
    value = keys.get("rope.dimension_sections")
    sections = value.tolist() if isinstance(value, np.ndarray) else value
    if sections is not None and sections != [head_dim // 2, 0, 0, 0]:
        keys.refuse("rope.dimension_sections", sections, f"absent or {[head_dim // 2, 0, 0, 0]}")


def _gguf_vocabulary(file: TensorFile, keys: Keys) -> int:
    """V by the key, or by the tokens the file carries; where both are there they agree."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    model = Keys(file, file.metadata).text("tokenizer.ggml.model")
    if model is None or (model == "none") != (tokens is None):
        what = "no tokenizer.ggml.tokens" if tokens is None else "tokenizer.ggml.tokens"
        deny(file, f"tokenizer.ggml.model is {model!r:.40} and there are {what}", got=model,
             expected='the model "none", or a whole tokenizer')  # fmt: skip
    count = len(tokens) if tokens is not None else None
    size = keys.whole("vocab_size", 1, _MOST_IDS, count)
    if count is not None and count != size:
        keys.refuse("vocab_size", size, f"the {count} tokens of the file")
    return size


def _gguf_windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
    if keys.get("attention.sliding_window") is None or keys.is_zero("attention.sliding_window"):
        return (None,) * layers
    window = keys.whole("attention.sliding_window", 1, 1 << 31)
    value = keys.get("attention.sliding_window_pattern")
    pattern = value.tolist() if isinstance(value, np.ndarray) else value
    fits = isinstance(pattern, list) and len(pattern) == layers and all(flag in (0, 1) for flag in pattern)
    if not fits or not any(pattern):
        keys.refuse("attention.sliding_window_pattern", pattern, f"{layers} flags, at least one of them true")
    return tuple(window if flag else None for flag in pattern)


def _config_windows(sizes: Keys, keys: Keys, layers: int) -> tuple[int | None, ...]:
    if keys.flag("use_swa", default=False):
        return (keys.whole("swa_window_size", 1, 1 << 31),) * layers
    if not sizes.flag("use_sliding_window", default=False):
        return (None,) * layers
    types = sizes.get("layer_types")
    if not isinstance(types, list) or len(types) != layers or any(kind not in _LAYER_TYPES for kind in types):
        sizes.refuse("layer_types", types, f"{layers} entries, each " + " or ".join(_LAYER_TYPES))
    window = sizes.whole("sliding_window", 1, 1 << 31)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _config_blocks(keys: Keys) -> tuple[int, ...]:
    if keys.get("target_layer_ids") is not None:
        return keys.wholes("target_layer_ids", 0, _MOST_BLOCKS)
    # speculators numbers layers by their input: id i is the output of block i - 1
    return tuple(layer - 1 for layer in keys.wholes("aux_hidden_state_layer_ids", 1, _MOST_BLOCKS))


def _table(file: TensorFile, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        deny(file, f"the key {key} is {value!r:.60}", got=value, expected="a table")
    return value
