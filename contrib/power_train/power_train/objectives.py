"""What each kind learns from a batch: predictions, labels and weights, put together from the published losses."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from power_train.batches import Batch, DraftVocabulary
from power_train.losses import IGNORED, HeadResult, head_loss, pass_weights, position_weights
from power_train.modules import BlockDrafter, MtpDrafter

__all__ = ["Objective", "ObjectiveOptions", "StepResult"]

_SHORT_ROWS = 4
_ALWAYS = 2048


@frozen
class ObjectiveOptions:
    """
    Weights of the losses.

    Args:
        anchors: Blocks a sequence.
        gamma: Of the decay over a block's positions.
        variation: Weight of DSpark's total variation against its cross-entropy.
        confidence: Weight of DSpark's confidence loss.
        pass_decay: Of MTP's recurrent passes.
        short_share: Share of the steps whose blocks have four rows instead of all: the late positions are seldom
            reached and cost as much as the early ones, and a drafter asked for three tokens has seen such blocks.
    """

    anchors: int = 40
    gamma: float = 4.0
    variation: float = 0.5
    confidence: float = 1.0
    pass_decay: float = 0.8
    short_share: float = 0.5


@frozen(eq=False)
class StepResult:
    """A step's loss with its gradient, and what to show of it."""

    loss: Tensor
    cross_entropy: float
    hits: float


class Objective:
    """
    The loss of one kind.

    Args:
        module: The drafter.
        vocabulary: What it can propose.
        matrix: bfloat16[draft vocabulary, hidden]: the target's output rows; frozen.
        options: Weights.
    """

    def __init__(
        self,
        module: BlockDrafter | MtpDrafter,
        vocabulary: DraftVocabulary,
        matrix: Tensor,
        options: ObjectiveOptions,
    ) -> None:
        self._module, self._vocabulary, self._matrix, self._options = module, vocabulary, matrix, options

    def step(self, batch: Batch, rng: np.random.Generator) -> StepResult:
        """The loss of *batch*, its anchors placed by *rng*."""
        anchors = batch.anchors(self._options.anchors, rng)
        if isinstance(self._module, MtpDrafter):
            return self._mtp(self._module, batch, anchors)
        is_short = rng.random() < self._options.short_share
        rows = (
            min(_SHORT_ROWS + self._module.first_row, self._module.shape.block)
            if is_short
            else self._module.shape.block
        )
        return self._block(self._module, batch, anchors, rows)

    def _block(self, module: BlockDrafter, batch: Batch, anchors: Tensor, rows: int) -> StepResult:
        hidden = module.hidden(batch.features, batch.tokens, anchors, rows)[:, :, module.first_row :]
        count = hidden.shape[2]
        index, labels, previous = self._predicted(batch, anchors, count)
        weights = position_weights(count, self._options.gamma).expand_as(labels)
        if module.shape.kind == "dspark":
            target = _gathered(batch.final, index - 1)
            states = module.markov(hidden, previous)
            result = self._head(states, labels, weights, target, self._options.variation)
            loss = result.loss + self._options.confidence * _confidence_loss(
                module.confidence_logit(hidden, previous), result.acceptance.view_as(labels), weights, labels
            )
            return StepResult(loss, result.cross_entropy, _mean(result.hits, labels))
        states = hidden
        if module.shape.kind == "dflash2":
            # Half of the blocks train the candidates' own logits, half those with the predecessor's share: the lattice
            # takes the first to choose candidates and the second to choose among them.
            corrected = module.markov(hidden, previous)
            is_plain = (torch.arange(anchors.shape[1]) % 2 == 0)[None, :, None, None]
            states = torch.where(is_plain, hidden, corrected)
        result = self._head(states, labels, weights, None, 0.0)
        return StepResult(result.loss, result.cross_entropy, _mean(result.hits, labels))

    def _mtp(self, module: MtpDrafter, batch: Batch, anchors: Tensor) -> StepResult:
        passes = module.shape.block
        states = torch.stack(module.passes(batch.features, batch.tokens, anchors, passes), 2)
        _, labels, _ = self._predicted(batch, anchors, passes)
        weights = pass_weights(passes, self._options.pass_decay).expand_as(labels)
        result = self._head(states, labels, weights, None, 0.0)
        return StepResult(result.loss, result.cross_entropy, _mean(result.hits, labels))

    def _head(
        self, states: Tensor, labels: Tensor, weights: Tensor, target: Tensor | None, variation: float
    ) -> HeadResult:
        """
        The loss over the most frequent rows and the batch's own labels.

        The rest of the vocabulary would be most of a step's arithmetic and next to none of its gradient: measured,
        drafters trained so lose nothing when all rows are back.
        """
        rare = torch.unique(labels[labels >= _ALWAYS])
        rows = torch.cat((torch.arange(min(_ALWAYS, len(self._matrix))), rare))
        near = torch.where(labels >= _ALWAYS, _ALWAYS + torch.searchsorted(rare, labels), labels)
        return head_loss(
            states.flatten(0, -2), near.flatten(), weights.flatten(), self._matrix[rows],
            target_states=None if target is None else target.flatten(0, -2), variation=variation,
        )  # fmt: skip

    def _predicted(self, batch: Batch, anchors: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Index of each predicted token [n, blocks, count], its row as label, and the token before it."""
        index = anchors[..., None] + 1 + torch.arange(count)
        is_inside = index < batch.lengths[:, None, None]
        index = torch.where(is_inside, index, anchors[..., None])
        flat = index.flatten(1)
        labels = self._vocabulary.rows[batch.tokens.gather(1, flat)].view_as(index)
        labels = torch.where(is_inside, labels, IGNORED)
        return index, labels, batch.tokens.gather(1, flat - 1).view_as(index)


def _gathered(values: Tensor, index: Tensor) -> Tensor:
    """Rows [n, blocks, count, hidden] of values [n, length, hidden]."""
    flat = index.flatten(1)[..., None].expand(-1, -1, values.shape[-1])
    return values.gather(1, flat).view(*index.shape, -1)


def _confidence_loss(logits: Tensor, acceptance: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
    """
    DSpark's confidence term, binary cross-entropy to the rate at which the target would accept.

        L_conf = sum_i w_i BCE(c_i, 1 - TV(p_i, q_i)) / sum_i w_i
    """
    weights = weights * (labels != IGNORED)
    losses = binary_cross_entropy_with_logits(logits, acceptance.clamp(0, 1), reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)


def _mean(hits: Tensor, labels: Tensor) -> float:
    """Share of the first predictions after an anchor that hit; a label without a row is a miss."""
    return float(hits.view_as(labels)[..., 0].float().mean())
