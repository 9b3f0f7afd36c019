"""
Tiny LoRA adapters with random weights, made for the targets of `power_core.testing.gguf`.

A pair `x.lora_a` (rank, inputs), `x.lora_b` (outputs, rank) adds ``scale * alpha / rank * b @ a`` to the matrix x, as
llama.cpp's convert_lora_to_gguf.py writes it. The same arguments give the same bytes. Needs the `gguf` package
(`pip install "power-core[testing]"`), imported when the factory is called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from power_core.testing.gguf_writer import GgufFile, MetadataValue

__all__ = ["TINY_LLAMA_SHAPES", "tiny_lora"]

TINY_LLAMA_SHAPES: Mapping[str, tuple[int, int]] = {
    f"blk.{i}.{name}.weight": shape
    for i in range(2)
    for name, shape in (("attn_q", (64, 64)), ("attn_v", (32, 64)), ("ffn_down", (64, 128)))
}
"""(outputs, inputs) of the matrices of `tiny_llama` that `tiny_lora` adapts by default."""


def tiny_lora(
    path: Path,
    *,
    seed: int = 300,
    architecture: str = "llama",
    shapes: Mapping[str, tuple[int, ...]] = TINY_LLAMA_SHAPES,
    rank: int = 4,
    alpha: float = 8.0,
    gain: float = 1.0,
    weights: str = "F32",
    overrides: Mapping[str, MetadataValue | None] | None = None,
    omit: Collection[str] = (),
    replace: Mapping[str, NDArray[np.generic]] | None = None,
) -> Path:
    """
    Write a random LoRA adapter that changes greedy text.

    Args:
        path: The file to write.
        seed: Seed of the weights.
        architecture: The target's.
        shapes: (outputs, inputs) of each adapted matrix of the target, by its name; for `token_embd.weight`
            (vocabulary, hidden size), whose factors are a (vocabulary, rank) and b (hidden size, rank).
        rank: Inner size of the pairs.
        alpha: `adapter.lora.alpha`: what a scale of 1 is multiplied with and divided by the rank.
        gain: Size of the change in units of a random matrix of the target.
        weights: ggml type of both factors.
        overrides: Metadata keys to replace or add; None leaves a key out. For tests of refusals.
        omit: Tensors to leave out. For tests of refusals.
        replace: Tensors to replace or add, in their numpy type. For tests of refusals.

    Returns:
        *path*.
    """
    file = GgufFile(architecture, seed, weights)
    file.metadata |= {
        "general.architecture": architecture,
        "general.type": "adapter",
        "general.name": f"tiny lora {seed}",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
    }
    for name, (outputs, inputs) in shapes.items():
        first, last = ((outputs, rank), (inputs, rank)) if name == "token_embd.weight" else (
            (rank, inputs), (outputs, rank)
        )  # fmt: skip
        file.matrix(f"{name}.lora_a", first)
        file.matrix(f"{name}.lora_b", last, gain=gain * rank / alpha)
    return file.write(path, overrides, omit, replace)
