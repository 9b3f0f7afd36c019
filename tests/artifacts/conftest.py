"""A scripted target, a folder for admitted artifacts, and a way to admit toy heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from artifacts.toy import CONTRACTS, ORIGIN, VOCAB, write_safetensors
from power_core.artifacts.admission import admit
from power_core.artifacts.contract import ArtifactManifest
from power_core.shapes import ShapeProfile
from power_core.target import SessionOptions
from power_core.testing import ScriptedTarget, one_class

Admit = Callable[..., ArtifactManifest]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where admitted artifacts go."""
    monkeypatch.setenv("POWER_ARTIFACTS_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


def cheap_rows(options: SessionOptions) -> ShapeProfile:
    """Rows that cost next to nothing, as on devices where drafters with weights pay."""
    made = one_class()(options)
    return evolve(made, decode=evolve(made.decode, costs=(1.0,) * len(made.decode.widths)))


@pytest.fixture
def target() -> ScriptedTarget:
    return ScriptedTarget(VOCAB, profile=cheap_rows)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A toy head that is not admitted."""
    return write_safetensors(tmp_path / "given" / "model.safetensors")


@pytest.fixture
def admit_toy(store: Path, target: ScriptedTarget, source: Path) -> Admit:
    """Admits a toy head for the target: `admit_toy("name", path)`."""

    def run(name: str = "toy", path: Path = source, **changes: Any) -> ArtifactManifest:
        arguments = {"target": target, "provenance": ORIGIN, "contracts": CONTRACTS, **changes}
        return admit(path, name=name, **arguments)

    return run
