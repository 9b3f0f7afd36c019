"""Tiny random drafters in both containers, for conformance runs: nothing has to be downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from power_core.artifacts import ArtifactContract
    from power_core.target import TargetModel

__all__ = ["tiny_gguf", "tiny_published"]

_DRAFT_VOCAB = [*range(7, 300, 3), 5, 319]


def tiny_gguf(folder: Path) -> tuple[ArtifactContract, Path, TargetModel]:
    """A GGUF with a reduced vocabulary and a confidence head, and the llama it was made for."""
    from power_core.testing.gguf_drafts import tiny_dspark
    from power_dspark.artifact import DsparkContract

    target = _target(folder)
    path = tiny_dspark(
        folder / "drafter.gguf", draft_vocab=_DRAFT_VOCAB, omit=["conf_proj.bias"],  # the one tensor that is optional
        overrides={"power.tokenizer_sha256": target.identity.tokenizer_sha256},
    )  # fmt: skip
    return DsparkContract(), path, target


def tiny_published(folder: Path) -> tuple[ArtifactContract, Path, TargetModel]:
    """The same drafter as its trainer publishes it."""
    from power_core.artifacts import open_tensors
    from power_dspark.testing import save_published

    contract, path, target = tiny_gguf(folder)
    digest = {"tokenizer_sha256": target.identity.tokenizer_sha256}
    return contract, save_published(open_tensors(path), folder / "published", config=digest), target


def _target(folder: Path) -> TargetModel:
    """By whichever installed backend loads GGUF files."""
    from power_core.runtime import Runtime
    from power_core.testing.gguf import tiny_llama

    with Runtime() as runtime:
        return runtime.load_target(tiny_llama(folder / "target.gguf", layers=4))
