"""Width classes: what needs no padding, and how much the others need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from power_llamacpp.plan import is_dense, scratch_sequences, widest_gap

from power_core.shapes import ShapeIdentity, WidthClass


def width_class(*widths: int) -> WidthClass:
    return WidthClass(ShapeIdentity("x"), widths)


@pytest.mark.parametrize(
    ("widths", "dense", "gap"),
    [((1, 2, 3), True, 0), ((2, 3, 4), False, 1), ((1, 2, 4, 8), False, 3), ((8,), False, 7)],
)
def test_classes_by_hand(widths: tuple[int, ...], dense: bool, gap: int) -> None:
    """A dense class holds every width from 1; the gap is the most pad rows a step can need."""
    assert is_dense(width_class(*widths)) is dense
    assert widest_gap(width_class(*widths)) == gap


@given(st.sets(st.integers(1, 40), min_size=1), st.integers(1, 40))
def test_scratch_sequences_bring_rows_into_the_class(widths: set[int], rows: int) -> None:
    """rows * (1 + scratch) is a width of the class, the smallest there is; None only where none is a multiple."""
    scratch = scratch_sequences(width_class(*sorted(widths)), rows)
    multiples = [width for width in widths if width % rows == 0]
    assert (scratch is None) == (not multiples)
    if scratch is not None:
        assert rows * (1 + scratch) == min(multiples)
