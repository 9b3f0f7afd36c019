"""Training: it learns, it resumes, and it is the same every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from power_train.batches import split
from power_train.dataset import Dataset
from power_train.evaluate import drafts_of, measure
from power_train.setup import KINDS, Trainable, default_layers
from power_train.train import CurvePoint, TrainOptions, TrainResult, train

from power_core.errors import ArtifactError

STEPS = 12
Made = Callable[[str], Trainable]


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def trained(
    kind: str, made: Made, dataset: Dataset, checkpoint: Path, stop: int | None = None
) -> tuple[torch.nn.Module, TrainResult]:
    """A drafter after `STEPS` steps, or after an interruption at step *stop*."""
    trainable = made(kind)
    sequences, _ = split(dataset)

    def progress(step: int, _point: CurvePoint) -> None:
        if step == stop:
            raise Interrupted

    try:
        result = train(trainable, dataset, sequences, TrainOptions(STEPS, sequences=4), checkpoint, progress)
    except Interrupted:
        result = TrainResult()
    return trainable.module, result


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_where_an_undisturbed_one_does(
    kind: str, made: Made, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of one seed are equal bit for bit, and so is one that was interrupted and started again."""
    monkeypatch.setattr("power_train.train._SAVE_SECONDS", -1.0)
    whole, result = trained(kind, made, dataset, tmp_path / "whole.pt")
    trained(kind, made, dataset, tmp_path / "parts.pt", stop=7)
    parts, resumed = trained(kind, made, dataset, tmp_path / "parts.pt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
    assert resumed.curve == result.curve
    untouched = made(kind).module
    assert not any(torch.equal(a, b) for a, b in zip(whole.parameters(), untouched.parameters(), strict=True))


def test_a_checkpoint_of_another_run_is_refused(made: Made, dataset: Dataset, tmp_path: Path) -> None:
    """Other options, another kind, or a damaged file: one line, and nothing is overwritten."""
    trained("dflash-v1", made, dataset, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    with pytest.raises(ArtifactError, match="other shape"):
        trained("mtp-head", made, dataset, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == content
    (tmp_path / "a.pt").write_bytes(content[:100])
    with pytest.raises(ArtifactError, match="no checkpoint"):
        trained("dflash-v1", made, dataset, tmp_path / "a.pt")


@pytest.mark.parametrize("kind", ["dspark", "mtp-head"])
def test_drafters_learn_a_targets_text(kind: str, made: Made, dataset: Dataset, tmp_path: Path) -> None:
    """After sixty steps on a text, more of it is predicted than before, and the loss has fallen."""
    trainable = made(kind)
    sequences, _ = split(dataset)
    greedy = [item for item in sequences if not item.is_sampled]
    drafts = drafts_of(trainable.module, trainable.vocabulary, trainable.matrix)
    before = measure(drafts, dataset, greedy, [3])[3]
    result = train(trainable, dataset, sequences, TrainOptions(60, sequences=8), tmp_path / "c.pt", lambda *_: None)
    after = measure(drafts, dataset, greedy, [3])[3]
    assert result.curve[-1].cross_entropy < result.curve[0].cross_entropy - 0.5
    assert after.tokens_per_pass > before.tokens_per_pass + 0.2
    assert after.positions[0] >= after.positions[1] >= after.positions[2]


def test_layers_are_spread_and_leave_the_last_out() -> None:
    """Any depth gives ascending blocks below the last."""
    assert default_layers(30) == (1, 10, 19, 28)
    for depth in range(2, 80):
        layers = default_layers(depth)
        assert list(layers) == sorted(set(layers))
        assert layers[-1] < depth - 1 or depth == 1
