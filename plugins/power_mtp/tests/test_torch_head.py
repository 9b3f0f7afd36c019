"""The torch executor against the head's equations in numpy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("power_torch.drafting")

from power_mtp.artifact import MtpHeadContract, head_shape  # noqa: E402 - the same
from power_mtp.executor import HeadBlock  # noqa: E402 - the same
from power_mtp.testing import (  # noqa: E402 - the same
    ReferenceHead,
    head_config,
    random_tensors,
    tiny_shape,
    write_gguf,
    write_safetensors,
)
from power_mtp.torch_head import TorchHead, load_weights  # noqa: E402 - the same

from power_core.artifacts import open_tensors  # noqa: E402 - after the check that torch is there

RNG = np.random.default_rng(1)
EMBEDDING = RNG.standard_normal((320, 64)).astype(np.float32)
OUTPUT = (RNG.standard_normal((320, 64)) / 4).astype(np.float32)
MODEL = SimpleNamespace(matrix=lambda which: EMBEDDING if which == "token_embd" else OUTPUT)
SHAPES = {
    "plain": tiny_shape(),
    "fused features": tiny_shape(target_layers=(0, 2, 1), fuses=True),
    "own output": tiny_shape(has_output=True),
    "reduced": tiny_shape(has_output=True, is_reduced=True, draft_vocab=100),
}


def features(count: int, shape: Any, seed: int = 0) -> np.ndarray:
    width = shape.hidden * len(shape.target_layers)
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed + 100).integers(0, 320, count).tolist()


def open_head(
    path: Path, *, cap: int = 512, sequences: int = 3, rows: int = 0, dtype: Any = torch.float32
) -> TorchHead:
    file = open_tensors(path)
    MtpHeadContract().check(file)
    shape = head_shape(file)
    weights = load_weights(file, shape, MODEL, rows=rows, dtype=dtype)  # type: ignore[arg-type]
    return TorchHead(shape, weights, EMBEDDING, cap=cap, max_sequences=3)


def drafted(head: Any, block: HeadBlock, steps: int) -> np.ndarray:
    """Logits of *steps* greedy draft tokens, and the context left as it was."""
    logits = [head.start([block])[0]]
    for _ in range(steps - 1):
        row = int(np.argmax(logits[-1]))
        logits.append(head.step([block.seq], [row if head.ids is None else int(head.ids[row])])[0])
    head.truncate(block.seq, block.position + len(block.tokens))
    return np.stack(logits)


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_torch_computes_the_equations(tmp_path: Path, shape: Any, container: str) -> None:
    """Both containers give the reference's logits for seven recurrent steps, twice in a row."""
    values, config = random_tensors(shape), head_config(shape)
    write = write_gguf if container == "gguf" else write_safetensors
    head = open_head(write(tmp_path / ("head.gguf" if container == "gguf" else "head"), values, config))
    reference = ReferenceHead(shape, values, EMBEDDING, OUTPUT)
    for executor in (head, reference):
        executor.open(1)
    first = HeadBlock(1, 5, tokens(90), features(90, shape))
    second = HeadBlock(1, 95, tokens(3, seed=1), features(3, shape, seed=1))
    for block in (first, second):
        np.testing.assert_allclose(drafted(head, block, 7), drafted(reference, block, 7), rtol=0, atol=2e-3)


def test_sequences_of_a_batch_do_not_see_each_other(tmp_path: Path) -> None:
    """Blocks of different lengths in one forward draft what each drafts alone."""
    shape = SHAPES["reduced"]
    path = write_safetensors(tmp_path, random_tensors(shape), head_config(shape))
    lengths = (3, 1, 70)
    blocks = [HeadBlock(i, 7 * i, tokens(n, i), features(n, shape, i)) for i, n in enumerate(lengths)]
    together = open_head(path)
    for block in blocks:
        together.open(block.seq)
    first = together.start(blocks)
    ids = [int(together.ids[int(np.argmax(row))]) for row in first]  # type: ignore[index]
    second = together.step([0, 2], [ids[0], ids[2]])
    for block in blocks:
        alone = open_head(path)
        alone.open(block.seq)
        logits = drafted(alone, block, 2)
        np.testing.assert_allclose(first[block.seq], logits[0], rtol=0, atol=1e-4)
        if block.seq != 1:
            np.testing.assert_allclose(second[0 if block.seq == 0 else 1], logits[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [20, 64, 200, 500])
def test_ring_gives_the_bits_of_a_full_cache_with_the_same_window(tmp_path: Path, length: int) -> None:
    """A ring of 64 positions drafts as the reference does that keeps everything and looks back as far."""
    shape = SHAPES["plain"]
    values = random_tensors(shape)
    head = open_head(write_safetensors(tmp_path, values, head_config(shape)), cap=64)
    head.open(0)
    reference = ReferenceHead(shape, values, EMBEDDING, OUTPUT, window=64)
    reference.open(0)
    block = HeadBlock(0, 0, tokens(length), features(length, shape))
    np.testing.assert_allclose(drafted(head, block, 4), drafted(reference, block, 4), rtol=0, atol=2e-3)


def test_truncated_rows_leave_nothing_behind(tmp_path: Path) -> None:
    """Context that was taken back, and draft rows, do not change what is drafted afterwards."""
    shape = SHAPES["plain"]
    path = write_safetensors(tmp_path, random_tensors(shape), head_config(shape))
    block = HeadBlock(0, 0, tokens(30), features(30, shape))
    tail = HeadBlock(0, 30, tokens(4, 3), features(4, shape, 3))
    head, fresh = open_head(path), open_head(path)
    for executor in (head, fresh):
        executor.open(0)
        executor.extend(block)
    drafted(head, HeadBlock(0, 30, tokens(9, 2), features(9, shape, 2)), 5)
    head.truncate(0, 30)
    assert np.array_equal(drafted(head, tail, 5), drafted(fresh, tail, 5))


@pytest.mark.parametrize("name", ["plain", "reduced"])
def test_fewer_projected_rows_are_the_first_ones(tmp_path: Path, name: str) -> None:
    """With `rows` the output matrix is cut to its first rows: token ids, or the head of `d2t`."""
    shape = SHAPES[name]
    path = write_safetensors(tmp_path, random_tensors(shape), head_config(shape))
    whole, cut = open_head(path), open_head(path, rows=40)
    block = HeadBlock(0, 0, tokens(5), features(5, shape))
    for head in (whole, cut):
        head.open(0)
    full, some = whole.start([block]), cut.start([block])
    assert some.shape == (1, 40)
    np.testing.assert_allclose(some[0], full[0, :40], rtol=0, atol=1e-5)
    assert cut.ids is None or len(cut.ids) == 40


def test_bfloat16_stays_near(tmp_path: Path) -> None:
    """In bfloat16 the likeliest token is nearly always the reference's."""
    shape = SHAPES["reduced"]
    values = random_tensors(shape)
    head = open_head(write_safetensors(tmp_path, values, head_config(shape)), dtype=torch.bfloat16)
    reference = ReferenceHead(shape, values, EMBEDDING, OUTPUT)
    agreed = 0
    for seed in range(20):
        block = HeadBlock(0, 0, tokens(12, seed), features(12, shape, seed))
        rows = []
        for executor in (head, reference):
            executor.open(0)
            rows.append(int(np.argmax(executor.start([block])[0])))
            executor.close(0)
        agreed += rows[0] == rows[1]
    assert agreed >= 17
