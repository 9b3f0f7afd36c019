"""What a session takes at most, from the file's header alone: reserved before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from power_core.target import SessionOptions
from power_llamacpp.config import KvType, LlamaCppConfig
from power_llamacpp.context import CELL_BLOCK
from power_llamacpp.gguf_file import GgufInfo
from power_llamacpp.lora import LoraAdapter

__all__ = ["session_bytes"]

# Bytes of 32 elements (ggml's block_size and type_size).
_BYTES_OF_32 = {
    KvType.F32: 128, KvType.F16: 64, KvType.BF16: 64, KvType.Q8_0: 34, KvType.Q5_1: 24, KvType.Q5_0: 22,
    KvType.Q4_1: 20, KvType.Q4_0: 18, KvType.IQ4_NL: 18,
}  # fmt: skip
_FLOAT = 4


def session_bytes(
    info: GgufInfo,
    options: SessionOptions,
    config: LlamaCppConfig,
    context_size: int,
    adapters: Sequence[LoraAdapter] = (),
) -> int:
    """
    An upper bound of a session's bytes: caches, resident and copied states, logits, work space, adapters.

    Args:
        info: The file.
        options: Of the session.
        config: The plugin's configuration.
        context_size: Positions of a sequence.
        adapters: What is added to the weights; each session counts them, which share them.
    """
    cells = (-(-context_size // CELL_BLOCK) + 1) * CELL_BLOCK  # one block more, for pad rows
    sequences = options.max_sequences
    attention = cells * sequences * _kv_row(info, config.kv_type)
    # Resident states, the current one, a checkpoint's copy, and one being restored.
    recurrent = sequences * (options.rollback_rows + 3) * _state(info)
    rows = max(config.prefill_rows, options.max_rows)
    heads = _most(info, "attention.head_count", 1)
    work = _FLOAT * rows * (8 * info.hidden_size + 3 * _most(info, "feed_forward_length", 0) + heads * cells)
    vocabulary = len(info.metadata.get("tokenizer.ggml.tokens", ()))
    logits = _FLOAT * vocabulary * (2 * max(options.max_rows, 32) + sequences)
    lora = sum(adapter.info.file_size for adapter in adapters) + max(
        (2 * _FLOAT * rows * adapter.widest + 2 * logits * adapter.has_output for adapter in adapters), default=0
    )  # beside what a matrix gives there is the change of it, before and after it was scaled
    return int(attention + recurrent + work + logits + lora)


def _kv_row(info: GgufInfo, kv_type: KvType) -> int:
    """Bytes of one position's keys and values over all blocks; a block without attention counts as one that has it."""
    heads = _most(info, "attention.head_count", 1)
    kv_heads = _most(info, "attention.head_count_kv", heads)
    per_head = info.hidden_size // max(heads, 1)
    width = _most(info, "attention.key_length", per_head) + _most(info, "attention.value_length", per_head)
    return -(-info.num_layers * kv_heads * width * _BYTES_OF_32[kv_type] // 32)


def _state(info: GgufInfo) -> int:
    """Bytes of one sequence's recurrent state over all blocks; 0 where there is none."""
    inner = max(_most(info, "ssm.inner_size", 0), info.hidden_size if _most(info, "ssm.conv_kernel", 0) else 0)
    columns = _most(info, "ssm.state_size", 0)
    groups = max(_most(info, "ssm.group_count", 0), 1)
    convolution = max(_most(info, "ssm.conv_kernel", 0), _most(info, "shortconv.l_cache", 0))
    width = inner + 2 * groups * columns if inner else info.hidden_size
    return _FLOAT * info.num_layers * (convolution * width + inner * columns)


def _most(info: GgufInfo, key: str, default: int) -> int:
    """The largest value of *key*, which may be one number or one for each block."""
    value = info.metadata.get(f"{info.architecture}.{key}", default)
    return int(np.max(value)) if np.size(value) else default
