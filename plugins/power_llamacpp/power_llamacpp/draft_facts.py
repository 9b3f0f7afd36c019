"""What a checked drafter file is, and the parts of the checks that its kinds share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from attrs import frozen

from power_llamacpp.gguf_check import WEIGHT_TYPES
from power_llamacpp.gguf_file import DOWNLOAD_AGAIN, GgufInfo, StringArray, refuse

__all__ = ["DraftFacts", "DraftKind", "Spec", "check_tensors", "check_values", "check_vocabulary", "matrix", "vector"]


class DraftKind(StrEnum):
    """How a drafter is driven; the names are those of artifact kinds."""

    DFLASH = "dflash-v1"
    DFLASH2 = "dflash2"
    DSPARK = "dspark"
    MTP = "mtp-head"


@frozen
class DraftFacts:
    """
    What `check_draft` read off a good file.

    Args:
        kind: How it is driven.
        hidden_size: Width of the target's states.
        vocab_size: The target's vocabulary, which the logits cover.
        block_size: Most rows of one sequence in a forward, or None where any number will do.
        hidden_layers: Target blocks whose outputs are injected, side by side; empty for MTP.
        mask_id: The id of rows to be filled, where the file names one.
        top_k: Candidates of a DFlash2 lattice, else 0.
        has_confidence: Whether DSpark rows come with a confidence.
        has_sections: Whether positions are multi-dimensional (M-RoPE).
    """

    kind: DraftKind
    hidden_size: int
    vocab_size: int
    block_size: int | None = None
    hidden_layers: tuple[int, ...] = ()
    mask_id: int | None = None
    top_k: int = 0
    has_confidence: bool = False
    has_sections: bool = False

    @property
    def feature_size(self) -> int:
        """Width of an injected row."""
        return len(self.hidden_layers) * self.hidden_size


class Spec(NamedTuple):
    """What a tensor must be: its shape as numpy has it, leading ones aside, and its types."""

    shape: tuple[int, ...]
    types: frozenset[str]


def matrix(*shape: int) -> Spec:
    """Weights of any type that kernels multiply with."""
    return Spec(shape, WEIGHT_TYPES)


def vector(*shape: int) -> Spec:
    """Values that kernels read as F32 without looking."""
    return Spec(shape, frozenset(["F32"]))


def check_tensors(
    info: GgufInfo, required: Mapping[str, Spec], optional: Mapping[str, Spec], *, prefix: str = ""
) -> None:
    """
    The file's tensors whose names begin with *prefix* are *required* and any of *optional*, each as specified.

    Raises:
        ArtifactError: One is missing, unknown, or of another shape or type.
    """
    for name in required:
        if name not in info.tensors:
            refuse(info.path, f"the tensor {name} is missing", got=name, expected="a whole drafter")
    for name, tensor in info.tensors.items():
        if not name.startswith(prefix):
            continue
        spec = required.get(name) or optional.get(name)
        if spec is None:
            refuse(info.path, f"the tensor {name} is unknown", got=name, expected="the tensors of the drafter's kind")
        if _trimmed(tensor.shape) != _trimmed(spec.shape):
            refuse(info.path, f"tensor {name} has shape {tensor.shape}", got=tensor.shape, expected=spec.shape)
        if tensor.dtype not in spec.types:
            expected = " or ".join(sorted(spec.types)) if len(spec.types) < 3 else "a type for weights"
            refuse(info.path, f"tensor {name} is {tensor.dtype}", got=tensor.dtype, expected=expected)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """*shape* without leading ones: ggml does not distinguish them."""
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def check_values(info: GgufInfo, *, prefix: str = "") -> None:
    """
    Every value of the float tensors whose names begin with *prefix* is a finite number.

    From NaN, llama.cpp computes token 0 and reports success.

    Raises:
        ArtifactError: One is not; or the tensor's type cannot be read.
    """
    for name, tensor in info.tensors.items():
        if tensor.dtype == "I64" or not name.startswith(prefix):
            continue
        finite = np.isfinite(info.read(name))
        if not finite.all():
            index = int(np.argmin(finite))
            what = f"tensor {name} holds a number that is not finite, at index {index}"
            refuse(info.path, what, got=index, expected="finite numbers", fix=DOWNLOAD_AGAIN)


def check_vocabulary(info: GgufInfo, target: GgufInfo) -> None:
    """
    The drafter's tokens are the target's: a smaller vocabulary scrambles logits, a larger one ends the process.

    Raises:
        ArtifactError: They are not.
    """
    tokens, known = (file.metadata.get("tokenizer.ggml.tokens") for file in (info, target))
    if info.metadata.get("tokenizer.ggml.model") == "none":
        size = info.integer("vocab_size")
    else:
        size = len(tokens) if isinstance(tokens, StringArray) else 0
        if isinstance(tokens, StringArray) and isinstance(known, StringArray) and size == len(known):
            differing = next((i for i, (a, b) in enumerate(zip(tokens, known, strict=True)) if a != b), None)
            if differing is not None:
                what = f"token {differing} is {tokens[differing]!r}"
                refuse(info.path, what, got=tokens[differing], expected=f"the target's {known[differing]!r}", fix=FIX)
    if size != target.vocab_size:
        what = f"the vocabulary has {size} tokens"
        refuse(info.path, what, got=size, expected=f"the target's {target.vocab_size}", fix=FIX)


FIX = "use a drafter made for this target"
