"""Keys under ``dflash.`` in a GGUF header that mean something to a DFlash drafter, with their types."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from power_core.artifacts import TensorFile
from power_core.artifacts.keys import check_keys
from power_dflash.keys import Keys

__all__ = ["check_gguf_keys"]

_U32, _F32, _BOOL, _TEXT = (frozenset([kind]) for kind in ("u32", "f32", "bool", "str"))
_IDS = frozenset({"arr[i32]", "arr[u32]"})
_READ: Mapping[str, Collection[str]] = {
    **dict.fromkeys(
        ("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "block_size",
         "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
         "attention.sliding_window", "rope.dimension_count", "selector_rank", "selector_top_k", "conv_kernel_size",
         "conv_group_size"),
        _U32,
    ),
    **dict.fromkeys(
        ("attention.layer_norm_rms_epsilon", "rope.freq_base", "embedding_scale", "logit_scale",
         "final_logit_softcapping"),
        _F32,
    ),
    "target_layers": _IDS,
    "rope.dimension_sections": _IDS,
    "attention.sliding_window_pattern": _IDS | {"arr[bool]"},
}  # fmt: skip
# Keys that llama.cpp would follow and the torch executor does not compute: their types, and the values that change
# nothing.
_NEUTRAL: Mapping[str, tuple[Collection[str], tuple[object, ...]]] = {
    "attention.causal": (_BOOL, (False,)),
    "hidden_activation": (_TEXT, ("silu",)),
    "rope.scaling.type": (_TEXT, ("none",)),
    **dict.fromkeys(("rope.scaling.factor", "rope.scale_linear"), (_F32, (0.0, 1.0))),
    **dict.fromkeys(("attention.scale", "attention.value_scale"), (_F32, (0.0,))),
    **dict.fromkeys(("expert_count", "expert_used_count", "nextn_predict_layers"), (_U32, (0,))),
}


def check_gguf_keys(file: TensorFile, keys: Keys) -> None:
    """
    Check that every key under ``dflash.`` is one that the executors agree about, and of llama.cpp's type.

    Raises:
        ArtifactError: Names the first key that is not.
    """
    check_keys(file, keys.prefix, {**_READ, **{key: kinds for key, (kinds, _) in _NEUTRAL.items()}}, plugin="dflash")
    for key, (_, values) in _NEUTRAL.items():
        keys.absent(key, "absent or " + " or ".join(map(repr, values)), *values)
