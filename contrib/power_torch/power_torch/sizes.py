"""What a session takes at most, from the model's sizes alone: reserved before anything is allocated."""

from __future__ import annotations

import torch

from power_core.target import SessionOptions
from power_torch.cache import spans_of
from power_torch.hparams import HyperParameters

__all__ = ["session_bytes", "weight_bytes"]

_FLOAT = 4
_COPIES = 4  # of what a row leaves behind while the probe compares it: parts, their join, and results it keeps


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
    # The probe keeps rows of each width, in all less than twice the widest, of all that was computed for them.
    left = hparams.vocab_size + hparams.num_layers * (
        2 * hparams.kv_size + 2 * hparams.hidden_size + hparams.query_size
    )
    probe = _FLOAT * 2 * prefill_rows * _COPIES * left + 3 * _matrices(hparams, 1) * dtype.itemsize
    return int(cache + rotations + forward + probe)


def weight_bytes(hparams: HyperParameters, dtype: torch.dtype) -> int:
    """The most bytes the weights take while they are put into the layout of the kernels: as read, and once more."""
    return 2 * _matrices(hparams, hparams.num_layers) * dtype.itemsize


def _matrices(hparams: HyperParameters, layers: int) -> int:
    """Elements of the matrices of *layers* blocks, embedding and output."""
    heads = 2 * hparams.query_size + 2 * hparams.kv_size
    return layers * hparams.hidden_size * (heads + 3 * hparams.ffn_size) + 2 * hparams.vocab_size * hparams.hidden_size
