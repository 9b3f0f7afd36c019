"""Tiny drafters of both kinds in both containers, with the same weights, and the target they were made for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from power_dflash.artifact import BlockContract
from power_dflash.config import DFlash2Config, DFlashConfig
from power_dflash.drafter import BlockDrafter
from power_dflash.fixtures import published_config, published_name
from power_dflash.header import DFLASH2, DFLASH_V1

from power_core.artifacts import Artifact, ArtifactManifest, Provenance, open_tensors
from power_core.runtime import Runtime
from power_core.target import TargetModel
from power_core.testing.gguf import tiny_llama
from power_core.testing.gguf_drafts import tiny_dflash, tiny_dflash2
from power_core.testing.safetensors_writer import save_tensors

TARGET_LAYERS = (1, 4)  # llama.cpp's ids: the outputs of blocks 0 and 3
MAKERS: dict[str, Callable[..., Path]] = {DFLASH_V1: tiny_dflash, DFLASH2: tiny_dflash2}


def to_safetensors(source: Path, folder: Path, *, prefix: str = "", **changes: Any) -> Path:
    """Write the drafter *source* in the published layout."""
    file = open_tensors(source)
    tensors = {prefix + published_name(name): file.read(name) for name in file.tensors}
    return save_tensors(folder, tensors, {**published_config(file), "num_target_layers": 5, **changes})


@pytest.fixture(scope="session")
def published() -> Callable[..., Path]:
    return to_safetensors


@pytest.fixture(scope="session")
def make_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A drafter of a kind; what it is made with can be changed."""

    def make(kind: str, **changes: Any) -> Path:
        return MAKERS[kind](
            tmp_path_factory.mktemp("draft") / "draft.gguf", **{"target_layers": TARGET_LAYERS, **changes}
        )

    return make


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random llama of five blocks, loaded."""
    path = tiny_llama(tmp_path_factory.mktemp("target") / "target.gguf", layers=5)
    with Runtime() as runtime:
        model = runtime.load_target(path)
        yield model
        model.close()


@pytest.fixture
def target(tiny_target: TargetModel) -> TargetModel:
    return tiny_target


@pytest.fixture(scope="session")
def admitted() -> Callable[[Path, TargetModel], Artifact]:
    """A file checked in full against a target, as the core would hand it to a factory."""

    def admit(path: Path, target: TargetModel) -> Artifact:
        file = open_tensors(path)
        contract = next(each for kind in MAKERS if (each := BlockContract(kind)).matches(file))
        facts = contract.check(file)
        contract.check_payload(file)
        contract.check_target(file, facts, target)
        return Artifact(
            ArtifactManifest("tiny", contract.kind, (), target.identity, facts, Provenance("test", "0", "none")), file
        )

    return admit


@pytest.fixture(scope="session")
def drafter_of() -> Callable[..., BlockDrafter]:
    """The drafter of an artifact, with options."""

    def make(artifact: Artifact, **options: Any) -> BlockDrafter:
        config = DFlashConfig if artifact.manifest.kind == DFLASH_V1 else DFlash2Config
        return BlockDrafter(config(**options), artifact)

    return make
