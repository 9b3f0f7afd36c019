"""
MTP-only GGUF files of architecture `qwen35`: prediction layers without a trunk, the native executor's form.

llama.cpp (src/models/qwen35.cpp) loads such a file for an MTP context. Its one decoder layer is block
`block_count - 1`; attention has a gate, and the embedding is the file's own::

    x      = eh_proj [enorm(embedding[x_p]), hnorm(h)]
    y      = decoder layer(x)
    h'     = shared_head_norm(y)       the next step's h, and what the output matrix reads
    logits = shared_head_head h'       or output, or the embedding

An attached head for a target without NextN fits this form: a gate of zero weights is 1/2 everywhere, so the
attention output matrix is doubled. The optional key `mtp-head.target_layer_ids` then names the one target block
whose output is h; without it h is the target's own NextN state.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from power_core.artifacts import ArtifactFacts, TensorFile
from power_core.artifacts.files import refuse
from power_core.artifacts.gguf import TENSOR_TYPES
from power_core.artifacts.keys import check_keys
from power_core.types import TargetIdentity
from power_mtp.metadata import EPSILONS, PLUGIN, ROPE_BASES, Metadata

__all__ = ["ARCHITECTURE", "check", "check_architecture", "matches"]

ARCHITECTURE = "qwen35"
TARGET_LAYERS = "mtp-head.target_layer_ids"
_LARGEST = 2**20
_WEIGHTS = frozenset(kind.name for kind in TENSOR_TYPES.values() if kind.weight)
_NORM_TYPES = frozenset({"F32"})  # llama.cpp's norm kernels take no other
# 0, or absent: the layer's graph has none of them.
_DENSE = ("expert_count", "expert_used_count", "expert_group_count", "attention.sliding_window")
# Types that llama.cpp takes the keys in. A file has more: those of the trunk it does not hold.
_KEY_TYPES = {
    **dict.fromkeys(
        ("nextn_predict_layers", "block_count", "embedding_length", "feed_forward_length", "context_length",
         "full_attention_interval", "attention.head_count", "attention.head_count_kv", "attention.key_length",
         "attention.value_length", "rope.dimension_count", "ssm.state_size", "ssm.time_step_rank", "ssm.conv_kernel",
         "ssm.inner_size", "ssm.group_count"),
        frozenset({"u32"}),
    ),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "rope.freq_base"), frozenset({"f32"})),
    "rope.dimension_sections": frozenset({"arr[i32]", "arr[u32]"}),
    "rope.scaling.type": frozenset({"str"}),
    **dict.fromkeys(_DENSE, frozenset({"u32"})),
}  # fmt: skip
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")


def matches(file: TensorFile) -> bool:
    """Whether *file* is a `qwen35` file with prediction layers and without a trunk."""
    if file.format != "gguf" or file.metadata.get("general.architecture") != ARCHITECTURE:
        return False
    count = Metadata(file, f"{ARCHITECTURE}.").get("nextn_predict_layers")
    has_layer = isinstance(count, int | np.integer) and int(count) > 0
    return has_layer and "blk.0.attn_norm.weight" not in file.tensors


def check(file: TensorFile) -> ArtifactFacts:
    """
    Check keys and tensors that llama.cpp would abort on or misread.

    Raises:
        ArtifactError: The first thing found wrong.
    """
    keys = Metadata(file, f"{ARCHITECTURE}.")
    check_keys(file, f"{ARCHITECTURE}.", _KEY_TYPES, plugin=PLUGIN, others=True)
    for key in _DENSE:
        keys.whole(key, 0, 0, default=0)
    if keys.text("rope.scaling.type") not in (None, *_ROPE_SCALINGS):
        keys.refuse("rope.scaling.type", " or ".join(_ROPE_SCALINGS))
    keys.whole("nextn_predict_layers", 1, 1)  # its graph asserts that it is one
    block = keys.whole("block_count", 2, 512) - 1
    hidden = keys.whole("embedding_length", 1, _LARGEST)
    vocab = _vocab(file, hidden)
    _check_constants(keys)
    expected = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)} | _block(keys, block, hidden)
    for name, dims in expected.items():
        _check_tensor(file, name, dims)
    optional = _optional(block, hidden, vocab)
    for name in file.tensors:
        if name in optional:
            _check_tensor(file, name, optional[name])
        elif name not in expected:
            _refuse(file, f"tensor {name!r:.80} is no part of an MTP-only file", name, "only its prediction layer")
    layers = Metadata(file).wholes(TARGET_LAYERS, 0, _LARGEST, longest=1) if TARGET_LAYERS in file.metadata else ()
    return ArtifactFacts(
        hidden_layers=layers, hidden_size=hidden, vocab_size=vocab, draft_vocab_size=vocab,
        details={
            "executor": "native",
            "architecture": ARCHITECTURE,
            "optional_tensors": sorted(name for name in file.tensors if name in optional),
        },
    )  # fmt: skip


def check_architecture(file: TensorFile, facts: ArtifactFacts, target: TargetIdentity) -> None:
    """
    Check that *target* gives the hidden state the file reads.

    Raises:
        ArtifactError: It is another architecture, whose NextN state is none of this file's.
    """
    if not facts.hidden_layers and target.architecture != ARCHITECTURE:
        refuse(
            file.path, f"the head reads the NextN state of a {ARCHITECTURE} target", got=target.architecture,
            expected=f"a target of that architecture, not {target.architecture}",
            fix=f"use its own model, or name the block it reads under {TARGET_LAYERS}", plugin=PLUGIN,
        )  # fmt: skip


def _vocab(file: TensorFile, hidden: int) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        found = "the tensor token_embd.weight is missing" if embedding is None else f"its shape is {embedding.shape}"
        _refuse(file, found, None if embedding is None else embedding.shape, f"vocabulary x {hidden}")
    return embedding.shape[0]


def _check_constants(keys: Metadata) -> None:
    """What llama.cpp divides by, asserts on, or takes as it comes."""
    keys.real("attention.layer_norm_rms_epsilon", *EPSILONS)
    keys.whole("context_length", 1, 2**31 - 1)
    keys.whole("full_attention_interval", 1, _LARGEST, default=4)
    if keys.get("rope.freq_base") is not None:
        keys.real("rope.freq_base", *ROPE_BASES)
    _check_rope(keys)
    state = keys.whole("ssm.state_size", 1, _LARGEST)
    heads = keys.whole("ssm.time_step_rank", 1, _LARGEST)
    keys.whole("ssm.conv_kernel", 2, 64)
    keys.whole("ssm.inner_size", state * heads, state * heads)
    groups = keys.whole("ssm.group_count", 1, heads)
    if heads % groups:
        keys.refuse("ssm.group_count", f"a divisor of {heads}, the value heads")


def _check_rope(keys: Metadata) -> None:
    head_dim = keys.whole("attention.key_length", 2, 4096)
    turned = keys.whole("rope.dimension_count", 2, head_dim, default=head_dim)
    if turned % 2:
        keys.refuse("rope.dimension_count", "an even number")
    sections = keys.wholes("rope.dimension_sections", 0, head_dim, longest=4)
    if len(sections) != 4 or not 0 < sum(sections) <= turned // 2:
        keys.refuse("rope.dimension_sections", f"4 numbers of a sum from 1 to {turned // 2}")


def _block(keys: Metadata, index: int, hidden: int) -> dict[str, tuple[int, ...]]:
    heads = keys.whole("attention.head_count", 4, _LARGEST)  # its graph ends the process with 2
    kv_heads = keys.whole("attention.head_count_kv", 1, heads)
    if heads % kv_heads:
        keys.refuse("attention.head_count_kv", f"a divisor of {heads}, the query heads")
    size = keys.whole("attention.key_length", 2, 4096)
    keys.whole("attention.value_length", size, size)
    inner = keys.whole("feed_forward_length", 1, _LARGEST)
    parts: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "post_attention_norm": (hidden,),
        "attn_q": (2 * heads * size, hidden),  # queries and their gates
        "attn_k": (kv_heads * size, hidden),
        "attn_v": (kv_heads * size, hidden),
        "attn_output": (hidden, heads * size),
        "attn_q_norm": (size,),
        "attn_k_norm": (size,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "nextn.eh_proj": (hidden, 2 * hidden),
        "nextn.enorm": (hidden,),
        "nextn.hnorm": (hidden,),
    }
    return {f"blk.{index}.{part}.weight": shape for part, shape in parts.items()}


def _optional(index: int, hidden: int, vocab: int) -> dict[str, tuple[int, ...]]:
    parts: dict[str, tuple[int, ...]] = {
        "embed_tokens": (vocab, hidden),
        "shared_head_head": (vocab, hidden),
        "shared_head_norm": (hidden,),
    }
    found = {f"blk.{index}.nextn.{part}.weight": shape for part, shape in parts.items()}
    return {"output.weight": (vocab, hidden), **found}


def _check_tensor(file: TensorFile, name: str, dims: tuple[int, ...]) -> None:
    if name not in file.tensors:
        _refuse(file, f"the tensor {name} is missing", name, f"shape {list(dims)}")
    tensor = file.tensors[name]
    if tensor.shape != dims:
        _refuse(file, f"tensor {name} has shape {list(tensor.shape)}", tensor.shape, list(dims))
    allowed = _WEIGHTS if len(dims) == 2 else _NORM_TYPES
    if tensor.dtype not in allowed:
        _refuse(file, f"tensor {name} is {tensor.dtype}", tensor.dtype, ", ".join(sorted(allowed)))


def _refuse(file: TensorFile, what: str, got: object, expected: object) -> NoReturn:
    refuse(file.path, what, got=got, expected=expected, fix="export the head again", plugin=PLUGIN)
