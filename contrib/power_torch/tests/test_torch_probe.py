"""What the probe declares holds, and what does not hold is not declared."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from power_torch import linear, network, profiles
from power_torch.cache import spans_of

from power_core import user_cache
from power_core.shapes import ExactnessLevel
from power_core.target import RowBatch

Spoil = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_declared_width_gives_the_same_bits(
    model: Any, open_session: Any, feed: Any, words: Any, dtype: str
) -> None:
    """A text in chunks of each declared width, and of one row, gives one set of logits at any point of the context."""
    session = open_session(model("llama", dtype=dtype), max_sequences=2)
    text = words(3, 140)  # two spans of the cache
    assert session.profile.level is not ExactnessLevel.UNVERIFIED
    results = []
    for chunk in (1, *session.profile.decode.widths):
        session.open(0)
        parts = [feed(session, 0, text[i : i + chunk]) for i in range(0, len(text), chunk)]
        results.append(np.concatenate(parts))
    for result in results[1:]:
        assert np.array_equal(result, results[0])


def test_prompt_rows_may_be_narrow_where_they_agree(model: Any, open_session: Any) -> None:
    """Where prompt and decode rows are one class, a prompt of two rows is not padded to a whole chunk."""
    profile = open_session(model("llama")).profile
    if not profile.mixable:
        pytest.skip("prompt rows are another class on this machine")
    assert set(profile.decode.widths) < set(profile.prefill.widths)
    assert profile.prefill.max_rows == 32


@pytest.mark.parametrize(
    ("times", "widths", "costs"),
    [
        ((1.0, 0.9, 1.2, 1.5), (4, 8, 16), (1.0, 1.333, 1.667)),
        ((1.0, 0.97, 1.2, 1.5), (2, 4, 8, 16), (1.0, 1.0, 1.2, 1.5)),  # a difference that may be noise
        ((4.0, 3.0, 2.0, 1.0), (16,), (1.0,)),
        ((1.0, 3.0, 2.0, 4.0), (2, 8, 16), (1.0, 2.0, 4.0)),
    ],
)
def test_a_width_is_used_where_no_wider_one_is_faster(
    model: Any, open_session: Any, feed: Any, monkeypatch: pytest.MonkeyPatch, times: Any, widths: Any, costs: Any
) -> None:
    """Narrow steps are padded to a wider one then, and give the same bits."""
    session = open_session(model("llama"), max_rows=16)
    session.open(0)
    expected = feed(session, 0, [5, 6, 7])
    monkeypatch.setattr(
        "power_torch.probe._Probe._times",
        lambda _probe, found: [dict(zip((2, 4, 8, 16), times, strict=True))[w] for w in found],
    )
    monkeypatch.setattr(profiles, "_KNOWN", {})
    monkeypatch.setattr(user_cache, "load", lambda *_args, **_options: None)
    padded = open_session(model("llama"), max_rows=16)
    assert (padded.profile.decode.widths, padded.profile.decode.costs) == (widths, costs)
    assert padded.profile.identity == session.profile.identity
    padded.open(0)
    assert np.array_equal(feed(padded, 0, [5, 6, 7]), expected)


def spoilt(spoil: Spoil) -> Callable[[torch.Tensor], linear.Linear]:
    """A maker of products that are changed in their last bits."""

    def make(weight: torch.Tensor) -> linear.Linear:
        return lambda x: spoil(x, x @ weight.T)

    return make


def by_width(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Other bits below four rows, as a kernel for few rows gives."""
    return y * 1.0000002 if len(x) < 4 else y


def by_index(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Other bits in odd rows, as a kernel with a remainder gives."""
    return y * (1 + torch.arange(len(x)).remainder(2)[:, None] * 2e-7)


def by_companion(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Other bits beside other rows, as quantizing a whole batch gives."""
    return y * (1 + 1e-6 * torch.sign(x.mean()))


@pytest.mark.parametrize(
    ("spoil", "level"),
    [
        (by_width, ExactnessLevel.PADDED),
        (by_index, ExactnessLevel.UNVERIFIED),
        (by_companion, ExactnessLevel.UNVERIFIED),
    ],
)
def test_kernels_that_do_not_agree_are_found(
    spoil: Spoil, level: ExactnessLevel, model: Any, open_session: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A width of its own is left out; rows that depend on their index or companions leave nothing to promise."""
    monkeypatch.setattr(network, "make_linear", spoilt(spoil))
    monkeypatch.setattr(profiles, "_KNOWN", {})
    profile = open_session(model("llama", probe_cache_dir=tmp_path), max_sequences=2).profile
    assert profile.level is level
    assert min(profile.decode.widths) >= (4 if level is ExactnessLevel.PADDED else 8)
    assert not profile.mixable or level is ExactnessLevel.PADDED


def test_spans_grow_with_the_context() -> None:
    """A cache is read in few lengths, none much longer than needed."""
    for context in (1, 128, 129, 1000, 4096, 131072):
        spans = spans_of(context)
        assert spans[-1] >= context > (spans[-2] if len(spans) > 1 else 0)
        assert all(span % 128 == 0 for span in spans)
        assert all(later - span <= max(128, span // 4) for span, later in itertools.pairwise(spans))
    assert len(spans_of(131072)) < 50


def test_rows_end_with_the_next_forward(model: Any, open_session: Any, words: Any) -> None:
    """Rows of an earlier forward, or of a closed session, are refused rather than wrong."""
    from power_core.errors import BackendError

    session = open_session(model("llama"))
    session.open(0)
    batch = RowBatch(4)
    batch.add_chain(0, 0, words(1, 2), 1)
    first = session.forward(batch, session.profile.decode)
    assert first.greedy(1) == int(first.logits(1).argmax())
    with pytest.raises(BackendError, match="row 0 has no output"):
        first.logits(0)
    batch.clear()
    batch.add_chain(0, 2, words(2, 1), 1)
    second = session.forward(batch, session.profile.decode)
    with pytest.raises(BackendError, match="these rows are gone"):
        first.greedy(1)
    session.shutdown()
    with pytest.raises(BackendError, match="these rows are gone"):
        second.logits(0)
    with pytest.raises(BackendError, match="the session is closed"):
        session.open(0)


def test_another_order_of_addition_is_seen_through_bf16(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    """A kernel for few rows that sums in two parts gives nearly always the same bf16 numbers, and is found."""
    from power_torch import kernels
    from power_torch.weights import load_weights

    def in_parts(weight: torch.Tensor) -> linear.Linear:
        left, right = weight.float().T.chunk(2)

        def product(x: torch.Tensor) -> torch.Tensor:
            a, b = x.float().chunk(2, dim=1)
            whole = x.float() @ weight.float().T
            return (a @ left + b @ right if len(x) < 4 else whole).to(weight.dtype)

        return product

    hparams = load_weights(tiny("llama")).hparams
    matrix, rows = torch.randn(320, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    product = in_parts(matrix)
    same = (product(rows[:2]) == product(rows)[:2]).float().mean()
    assert same > 0.99
    monkeypatch.setattr(kernels, "make_linear", in_parts)
    probe = kernels.KernelProbe(hparams, torch.bfloat16, torch.device("cpu"), 8)
    assert not probe.agree(2, 8)
    assert probe.agree(4, 8)
