"""Costs learned from timings on a machine that is not quiet."""

import random

import pytest

from power_core.scheduler.costs import CostModel
from power_core.shapes import ShapeIdentity, WidthClass

TRUE = {1: 1.0, 2: 1.9, 4: 2.4, 8: 3.7, 16: 5.4}


def make_model(widths=(1, 2, 4, 8, 16), costs=()):
    return CostModel(WidthClass(ShapeIdentity("x"), widths, costs))


def feed(model, rounds, *, seed=0, second=0.008, noise=0.05, spikes=0.05, widths=tuple(TRUE)):
    rng = random.Random(seed)
    for _ in range(rounds):
        width = rng.choice(widths)
        seconds = TRUE[width] * second * rng.uniform(1 - noise, 1 + noise)
        model.observe_forward(width, seconds * (20 if rng.random() < spikes else 1))


def test_before_any_timing_the_targets_own_measurement_counts():
    assert make_model(costs=(2.0, 3.0, 4.0, 6.0, 10.0)).curve.steps[:5] == (0.0, 1.0, 1.5, 2.0, 2.0)


def test_rows_are_padded_to_the_declared_widths():
    curve = make_model(costs=tuple(TRUE.values())).curve
    assert [curve.step(n) for n in (3, 4, 5, 8)] == [2.4, 2.4, 3.7, 3.7]


def test_a_wrong_prior_is_corrected_by_timings():
    """Also where one timing in twenty is twenty times too long."""
    model = make_model(costs=(1.0, 1.0, 1.0, 1.0, 1.0))
    feed(model, 400)
    for width, cost in TRUE.items():
        assert model.curve.step(width) == pytest.approx(cost, rel=0.1)


def test_a_machine_that_slows_down_changes_no_ratio():
    """A neighbour takes half of the cores: every step doubles, and no decision changes."""
    model = make_model(costs=tuple(TRUE.values()))
    for second in (0.008, 0.016, 0.008, 0.080):
        feed(model, 60, second=second)
        for width, cost in TRUE.items():
            assert model.curve.step(width) == pytest.approx(cost, rel=0.15)
    assert model.single_row_s == pytest.approx(0.080, rel=0.1)


def test_widths_nobody_used_follow_the_measured_ones():
    """Only 1 and 8 rows are ever timed; 8 cost twice what was thought, so 4 and 16 are dearer too."""
    model = make_model(costs=(1.0, 1.2, 1.4, 1.85, 2.7))
    feed(model, 200, widths=(1, 8))
    assert model.curve.step(8) == pytest.approx(3.7, rel=0.1)
    assert model.curve.step(16) == pytest.approx(2.7 * 2, rel=0.1)
    assert 1.4 < model.curve.step(4) < 3.7


def test_the_curve_holds_still_between_refreshes():
    """Decisions are made against few curves, each with a number."""
    model = make_model()
    versions = []
    for _ in range(200):
        feed(model, 1)
        versions.append(model.curve.version)
    assert len(set(versions)) <= 200 / 16 + 3
    assert versions == sorted(versions)


def test_the_same_timings_give_the_same_curves():
    curves = []
    for _ in range(2):
        model = make_model()
        feed(model, 100, seed=3)
        model.observe_draft("s", 4, 0.002)
        curves.append(model.curve)
    assert curves[0] == curves[1]


def test_draft_costs_are_medians_in_units_of_a_plain_step():
    model = make_model(costs=tuple(TRUE.values()))
    feed(model, 50, spikes=0)
    for seconds in (0.004, 0.004, 0.5, 0.004, 0.004):
        model.observe_draft("s", 8, seconds)
    assert model.curve.draft("s", 8) == pytest.approx(0.5, rel=0.1)
    assert model.curve.draft("s", 0) == model.curve.draft("unknown", 8) == 0


def test_draft_costs_of_other_lengths_lie_on_a_line_once_two_are_known():
    model = make_model(costs=tuple(TRUE.values()))
    feed(model, 50, spikes=0)
    model.observe_draft("s", 2, 0.002)
    model.observe_draft("s", 6, 0.006)
    assert model.curve.draft("s", 4) == pytest.approx(0.5, rel=0.1)


def test_a_forward_wider_than_the_class_is_not_taken_for_one_of_it():
    """Mixed steps hold prompt rows of others."""
    model = make_model(costs=tuple(TRUE.values()))
    before = model.curve
    model.observe_forward(256, 9.0)
    assert model.single_row_s is None
    assert model.curve == before


def test_requests_that_decode_together_need_no_plain_steps():
    """Without a single row ever timed, steps of 4 rows say what a plain one would take, and so drafts have a cost."""
    model = make_model(costs=tuple(TRUE.values()))
    for _ in range(20):
        model.observe_forward(4, TRUE[4] * 0.010)
    model.observe_draft("s", 4, 0.005)
    assert model.single_row_s == pytest.approx(0.010)
    assert model.curve.draft("s", 4) == pytest.approx(0.5)


def test_old_plain_steps_are_no_measure_of_new_wide_ones():
    """The machine slows down to half while only wide steps are taken: no width has become dearer for that."""
    model = make_model(costs=tuple(TRUE.values()))
    feed(model, 60, noise=0, spikes=0)
    for _ in range(101):
        model.observe_forward(8, TRUE[8] * 0.008)
    for _ in range(50):
        model.observe_forward(8, TRUE[8] * 0.016)
    assert model.curve.step(8) == pytest.approx(TRUE[8])
    assert model.single_row_s == pytest.approx(0.016)


def test_a_plain_step_is_wanted_where_only_wide_ones_were_timed():
    """Three at first, and one whenever the last is long ago: all costs are relative to it."""
    model = make_model()
    for _ in range(3):
        assert model.needs_plain_step
        model.observe_forward(8, 0.03)
        model.observe_forward(1, 0.01)
    assert not model.needs_plain_step
    for _ in range(251):
        model.observe_forward(8, 0.03)
    assert model.needs_plain_step
    model.observe_forward(1, 0.01)
    assert not model.needs_plain_step
