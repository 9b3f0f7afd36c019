"""The torch executor against the numpy reference, on the same weights in both containers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from power_dspark.artifact import read_header
from power_dspark.config import DsparkConfig
from power_dspark.executor import Drafted, Executor, Round
from power_dspark.testing import NumpyDspark, Reference, assert_follows

from power_core.artifacts import TensorFile

torch = pytest.importorskip("torch")
TorchExecutor = pytest.importorskip("power_dspark.torch_executor").TorchExecutor
Make = Callable[..., TensorFile]


class Session:
    """What the torch executor reads of a target session."""

    context_size = 128
    max_sequences = 3


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def torch_executor(file: TensorFile, shared: Any, **config: Any) -> Executor:
    return TorchExecutor(DsparkConfig(**{"dtype": "fp32"} | config), file, read_header(file), shared, Session())


def reference(file: TensorFile, shared: Any, features: NDArray[Any], start: int, anchor: int, rows: int) -> Reference:
    return NumpyDspark(file, read_header(file), shared.matrices).draft(features, start, anchor, rows)


def run(executor: Executor, rounds: Sequence[Round], rows: int) -> list[Drafted]:
    return executor.draft(rounds, rows, chances=True)


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_torch_drafts_what_the_equations_give(
    make: Make, shape: dict[str, Any], container: str, shared: Any, features: NDArray[Any], rows: int
) -> None:
    """Every layout, both containers, three widths: tokens, confidences and chances of an independent computation."""
    file = make(container, **shape)
    executor = torch_executor(file, shared)
    executor.open(0)
    executor.inject(0, 0, features[:17])
    assert_follows(run(executor, [Round(0, 17, 42)], rows)[0], reference(file, shared, features[:17], 0, 42, rows))


def test_torch_sequences_of_a_batch_do_not_see_each_other(make: Make, shared: Any, features: NDArray[Any]) -> None:
    """Three sequences of other lengths, one without a row, in one batch: each drafts as if alone."""
    file = make()
    executor = torch_executor(file, shared)
    held = {0: features[:5], 1: features[5:5], 2: features[9:40]}
    for seq, rows in held.items():
        executor.open(seq)
        if len(rows):
            executor.inject(seq, 3 * seq, rows)
    rounds = [Round(seq, 3 * seq + len(rows), 50 + seq) for seq, rows in held.items()]
    for drafted, (seq, rows) in zip(run(executor, rounds, 6), held.items(), strict=True):
        assert_follows(drafted, reference(file, shared, rows, 3 * seq, 50 + seq, 6))


def test_torch_rolled_back_rows_are_gone(make: Make, shared: Any, features: NDArray[Any]) -> None:
    """Rows in, some back out, others in: the draft is that of the rows that are left."""
    file = make()
    executor = torch_executor(file, shared)
    executor.open(1)
    executor.inject(1, 4, features[:20])
    executor.truncate(1, 12)
    assert executor.end_position(1) == 12
    executor.inject(1, 12, features[30:33])
    kept = np.concatenate([features[:8], features[30:33]])
    assert_follows(run(executor, [Round(1, 15, 9)], 8)[0], reference(file, shared, kept, 4, 9, 8))
    executor.truncate(1, 0)
    assert executor.end_position(1) is None


def test_torch_ring_gives_the_full_caches_proposals_while_the_context_fits(
    make: Make, shared: Any, features: NDArray[Any]
) -> None:
    """A ring as large as the context is bit for bit the full cache; a smaller one is the cache cut to its cap."""
    file = make()
    full, ring, small = (torch_executor(file, shared, ring=cap) for cap in (0, 40, 16))
    for executor in (full, ring, small):
        executor.open(0)
        executor.inject(0, 0, features)
    rounds = [Round(0, 40, 77)]
    assert run(ring, rounds, 8) == run(full, rounds, 8)
    assert ring.nbytes < full.nbytes
    assert_follows(run(small, rounds, 8)[0], reference(file, shared, features[-16:], 24, 77, 8))


def test_torch_takes_a_confidence_head_without_the_markov_part(
    make: Make, shared: Any, features: NDArray[Any], tmp_path: Any
) -> None:
    """`confidence_head_with_markov` false: the head's matrix has the hidden columns alone."""
    from power_dspark.testing import save_published

    from power_core.artifacts import open_tensors

    good = make()
    head = np.asarray(good.read("conf_proj.weight"))[:, :64]
    replace = {"confidence_head.proj.weight": head}
    path = save_published(good, tmp_path / "bare", config={"confidence_head_with_markov": False}, replace=replace)
    file = open_tensors(path)
    executor = torch_executor(file, shared)
    executor.open(0)
    executor.inject(0, 0, features[:6])
    assert_follows(run(executor, [Round(0, 6, 3)], 8)[0], reference(file, shared, features[:6], 0, 3, 8))
