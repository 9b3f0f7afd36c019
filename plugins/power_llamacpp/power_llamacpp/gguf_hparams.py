"""
Hyperparameters of a GGUF target: the values llama.cpp asserts, divides by or computes nonsense with.

Each function raises `ArtifactError` for what it finds; `gguf_check` runs them. Keys are those of the file's
own architecture ("llama.block_count" is `block_count` here).
"""

from __future__ import annotations

import math

import numpy as np

from power_llamacpp.gguf_file import GgufInfo, refuse

__all__ = [
    "check_finite_numbers",
    "check_heads",
    "check_recurrent",
    "check_rope",
    "check_sizes",
    "check_window",
    "unsigned",
]

_MAX_BLOCKS, _MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_DELTA_NETS = frozenset(["qwen35", "qwen35moe", "qwen3next"])


def unsigned(info: GgufInfo, key: str, *, least: int = 0, most: int = 2**32 - 1, required: bool = False) -> int | None:
    """The u32 *key* within bounds; None where it is absent and may be."""
    full = f"{info.architecture}.{key}"
    if full not in info.metadata:
        if required:
            refuse(info.path, f"the key {full} is missing", expected=f"a u32 from {least} to {most}")
        return None
    value = info.metadata[full]
    if info.value_types[full] != "u32" or not isinstance(value, int):
        refuse(info.path, f"{full} is of type {info.value_types[full]}", got=info.value_types[full], expected="u32")
    if not least <= value <= most:
        refuse(info.path, f"{full} is {value}", got=value, expected=f"{least} to {most}")
    return value


def _per_layer(info: GgufInfo, key: str, layers: int) -> list[int] | None:
    """The *key* for each of *layers* blocks: one u32 for all, or an array."""
    full = f"{info.architecture}.{key}"
    kind = info.value_types.get(full)
    if kind is None or kind == "u32":
        value = unsigned(info, key)
        return None if value is None else [value] * layers
    values = info.metadata[full]
    if kind not in ("arr[u32]", "arr[i32]") or not isinstance(values, np.ndarray):
        refuse(info.path, f"{full} is of type {kind}", got=kind, expected="u32, or an array of u32")
    if len(values) != layers:
        refuse(info.path, f"{full} has {len(values)} elements", got=len(values), expected=f"{layers}, one a block")
    if (values.astype(np.int64) < 0).any():
        refuse(info.path, f"{full} has a negative element", got=int(values.min()), expected="0 or more")
    return [int(value) for value in values]


def check_sizes(info: GgufInfo) -> None:
    """Block, hidden and context sizes, and experts on both sides or neither."""
    unsigned(info, "context_length", least=1, required=True)
    unsigned(info, "embedding_length", least=1, most=2**31 - 1, required=True)
    blocks = unsigned(info, "block_count", least=1, most=_MAX_BLOCKS, required=True) or 0
    unsigned(info, "nextn_predict_layers", most=blocks - 1)
    _per_layer(info, "feed_forward_length", blocks)
    experts = unsigned(info, "expert_count", most=_MAX_EXPERTS) or 0
    used = max(_per_layer(info, "expert_used_count", blocks) or [0])
    if experts <= 1 and info.architecture.startswith("hunyuan"):
        experts = used = 0  # a dense model by llama.cpp's own rule
    if (experts > 0) != (used > 0) or used > experts:
        what = f"{info.architecture}.expert_used_count is {used} where expert_count is {experts}"
        refuse(info.path, what, got=used, expected="1 to expert_count, or both 0")
    groups = unsigned(info, "expert_group_count", most=max(experts - 1, 0)) or 0
    if groups > 1:
        unsigned(info, "expert_group_used_count", least=1, most=groups - 1, required=True)
        if experts % groups:
            refuse(info.path, f"{experts} experts do not divide into {groups} groups", got=groups)


def check_finite_numbers(info: GgufInfo) -> None:
    """No hyperparameter is NaN or infinite, no epsilon negative, no base or frequency zero."""
    for key, kind in info.value_types.items():
        if kind != "f32" or not key.startswith(f"{info.architecture}."):
            continue
        value = info.metadata[key]
        if not isinstance(value, float) or not math.isfinite(value):
            refuse(info.path, f"{key} is {value}", got=value, expected="a finite number")
        if (key.endswith("_epsilon") and value < 0) or (".rope.freq_base" in key and value <= 0):
            refuse(info.path, f"{key} is {value}", got=value, expected="a positive number")


def check_heads(info: GgufInfo) -> None:
    """Query heads are a multiple of key heads in every block, and a head has a size."""
    blocks = info.integer("block_count")
    heads = _per_layer(info, "attention.head_count", blocks) or [0] * blocks
    kv_heads = _per_layer(info, "attention.head_count_kv", blocks) or heads
    for i, (queries, keys) in enumerate(zip(heads, kv_heads, strict=True)):
        if keys and queries % keys:
            what = f"block {i} has {queries} query heads on {keys} key heads"
            refuse(info.path, what, got=(queries, keys), expected="a multiple")
    if not any(heads):
        return  # no attention anywhere
    for key in ("attention.key_length", "attention.value_length"):
        if unsigned(info, key, least=1) is None and info.hidden_size < max(heads):
            what = f"{max(heads)} heads share a hidden size of {info.hidden_size}"
            refuse(info.path, what, got=max(heads), expected=f"no more heads, or the key {info.architecture}.{key}")


