"""What a session takes at most, from the model's sizes alone: reserved before anything is allocated."""

from __future__ import annotations

import torch

from power_core.target import SessionOptions
from power_torch.cache import spans_of
from power_torch.hparams import HyperParameters

__all__ = ["session_bytes", "weight_bytes"]

_FLOAT = 4
_COPIES = 6  # rows that the probe holds, in widest forwards: results it keeps, parts, their join


def session_bytes(
    hparams: HyperParameters, options: SessionOptions, *, positions: int, prefill_rows: int, dtype: torch.dtype
) -> int:
    """
    An upper bound of a session's bytes: cache, rotations, the work space of its widest forward and that of the probe.

    Args:
        hparams: The model's sizes.
        options: Of the session.
        positions: Cache rows of a sequence.
        prefill_rows: Rows of the widest forward.
        dtype: Of the matrices.
    """
    span = spans_of(positions)[-1]
    cache = _FLOAT * options.max_sequences * span * hparams.num_layers * 2 * hparams.kv_size
    rotations = 2 * _FLOAT * positions * hparams.head_dim
    heads = hparams.query_size + 2 * hparams.kv_size
    row = 8 * hparams.hidden_size + 3 * heads + 4 * hparams.ffn_size + len(options.hidden_layers) * hparams.hidden_size
    scores = 4 * hparams.num_heads * span  # two masks, scores, their softmax
    forward = _FLOAT * prefill_rows * (row + scores)
    # The probe compares all that was computed for a row, and products of the model's shapes, as made up and as packed.
    left = hparams.vocab_size + hparams.num_layers * (
        2 * hparams.kv_size + 2 * hparams.hidden_size + hparams.query_size
    )
    matrices = _block(hparams) + hparams.vocab_size * hparams.hidden_size
    probe = _FLOAT * prefill_rows * _COPIES * left + 2 * matrices * dtype.itemsize
    return int(cache + rotations + forward + probe)


def weight_bytes(hparams: HyperParameters, dtype: torch.dtype) -> tuple[int, int]:
    """The most bytes that weights take for good, in the layout of the kernels, and what loading takes beside them."""
    blocks = hparams.num_layers * _block(hparams)
    vocabulary = 3 * hparams.vocab_size * hparams.hidden_size  # embedding, output, output in the kernels' layout
    return (blocks + vocabulary) * dtype.itemsize, blocks * dtype.itemsize


def _block(hparams: HyperParameters) -> int:
    """Elements of a block's matrices."""
    return hparams.hidden_size * (2 * hparams.query_size + 2 * hparams.kv_size + 3 * hparams.ffn_size)
