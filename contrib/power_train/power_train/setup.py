"""From a target and its text to a drafter that can be trained: sizes, vocabulary, first weights."""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from power_torch.hparams import HyperParameters
from power_torch.weights import ModelWeights
from torch import Tensor

from power_core.errors import CapabilityError
from power_core.target import Tokenizer
from power_core.types import TokenId
from power_train.batches import DraftVocabulary, draft_vocabulary, feature_scale
from power_train.dataset import Dataset, Sequence
from power_train.modules import BlockDrafter, DrafterShape, MtpDrafter

__all__ = ["KINDS", "Trainable", "default_layers", "drafter_shape", "make_trainable", "mask_token"]

KINDS = ("dflash-v1", "dflash2", "dspark", "mtp-head")
_BLOCKS = {"dflash-v1": 8, "dflash2": 8, "dspark": 7, "mtp-head": 4}
_NORM_GAIN = 0.3  # of the target's: its own makes the first logits so sharp that training has to undo them


@frozen(eq=False)
class Trainable:
    """
    A drafter and what it needs of the target.

    Args:
        module: The drafter.
        vocabulary: What it can propose.
        matrix: bfloat16[draft vocabulary, hidden]: the target's output rows.
    """

    module: BlockDrafter | MtpDrafter
    vocabulary: DraftVocabulary
    matrix: Tensor


def default_layers(num_layers: int) -> tuple[int, ...]:
    """
    Four blocks spread over the target; the last block's output is left out: no library hands it out for prompts.

    >>> default_layers(30)
    (1, 10, 19, 28)
    """
    if num_layers < 6:
        return tuple(range(num_layers - 1)) or (0,)
    return tuple(1 + round(i * (num_layers - 3) / 3) for i in range(4))


def mask_token(tokenizer: Tokenizer, embedding: Tensor) -> TokenId:
    """
    The special id whose embedding is least like the average one.

    The rows after an anchor are this token's embedding. Natively it comes from the target, so that it cannot be
    trained; ids that text never had still sit at the average, whose few huge dimensions drown everything else.
    """
    wide = embedding.float()
    mean = wide.mean(0)
    candidates = sorted({*tokenizer.special_ids, *tokenizer.end_ids}) or [0]
    likeness = torch.nn.functional.cosine_similarity(wide[candidates], mean[None])
    return int(candidates[int(likeness.argmin())])


def drafter_shape(
    kind: str,
    hparams: HyperParameters,
    layers: tuple[int, ...],
    mask_id: TokenId,
    *,
    ffn: int | None = None,
    block: int | None = None,
    blocks: int = 1,
    kv_heads: int | None = None,
) -> DrafterShape:
    """
    Sizes of a drafter of *kind*: heads and widths are the target's.

    Args:
        kind: One of `KINDS`.
        hparams: The target's.
        layers: Target block outputs read.
        mask_id: Of the rows after an anchor.
        ffn: Width of the feed-forward; None takes the target's.
        block: Rows of a round, or MTP's passes; None takes the kind's default.
        blocks: Decoder layers; MTP heads have one.
        kv_heads: Key and value heads; None takes the target's.

    Raises:
        CapabilityError: Nothing trains this kind.
    """
    if kind not in KINDS:
        raise CapabilityError(f"drafters of kind {kind!r} cannot be trained", expected=" or ".join(KINDS), got=kind)
    shape = DrafterShape(
        kind=kind, hidden=hparams.hidden_size, ffn=ffn or hparams.ffn_size, heads=hparams.num_heads,
        kv_heads=kv_heads or hparams.num_kv_heads, head_dim=hparams.head_dim, epsilon=hparams.norm_epsilon,
        rope_base=hparams.rope_base, layers=layers, block=block or _BLOCKS[kind], blocks=blocks, mask_id=mask_id,
    )  # fmt: skip
    if kind == "dspark":
        return evolve(shape, rank=32)
    if kind == "dflash2":
        group = next(size for size in (64, 32, 16, 8, 4, 2, 1) if hparams.hidden_size % size == 0)
        top_k = next(k for k in (8, 4, 2, 1) if k * (k + 1) <= hparams.hidden_size)
        return evolve(shape, rank=32, kernel=4, group=group, top_k=top_k)
    return shape


def make_trainable(
    shape: DrafterShape,
    weights: ModelWeights,
    dataset: Dataset,
    sequences: list[Sequence],
    *,
    draft_vocab: int,
    seed: int,
) -> Trainable:
    """A drafter with its first weights, from *seed*."""
    vocabulary = draft_vocabulary(dataset, sequences, draft_vocab, weights.hparams.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    kind = MtpDrafter if shape.kind == "mtp-head" else BlockDrafter
    module = kind(
        shape, weights.token_embd, feature_scale(dataset, sequences), weights.output_norm * _NORM_GAIN, generator
    )
    return Trainable(module, vocabulary, weights.output[vocabulary.ids].contiguous())