def check_window(info: GgufInfo) -> None:
    """A sliding window has a size that positions can be compared with, and layers that use it."""
    window = unsigned(info, "attention.sliding_window", most=2**31 - 1)
    key = f"{info.architecture}.attention.sliding_window_pattern"
    pattern, kind = info.metadata.get(key), info.value_types.get(key)
    if not window or pattern is None:
        return
    if isinstance(pattern, np.ndarray) and kind in ("arr[bool]", "arr[u32]", "arr[i32]"):
        windowed = bool(pattern[: info.num_layers].any())
    elif kind == "u32":
        windowed = pattern != 1  # every n-th layer sees all; 0 means that none does
    else:
        refuse(info.path, f"{key} is of type {kind}", got=kind, expected="u32, or an array with one flag a block")
    if not windowed:
        refuse(info.path, f"{key} leaves no layer for the window", got=pattern, expected="a windowed layer")


def check_rope(info: GgufInfo) -> None:
    """Rotated dimensions are even and inside a head; the scaling has a known name."""
    arch, heads = info.architecture, info.integer("attention.head_count")
    if heads:
        head_size = info.integer("attention.key_length", info.hidden_size // heads)
        _check_rotated(info, "rope.dimension_count", head_size)
        _check_rotated(info, "rope.dimension_count_swa", info.integer("attention.key_length_swa", head_size))
    scaling = info.metadata.get(f"{arch}.rope.scaling.type", "none")
    if not isinstance(scaling, str) or scaling not in _ROPE_SCALINGS:
        what = f"{arch}.rope.scaling.type is {scaling!r}"
        refuse(info.path, what, got=scaling, expected=" or ".join(_ROPE_SCALINGS))
    _check_sections(info)


def _check_rotated(info: GgufInfo, key: str, head_size: int) -> None:
    rotated = unsigned(info, key, most=head_size)
    if rotated is None:
        rotated = head_size  # llama.cpp's default
    # A count of 0 makes a rope kernel loop for ever; architectures without rope never run one.
    if rotated % 2 or (rotated == 0 and f"{info.architecture}.rope.freq_base" in info.metadata):
        refuse(info.path, f"{info.architecture}.{key} is {rotated}", got=rotated, expected="a positive even number")


def _check_sections(info: GgufInfo) -> None:
    """Sections of a multi-dimensional rope: some are positive, and together they fit into a head."""
    key = f"{info.architecture}.rope.dimension_sections"
    sections = info.metadata.get(key)
    if sections is None:
        return
    if not isinstance(sections, np.ndarray) or info.value_types[key] not in ("arr[i32]", "arr[u32]"):
        refuse(info.path, f"{key} is of type {info.value_types[key]}", got=info.value_types[key], expected="arr[i32]")
    head_size = info.hidden_size // max(info.integer("attention.head_count"), 1)
    head_size = info.integer("attention.key_length", head_size)
    values = sections.astype(np.int64)
    if values.min(initial=0) < 0 or not 0 < values.sum() <= head_size:
        what = f"{key} is {values.tolist()}"
        refuse(info.path, what, got=values.tolist(), expected=f"sizes whose sum is 1 to {head_size}")


def check_recurrent(info: GgufInfo) -> None:
    """State sizes of recurrent blocks agree with each other; llama.cpp divides by some of them."""
    keys = ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
    delta_net = info.architecture in _DELTA_NETS
    sizes = {key: unsigned(info, f"ssm.{key}", required=delta_net) for key in keys}
    for key, value in sizes.items():
        if value == 0 and (delta_net or key != "group_count"):  # Mamba has no groups
            refuse(info.path, f"{info.architecture}.ssm.{key} is 0", got=0, expected="1 or more")
    unsigned(info, "full_attention_interval", least=1)
    unsigned(info, "shortconv.l_cache", least=2)
    unsigned(info, "wkv.head_size", least=1)
    expected = sizes["inner_size"]
    if info.architecture == "mamba":
        expected = 2 * info.hidden_size
    elif delta_net:
        rank, groups = sizes["time_step_rank"] or 1, sizes["group_count"] or 1
        expected = rank * (sizes["state_size"] or 1)
        if rank % groups:
            refuse(info.path, f"ssm.time_step_rank is {rank}", got=rank, expected=f"a multiple of group_count {groups}")
    if sizes["inner_size"] != expected:
        what = f"{info.architecture}.ssm.inner_size is {sizes['inner_size']}"
        refuse(info.path, what, got=sizes["inner_size"], expected=expected)
