"""Tiny random heads in every form, for conformance runs: nothing has to be downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from power_core.artifacts import ArtifactContract
    from power_core.target import TargetModel
    from power_mtp.layout import HeadShape

__all__ = ["tiny_attached", "tiny_gguf", "tiny_nextn"]


def tiny_attached(folder: Path) -> tuple[ArtifactContract, Path, TargetModel]:
    """A head over two blocks with a reduced vocabulary as safetensors, and the llama it was made for."""
    from power_core.testing.safetensors_writer import save_tensors
    from power_mtp.artifact import MtpHeadContract
    from power_mtp.layout import tensor_name
    from power_mtp.testing import head_config, random_tensors

    shape, target = _shape(), _target(folder)
    config = {**head_config(shape), "tokenizer_sha256": target.identity.tokenizer_sha256}
    tensors = {tensor_name(short, "safetensors"): values for short, values in random_tensors(shape).items()}
    return MtpHeadContract(), save_tensors(folder / "head", tensors, config), target


def tiny_gguf(folder: Path) -> tuple[ArtifactContract, Path, TargetModel]:
    """The same head as GGUF."""
    from power_mtp.artifact import MtpHeadContract
    from power_mtp.testing import head_config, random_tensors, write_gguf

    shape, target = _shape(), _target(folder)
    config = {**head_config(shape), "tokenizer_sha256": target.identity.tokenizer_sha256}
    return MtpHeadContract(), write_gguf(folder / "head.gguf", random_tensors(shape), config), target


def tiny_nextn(folder: Path) -> tuple[ArtifactContract, Path, TargetModel]:
    """A prediction layer in a file of its own, and a hybrid model that gives the state it reads."""
    from power_core.runtime import Runtime
    from power_core.testing.gguf import tiny_hybrid
    from power_core.testing.gguf_drafts import tiny_mtp
    from power_mtp.artifact import MtpHeadContract

    with Runtime() as runtime:
        target = runtime.load_target(tiny_hybrid(folder / "target.gguf", nextn_layers=1))
    # The output matrix is the embedding's where the file has none: the one tensor that is optional.
    return MtpHeadContract(), tiny_mtp(folder / "head.gguf", omit=["output.weight"]), target


def _shape() -> HeadShape:
    from power_mtp.testing import tiny_shape

    return tiny_shape(has_output=True, is_reduced=True, draft_vocab=40, fuses=True, target_layers=(0, 1))


def _target(folder: Path) -> TargetModel:
    """By whichever installed backend loads GGUF files."""
    from power_core.runtime import Runtime
    from power_core.testing.gguf import tiny_llama

    with Runtime() as runtime:
        return runtime.load_target(tiny_llama(folder / "target.gguf", layers=4))
