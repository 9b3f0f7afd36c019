"""The factory of tiny adapters: reproducible files of pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from power_core.artifacts.gguf import GgufFile
from power_core.testing.gguf_lora import TINY_LLAMA_SHAPES, tiny_lora

pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    """A seed names one file; another seed names another."""
    first = tiny_lora(tmp_path / "a.gguf", seed=3).read_bytes()
    assert tiny_lora(tmp_path / "b.gguf", seed=3).read_bytes() == first
    assert tiny_lora(tmp_path / "c.gguf", seed=4).read_bytes() != first


def test_pairs_have_the_rank_and_the_size_that_were_asked_for(tmp_path: Path) -> None:
    """The change is as large as a random matrix of the target, for any rank and alpha; embeddings' pairs are turned."""
    for rank, alpha in ((4, 8.0), (16, 8.0), (16, 2.0)):
        shapes = {**TINY_LLAMA_SHAPES, "token_embd.weight": (320, 64)}
        file = GgufFile.open(tiny_lora(tmp_path / "a.gguf", shapes=shapes, rank=rank, alpha=alpha))
        assert len(file.tensors) == 2 * len(shapes)
        a, b = (np.asarray(file.read(f"blk.0.attn_q.weight.lora_{part}"), float) for part in "ab")
        assert (a.shape, b.shape) == ((rank, 64), (64, rank))
        spread = float(np.std(alpha / rank * b @ a))
        assert 0.5 < spread / (1.5 / 8) < 4.0
        assert file.tensors["token_embd.weight.lora_a"].shape == (320, rank)
        assert file.tensors["token_embd.weight.lora_b"].shape == (64, rank)
