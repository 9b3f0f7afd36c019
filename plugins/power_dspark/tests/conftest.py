"""Fixtures: tiny drafters in both containers, their target's shared matrices, features."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from power_dspark.testing import save_published

from power_core.artifacts import TensorFile, open_tensors
from power_core.testing.gguf_drafts import tiny_dspark

VOCAB, HIDDEN = 320, 64
SHAPES: dict[str, dict[str, Any]] = {
    "anchor-first": {},
    "bonus-anchor": {"anchor_first": False},
    "no-confidence": {"confidence": False},
    "reduced": {"draft_vocab": [*range(7, 300, 3), 5, 319]},
    "bonus-reduced-bare": {"anchor_first": False, "confidence": False, "draft_vocab": list(range(300, 40, -2))},
}


class SharedTarget:
    """The part of a target model that drafters share: two matrices."""

    def __init__(self) -> None:
        rng = np.random.default_rng(11)
        self.matrices = {
            "token_embd": rng.standard_normal((VOCAB, HIDDEN), np.float32),
            "output": rng.standard_normal((VOCAB, HIDDEN), np.float32) / 4,
        }

    def matrix(self, which: Literal["token_embd", "output"]) -> NDArray[np.float32]:
        return self.matrices[which]


@pytest.fixture(scope="session")
def shared() -> SharedTarget:
    return SharedTarget()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., TensorFile]:
    """``make("gguf", **options of tiny_dspark)``, or "safetensors" with the same weights."""

    number = count()

    def call(container: str = "gguf", **options: Any) -> TensorFile:
        folder = tmp_path / f"drafter-{next(number)}"
        folder.mkdir()
        file = open_tensors(tiny_dspark(folder / "drafter.gguf", **options))
        return file if container == "gguf" else open_tensors(save_published(file, folder / "published"))

    return call


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of `tiny_dspark`, one variant of the layout after the other."""
    return SHAPES[request.param]


@pytest.fixture(params=["gguf", "safetensors"])
def container(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def features() -> NDArray[np.float32]:
    """float32[40, 2 * HIDDEN]: target block outputs of 40 positions."""
    return np.random.default_rng(5).standard_normal((40, 2 * HIDDEN), np.float32)
