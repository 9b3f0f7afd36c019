"""The training loop: resumable at any step, and the same on one machine for the same seed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, define, field, frozen

from power_core.errors import ArtifactError
from power_train.batches import Batches
from power_train.dataset import Dataset, Sequence
from power_train.objectives import Objective, ObjectiveOptions
from power_train.optim import Optimizer, OptimOptions
from power_train.setup import Trainable

__all__ = ["CurvePoint", "TrainOptions", "TrainResult", "measured_pace", "take_weights", "train"]

_PACE_STEPS = (2, 6)  # warm-up steps and timed ones
_SAVE_SECONDS = 60.0
_POINT_STEPS = 10


@frozen
class TrainOptions:
    """
    A run.

    Args:
        steps: Optimizer steps.
        seed: Of batches and anchors.
        sequences: Of a batch.
        objective: Weights of the losses.
        optim: Rates.
    """

    steps: int
    seed: int = 0
    sequences: int = 8
    objective: ObjectiveOptions = field(factory=ObjectiveOptions)
    optim: OptimOptions = field(factory=OptimOptions)


@frozen
class CurvePoint:
    """One point of the loss curve: means over the steps since the one before."""

    step: int
    cross_entropy: float
    hits: float


@define
class TrainResult:
    """
    What a run did, over all its parts.

    Args:
        curve: Every tenth step.
        wall_seconds: Time it took.
        core_seconds: Processor time it took.
    """

    curve: list[CurvePoint] = field(factory=list)
    wall_seconds: float = 0.0
    core_seconds: float = 0.0


def measured_pace(trainable: Trainable, dataset: Dataset, sequences: list[Sequence], options: TrainOptions) -> float:
    """Seconds of one step, measured on *trainable*, which is spent by it."""
    loop = _Loop(trainable, dataset, sequences, options)
    first, timed = _PACE_STEPS
    for step in range(first):
        loop.step(step)
    began = time.monotonic()
    for step in range(first, first + timed):
        loop.step(step)
    return (time.monotonic() - began) / timed


def train(
    trainable: Trainable,
    dataset: Dataset,
    sequences: list[Sequence],
    options: TrainOptions,
    checkpoint: Path,
    progress: Callable[[int, CurvePoint], None],
) -> TrainResult:
    """
    Train *trainable* in place; goes on from *checkpoint* where there is one.

    Args:
        trainable: The drafter.
        dataset: The text.
        sequences: What to train on.
        options: The run; a checkpoint of another run is refused.
        checkpoint: File that is written once a minute and at the end.
        progress: Called after each step with the number done and the last point of the curve.

    Raises:
        ArtifactError: The checkpoint is of other options or of another drafter.
    """
    loop = _Loop(trainable, dataset, sequences, options)
    done = loop.load(checkpoint) if checkpoint.exists() else 0
    result = loop.result
    clocks = _Clocks(result)
    saved = time.monotonic()
    for step in range(done, options.steps):
        point = loop.step(step)
        progress(step + 1, point)
        if time.monotonic() - saved > _SAVE_SECONDS:
            clocks.stop()
            loop.save(checkpoint, step + 1)
            saved = time.monotonic()
    clocks.stop()
    loop.save(checkpoint, options.steps)
    return result


@torch.no_grad()
def take_weights(trainable: Trainable, checkpoint: Path) -> int:
    """
    Start from another run's weights: every tensor of *checkpoint* that has the same name and shape here.

    DFlash2 is DFlash with more parts, so that a trained DFlash is a good start for one.

    Returns:
        How many were taken.

    Raises:
        ArtifactError: There is no such checkpoint.
    """
    mine, count = trainable.module.state_dict(), 0
    for name, value in _loaded(checkpoint)["module"].items():
        if name in mine and mine[name].shape == value.shape:
            mine[name].copy_(value)
            count += 1
    return count


@define
class _Clocks:
    """Adds the time since the last stop to a result."""

    result: TrainResult
    wall: float = field(factory=time.monotonic)
    core: float = field(factory=time.process_time)

    def stop(self) -> None:
        wall, core = time.monotonic(), time.process_time()
        self.result.wall_seconds += wall - self.wall
        self.result.core_seconds += core - self.core
        self.wall, self.core = wall, core


class _Loop:
    def __init__(
        self, trainable: Trainable, dataset: Dataset, sequences: list[Sequence], options: TrainOptions
    ) -> None:
        self._options = options
        self._module = trainable.module
        self._batches = Batches(dataset, sequences, options.sequences, options.seed)
        self._objective = Objective(trainable.module, trainable.vocabulary, trainable.matrix, options.objective)
        self._optimizer = Optimizer(trainable.module, options.optim, options.steps)
        self._recent: list[tuple[float, float]] = []
        self.result = TrainResult()

    def step(self, step: int) -> CurvePoint:
        """One optimizer step; returns the mean since the last point of the curve."""
        batch, rng = self._batches.get(step)
        found = self._objective.step(batch, rng)
        found.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without annotations
        self._optimizer.step(step)
        self._recent.append((found.cross_entropy, found.hits))
        entropy, hits = (sum(values) / len(self._recent) for values in zip(*self._recent, strict=True))
        point = CurvePoint(step + 1, entropy, hits)
        if (step + 1) % _POINT_STEPS == 0:
            self.result.curve.append(point)
            self._recent.clear()
        return point

    def save(self, path: Path, step: int) -> None:
        """Write everything a resumed run needs; the file is whole at any moment."""
        state = {
            "options": _plain(self._options), "shape": _plain(self._module.shape), "step": step,
            "module": self._module.state_dict(), "optimizer": self._optimizer.state(),
            "recent": self._recent, "result": _plain(self.result),
        }  # fmt: skip
        draft = path.with_suffix(".part")
        torch.save(state, draft)
        draft.replace(path)

    def load(self, path: Path) -> int:
        """Continue from *path*; returns the steps done."""
        state = _loaded(path)
        for name, mine in (("options", self._options), ("shape", self._module.shape)):
            if state.get(name) != _plain(mine):
                raise ArtifactError(
                    f"the checkpoint was written with other {name}", who="power-train", where=str(path),
                    fix="choose another --out, or remove it to start again",
                )  # fmt: skip
        self._module.load_state_dict(state["module"])
        self._optimizer.load(state["optimizer"])
        self._recent = [tuple(pair) for pair in state["recent"]]
        result = state["result"]
        self.result = TrainResult(
            [CurvePoint(**point) for point in result["curve"]], result["wall_seconds"], result["core_seconds"]
        )
        return int(state["step"])


def _loaded(path: Path) -> Mapping[str, Any]:
    try:
        state: Mapping[str, Any] = torch.load(path, weights_only=True)
    except Exception as exc:  # torch raises its own, pickle's and zipfile's errors for damaged files
        raise ArtifactError(
            f"no checkpoint: {exc}", who="power-train", where=str(path), fix="remove it to start again"
        ) from exc
    return state


def _plain(value: Any) -> Any:
    """Of records, what a checkpoint can hold without naming their classes."""
    return asdict(value, value_serializer=lambda _obj, _attr, item: list(item) if isinstance(item, tuple) else item)
