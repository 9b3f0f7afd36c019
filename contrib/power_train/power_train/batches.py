"""Batches of generated sequences: which, in which order, and where their blocks start."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from power_train.dataset import Dataset, Sequence

__all__ = ["Batch", "Batches", "DraftVocabulary", "draft_vocabulary", "feature_scale", "load_batch", "split"]

_WINDOW = 32  # batches whose sequences are sorted by length together: little padding, and still a shuffle
_SCALED_TOKENS = 4096
_HELD_OUT = 40  # one sequence in so many is never trained on


@frozen(eq=False)
class Batch:
    """
    Sequences padded to one length.

    Args:
        tokens: int64[n, length].
        features: bfloat16[n, length, layers * hidden].
        final: bfloat16[n, length, hidden], after the target's last norm.
        lengths: int64[n].
        answers: int64[n]; index of the first token the target wrote.
    """

    tokens: Tensor
    features: Tensor
    final: Tensor
    lengths: Tensor
    answers: Tensor

    def anchors(self, count: int, rng: np.random.Generator) -> Tensor:
        """int64[n, count]: indices of tokens that blocks start from, spread over each answer; never the last."""
        first, last = self.answers.numpy()[:, None], self.lengths.numpy()[:, None] - 2
        strata = (np.arange(count) + rng.random((len(first), count))) / count
        return torch.from_numpy(first + np.floor(strata * np.maximum(last - first + 1, 1)).astype(np.int64))


@frozen(eq=False)
class DraftVocabulary:
    """
    The ids a drafter can propose.

    Args:
        ids: int64[rows], most frequent first.
        rows: int64[vocab]; the row of each id, -1 where it has none.
        coverage: Share of the generated tokens that have a row.
    """

    ids: Tensor
    rows: Tensor
    coverage: float


def split(dataset: Dataset) -> tuple[list[Sequence], list[Sequence]]:
    """
    Sequences to train on and those held out, by prompt: the first are unaffected by how many there are.

    Sequences whose answer is shorter than two tokens are in neither.
    """
    usable = [item for item in dataset.sequences if item.length - item.prompt_length >= 2]
    usable.sort(key=lambda item: item.prompt)
    held = [item for item in usable if item.prompt % _HELD_OUT == 0]
    return [item for item in usable if item.prompt % _HELD_OUT], held


def draft_vocabulary(dataset: Dataset, sequences: Many[Sequence], size: int, vocab_size: int) -> DraftVocabulary:
    """The *size* most frequent ids of the answers; ids that never occur fill up in ascending order."""
    counts = np.zeros(vocab_size, np.int64)
    for item in sequences:
        counts += np.bincount(dataset.tokens(item)[item.prompt_length :], minlength=vocab_size)
    ids = np.argsort(-counts, kind="stable")[:size]
    rows = np.full(vocab_size, -1, np.int64)
    rows[ids] = np.arange(len(ids))
    return DraftVocabulary(torch.from_numpy(ids), torch.from_numpy(rows), float(counts[ids].sum() / counts.sum()))


def feature_scale(dataset: Dataset, sequences: Many[Sequence]) -> Tensor:
    """
    float32[layers * hidden]: 1 / RMS of every feature over some thousand tokens.

    Single dimensions reach hundreds where most are around one; without this, training sees little but them. The first
    row of a sequence is left out: as the place attention goes to for nothing, it is like no other.
    """
    total, count = torch.zeros(()), 0
    for item in sequences:
        rows = _floats(dataset.features(item)[1 : item.length - 1]).float()
        total = total + rows.square().sum(0)
        count += len(rows)
        if count >= _SCALED_TOKENS:
            break
    return (total / max(count, 1)).sqrt().clamp(min=1e-3).reciprocal()


def load_batch(dataset: Dataset, sequences: Many[Sequence]) -> Batch:
    """Read and pad *sequences*."""
    n, length = len(sequences), max(item.length for item in sequences)
    first = sequences[0]
    tokens = torch.zeros(n, length, dtype=torch.long)
    features = torch.zeros(n, length, dataset.features(first).shape[1], dtype=torch.bfloat16)
    final = torch.zeros(n, length, dataset.final(first).shape[1], dtype=torch.bfloat16)
    for row, item in enumerate(sequences):
        tokens[row, : item.length] = torch.from_numpy(np.array(dataset.tokens(item), np.int64))
        features[row, : item.length] = _floats(dataset.features(item))
        final[row, : item.length] = _floats(dataset.final(item))
    return Batch(
        tokens,
        features,
        final,
        torch.tensor([item.length for item in sequences]),
        torch.tensor([item.prompt_length for item in sequences]),
    )


def _floats(bits: NDArray[np.uint16]) -> Tensor:
    return torch.from_numpy(np.array(bits).view(np.int16)).view(torch.bfloat16)


class Batches:
    """
    Batch number s of a run, for any s, from the seed alone: a resumed run goes on with the same ones.

    Args:
        dataset: The text.
        sequences: What to draw from.
        size: Sequences of a batch.
        seed: Of the order.
    """

    def __init__(self, dataset: Dataset, sequences: Many[Sequence], size: int, seed: int) -> None:
        self._dataset, self._sequences, self._seed = dataset, list(sequences), seed
        self._size = min(size, len(self._sequences))
        self.epoch_steps = max(1, len(self._sequences) // self._size)
        self._epoch, self._order = -1, np.empty((0, 0), np.int64)

    def get(self, step: int) -> tuple[Batch, np.random.Generator]:
        """The batch of *step*, and the generator that places its anchors."""
        epoch, index = divmod(step, self.epoch_steps)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._ordered(epoch)
        items = [self._sequences[i] for i in self._order[index]]
        return load_batch(self._dataset, items), np.random.default_rng((self._seed, 1, step))

    def _ordered(self, epoch: int) -> NDArray[np.int64]:
        rng = np.random.default_rng((self._seed, 0, epoch))
        order = rng.permutation(len(self._sequences))[: self.epoch_steps * self._size]
        lengths = np.array([self._sequences[i].length for i in order])
        window = _WINDOW * self._size
        parts = [
            order[start : start + window][np.argsort(lengths[start : start + window], kind="stable")]
            for start in range(0, len(order), window)
        ]
        batches = np.concatenate(parts).reshape(-1, self._size)
        return batches[rng.permutation(len(batches))]
