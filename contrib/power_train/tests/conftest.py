"""A tiny target, text it wrote, and drafters trained on it for a few steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from power_torch.weights import ModelWeights, load_weights
from power_train.batches import split
from power_train.dataset import Dataset, open_dataset, write_header
from power_train.generate import GenerateOptions, generate
from power_train.prompts import EncodedPrompt
from power_train.setup import Trainable, drafter_shape, make_trainable

from power_core.testing.gguf import tiny_llama

LAYERS = (0, 2)
HIDDEN, PROMPTS = 64, 24


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target") / "tiny.gguf", layers=4)


@pytest.fixture(scope="session")
def weights(target: Path) -> ModelWeights:
    return load_weights(target, torch.bfloat16)


def _generated(target: Path, folder: Path, tokens: int = 10**6) -> Dataset:
    options = GenerateOptions(
        target, LAYERS, end_ids=(2,), max_new=24, max_question=8, capacity=64, slots=8, processes=1, tokens=tokens
    )
    encoded = [
        EncodedPrompt((1, 10 + i, 50, 7 * i % 300), (2, 11, 12) if i % 5 == 0 else (), i) for i in range(1, PROMPTS + 1)
    ]
    write_header(folder, {"hidden_size": HIDDEN, "layers": list(LAYERS)})
    generate(encoded, options, folder, lambda _tokens: None)
    return open_dataset(folder)


@pytest.fixture(scope="session")
def generated(target: Path) -> Callable[..., Dataset]:
    """``generated(folder, tokens=n)``: text of the tiny target, for prompts 1 to 24."""
    return partial(_generated, target)


@pytest.fixture(scope="session")
def dataset(generated: Callable[..., Dataset], tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return generated(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def made(weights: ModelWeights, dataset: Dataset) -> Callable[[str], Trainable]:
    """``made(kind)``: an untrained drafter; what starts at zero is filled, so that a wrong layout shows."""

    def make(kind: str) -> Trainable:
        shape = drafter_shape(kind, weights.hparams, LAYERS, 0, ffn=96, block=4)
        trainable = make_trainable(shape, weights, dataset, split(dataset)[0], draft_vocab=96, seed=0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in trainable.module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        return trainable

    return make
