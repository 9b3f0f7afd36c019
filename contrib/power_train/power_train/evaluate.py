"""
Acceptance of a drafter on text that was already written, without decoding again.

Up to the first mismatch a drafter sees exactly the target's own tokens, so one teacher-forced pass over every anchor
tells how much of each proposal a greedy target would accept; rounds are then replayed along the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many

import torch
from attrs import frozen
from torch import Tensor

from power_train.batches import Batch, DraftVocabulary, load_batch
from power_train.dataset import Dataset, Sequence
from power_train.modules import BlockDrafter, MtpDrafter

__all__ = ["Acceptance", "Drafts", "drafts_of", "measure"]

Drafts = Callable[[Batch, Tensor, int], Tensor]
"""``drafts(batch, anchors, k)``: int64[n, blocks, k], the ids proposed after each anchor."""

_BATCH, _ANCHORS = 8, 48


@frozen
class Acceptance:
    """
    What replaying rounds of K proposals gave.

    Args:
        draft_max: K.
        rounds: Target passes.
        accepted: Proposed tokens that the target would have chosen.
        positions: For each position the share of the rounds in which it was accepted.
    """

    draft_max: int
    rounds: int
    accepted: int
    positions: tuple[float, ...]

    @property
    def mean_accepted(self) -> float:
        return self.accepted / max(1, self.rounds)

    @property
    def tokens_per_pass(self) -> float:
        return 1 + self.mean_accepted


def drafts_of(module: BlockDrafter | MtpDrafter, vocabulary: DraftVocabulary, matrix: Tensor) -> Drafts:
    """How *module* proposes, greedily, with the text's own tokens as the ones before."""

    def drafts(batch: Batch, anchors: Tensor, k: int) -> Tensor:
        if isinstance(module, MtpDrafter):
            states = torch.stack(module.passes(batch.features, batch.tokens, anchors, k), 2)
            return vocabulary.ids[_best(states, matrix)]
        return vocabulary.ids[_block_rows(module, batch, anchors, matrix)[:, :, :k]]

    return drafts


def _block_rows(module: BlockDrafter, batch: Batch, anchors: Tensor, matrix: Tensor) -> Tensor:
    """int64[n, blocks, proposals]: the matrix rows a block drafter proposes."""
    hidden = module.hidden(batch.features, batch.tokens, anchors, module.shape.block)[:, :, module.first_row :]
    index = (anchors[..., None] + torch.arange(hidden.shape[2])).clamp(max=batch.tokens.shape[1] - 1)
    previous = batch.tokens.gather(1, index.flatten(1)).view_as(index)
    if module.shape.kind == "dspark":
        return _best(module.markov(hidden, previous), matrix)
    if module.shape.kind == "dflash2":
        return _walk(module, hidden, previous, matrix)
    return _best(hidden, matrix)


def _best(states: Tensor, matrix: Tensor) -> Tensor:
    return (states.bfloat16() @ matrix.T).float().argmax(-1)


def _walk(module: BlockDrafter, hidden: Tensor, previous: Tensor, matrix: Tensor) -> Tensor:
    """DFlash2: the best of each position's candidates, given the token before."""
    logits = (hidden.bfloat16() @ matrix.T).float()
    candidates = logits.topk(module.shape.top_k, -1).indices
    scores = (module.markov(hidden, previous).bfloat16() @ matrix.T).float().gather(-1, candidates)
    return candidates.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)


@torch.no_grad()
def measure(drafts: Drafts, dataset: Dataset, sequences: Many[Sequence], draft_max: Many[int]) -> dict[int, Acceptance]:
    """Replay *sequences* with each K of *draft_max*; only greedy ones say anything about a greedy target."""
    lengths = [found for part in _batched(sequences) for found in _lengths(drafts, dataset, part, max(draft_max))]
    return {k: _replay(lengths, k) for k in draft_max}


def _batched(sequences: Many[Sequence]) -> Iterator[list[Sequence]]:
    ordered = sorted(sequences, key=lambda item: item.length)
    for start in range(0, len(ordered), _BATCH):
        yield ordered[start : start + _BATCH]


def _lengths(drafts: Drafts, dataset: Dataset, items: list[Sequence], k: int) -> list[Tensor]:
    """For each sequence int64[anchors]: how many proposals after each token of the answer match the text."""
    batch = load_batch(dataset, items)
    most = int((batch.lengths - batch.answers).max()) - 1
    parts = []
    for start in range(0, most, _ANCHORS):
        offsets = torch.arange(start, min(start + _ANCHORS, most))
        anchors = (batch.answers[:, None] + offsets).clamp(max=batch.tokens.shape[1] - 2)
        index = anchors[..., None] + 1 + torch.arange(k)
        is_inside = index < batch.lengths[:, None, None]
        found = drafts(batch, anchors, k)
        index = index[..., : found.shape[2]].clamp(max=batch.tokens.shape[1] - 1)
        truth = batch.tokens.gather(1, index.flatten(1)).view_as(index)
        hits = (truth == found) & is_inside[..., : found.shape[2]]
        parts.append(hits.long().cumprod(-1).sum(-1))
    every = torch.cat(parts, 1)
    return [every[row, : item.length - item.prompt_length - 1] for row, item in enumerate(items)]


def _replay(lengths: list[Tensor], k: int) -> Acceptance:
    rounds = accepted = 0
    positions = [0] * k
    for found in lengths:
        anchor = 0
        while anchor < len(found):
            kept = min(int(found[anchor]), k)
            rounds, accepted, anchor = rounds + 1, accepted + kept, anchor + kept + 1
            for position in range(kept):
                positions[position] += 1
    return Acceptance(k, rounds, accepted, tuple(count / max(1, rounds) for count in positions))
