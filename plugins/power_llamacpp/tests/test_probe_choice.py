"""Choosing a setting from measurements: exactness decides, time only breaks ties."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from power_llamacpp.probe_choice import Measurement, ProbeSettings, choose, width_classes

from power_core.shapes import ExactnessLevel

WIDEST = 16
PLAIN, EXTRA = ProbeSettings(False, False), ProbeSettings(True, False)
FUSED = ProbeSettings(False, True)


def measured(
    classes: list[range], settings: ProbeSettings = PLAIN, *, ms: float = 10.0, stable=None, **facts
) -> Measurement:
    """A measurement in which exactly the widths of each range agree; forwards of n rows take ms * (1 + n / 4)."""
    rows = {
        width: {str(position): f"{number}-{position}" for position in range(WIDEST if width == 1 else max(width, 8))}
        for number, widths in enumerate(classes)
        for width in widths
    }
    times = {width: ms * (1 + width / 4) for width in rows}
    differences = dict.fromkeys(rows, 0.0)
    return Measurement(settings, rows, stable or dict.fromkeys(rows, True), times, differences, **facts)


def dead(settings: ProbeSettings) -> Measurement:
    return Measurement(settings, failure="died of SIGILL")


@given(st.lists(st.integers(0, 3), min_size=WIDEST, max_size=WIDEST))
def test_classes_are_the_partition_by_equal_rows(labels: list[int]) -> None:
    """Widths share a class exactly when they give the same rows."""
    rows = {width: {str(p): f"{labels[width - 1]}-{p}" for p in range(max(8, width))} for width in range(1, WIDEST + 1)}
    measurement = Measurement(PLAIN, rows, dict.fromkeys(rows, True))
    classes = width_classes(measurement)
    assert sorted(width for widths in classes for width in widths) == list(rows)
    for widths in classes:
        assert len({labels[width - 1] for width in widths}) == 1
    assert len(classes) == len(set(labels))


def test_late_rows_count() -> None:
    """A width that differs in its last row only is in a class of its own: remainders of a tile are late rows."""
    odd = measured([range(1, 17)])
    odd.rows[13]["12"] = "another"
    assert width_classes(odd) == [tuple(w for w in range(1, 17) if w != 13), (13,)]


def test_one_class_is_bitwise() -> None:
    """All widths in one class: nothing to pad, nothing to clamp."""
    choice = choose([measured([range(1, 17)])], WIDEST)
    assert choice is not None
    assert (choice.level, choice.widths) == (ExactnessLevel.BITWISE, tuple(range(1, 17)))


@pytest.mark.parametrize(("ms", "expected"), [(9.0, EXTRA), (9.7, PLAIN), (10.0, PLAIN), (20.0, PLAIN)])
@pytest.mark.parametrize("reverse", [False, True])
def test_repacked_weights_must_be_clearly_faster(ms: float, expected: ProbeSettings, reverse: bool) -> None:
    """Between exact settings the plain one stays unless the other saves 5 %, whichever was measured first."""
    both = [measured([range(1, 17)], ms=10.0), measured([range(1, 17)], EXTRA, ms=ms)]
    choice = choose(both[::-1] if reverse else both, WIDEST)
    assert choice is not None
    assert choice.measured.settings == expected


def test_speed_does_not_buy_exactness() -> None:
    """A setting ten times as fast loses against one whose class is larger."""
    fast = measured([range(1, 2), range(2, 17)], EXTRA, ms=1.0)
    choice = choose([measured([range(1, 17)]), fast], WIDEST)
    assert choice is not None
    assert choice.measured.settings == PLAIN


@pytest.mark.parametrize(
    ("classes", "level", "widths"),
    [
        ([range(1, 8), range(8, 17)], ExactnessLevel.BITWISE, range(1, 8)),
        ([range(1, 2), range(2, 17)], ExactnessLevel.PADDED, range(2, 17)),
        ([range(1, 4), range(4, 17)], ExactnessLevel.PADDED, range(4, 17)),
        ([range(1, 2), range(2, 8), range(8, 17)], ExactnessLevel.PADDED, range(2, 8)),
        ([range(1, 3), range(3, 5), range(5, 7), range(7, 17)], ExactnessLevel.PADDED, range(7, 17)),
    ],
)
def test_split_classes(classes: list[range], level: ExactnessLevel, widths: range) -> None:
    """The class of single rows where it verifies a few, else the class that does with the least padding."""
    choice = choose([measured(classes)], WIDEST)
    assert choice is not None
    assert (choice.level, choice.widths) == (level, tuple(widths))


def test_recurrent_memory_is_not_padded() -> None:
    """Pad rows would stay in a recurrent state: single rows alone are then the exact choice."""
    choice = choose([measured([range(1, 2), range(2, 17)], is_recurrent=True)], WIDEST)
    assert choice is not None
    assert (choice.level, choice.widths) == (ExactnessLevel.BITWISE, (1,))


def test_disturbing_companions_bound_the_class() -> None:
    """Where rows of two sequences disturb each other from 9 rows on, steps stay below."""
    choice = choose([measured([range(1, 17)], companions={2: True, 4: True, 9: False, 16: False})], WIDEST)
    assert choice is not None
    assert choice.widths == tuple(range(1, 9))


def test_unstable_widths_are_in_no_class() -> None:
    """A width that does not give the same rows twice is not used; the class ends before it."""
    stable = {width: width != 6 for width in range(1, 17)}
    choice = choose([measured([range(1, 17)], stable=stable)], WIDEST)
    assert choice is not None
    assert (choice.level, choice.widths) == (ExactnessLevel.BITWISE, (1, 2, 3, 4, 5))


def test_unstable_single_rows_promise_nothing() -> None:
    """A library that does not repeat itself is unverified, and any setting that does is preferred."""
    shaky = measured([range(1, 17)], stable=dict.fromkeys(range(1, 17), False))
    choice = choose([shaky], WIDEST)
    assert choice is not None
    assert choice.level is ExactnessLevel.UNVERIFIED
    other = choose([shaky, measured([range(1, 2), range(2, 17)], EXTRA)], WIDEST)
    assert other is not None
    assert other.level is ExactnessLevel.PADDED


def test_death_is_a_no() -> None:
    """A setting that dies is never taken, a glance at a few widths neither; with nothing alive there is no choice."""
    glance = measured([range(1, 3)], FUSED, ms=0.1)
    choice = choose([dead(EXTRA), measured([range(1, 17)]), glance], WIDEST)
    assert choice is not None
    assert choice.measured.settings == PLAIN
    assert choose([dead(EXTRA), dead(PLAIN)], WIDEST) is None


def test_answers_become_measurements() -> None:
    """A child's error and logits that are no numbers are failures; both are shown."""
    error = Measurement.of(PLAIN, {"error": "died of SIGABRT"})
    infinite = Measurement.of(EXTRA, {"finite": False})
    assert error.summary() == {"extra_buffers": False, "flash_attention": False, "failure": "died of SIGABRT"}
    assert "not finite" in infinite.summary()["failure"]
