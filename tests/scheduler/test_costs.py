"""Costs learned from timings on a machine that is not quiet."""

import random

import pytest

from power_core.scheduler.costs import CostCurve, CostModel, fixed_curve, interpolate
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


def in_seconds(*widths, costs=()):
    """A model whose step of the fewest rows takes one second, so that timings are costs."""
    model = make_model(widths or (1, 2, 4), costs)
    model.observe_forward(model.widths[0], 1.0)
    return model


def refreshed(model):
    """The curve of all that was told until now."""
    model.observe_draft(f"unknown {model.curve.version}", 1, 1.0)
    return model.curve


@pytest.mark.parametrize(
    ("timings", "cost"),
    [
        ([2, 3], 3),
        ([1, 2, 3], 2),
        ([1, 3], 3),
        ([1, 3.1], 1),
        ([3, 1, 1], 1),
        ([3.1, 1, 1], 3.1),
        ([1] * 5 + [10] * 4, 1),
        ([1] * 5 + [10] * 4 + [1] + [10] * 4, 1),
        ([1] * 5 + [10] * 5, 10),
        ([1] * 5 + [10] * 5 + [12] * 2, 12),
        ([1] * 5 + [10] * 5 + [100] * 4, 10),
        ([1] * 15 + [2] * 7, 1),
        ([2] * 15 + [1] * 8, 1),
    ],
)
def test_a_cost_is_the_median_of_the_last_timings_but_far_ones(timings, cost):
    """Of 15, the upper one; a timing beyond three times or a third of it is dropped, until five follow each other."""
    model = in_seconds()
    for seconds in timings:
        model.observe_draft("s", 8, seconds)
    assert refreshed(model).draft("s", 8) == cost


@pytest.mark.parametrize(
    ("timings", "speed"),
    [([1], 1), ([1, 2], 2), ([3, 1, 2], 2), ([1] * 8 + [3] * 3, 1), ([3] * 8 + [1] * 4, 1), ([1] * 7 + [3] * 4, 3)],
)
@pytest.mark.parametrize("width", [1, 4])
def test_the_machines_speed_is_the_median_of_seven_timings(timings, speed, width):
    """Of single rows, or of what wider steps imply where there are none."""
    model = make_model((1, 4), costs=(1.0, 2.0))
    for seconds in timings:
        model.observe_forward(width, seconds * (2 if width > 1 else 1))
    assert model.single_row_s == speed


def test_a_single_row_outweighs_what_wider_steps_implied():
    model = make_model((1, 4), costs=(1.0, 2.0))
    for _ in range(7):
        model.observe_forward(4, 20.0)
    assert model.single_row_s == 10.0
    model.observe_forward(1, 1.0)
    assert model.single_row_s == 1.0


def test_the_targets_own_measurement_counts_for_three_timings():
    model = in_seconds(1, 2, costs=(1.0, 2.0))
    for after, cost in enumerate((2, 2, 3), 1):
        model.observe_forward(2, 3.0)
        assert (after, refreshed(model).step(2)) == (after, cost)


def test_wide_steps_are_compared_with_the_median_of_single_rows():
    model = make_model((1, 2), costs=(1.0, 4.0))
    for seconds in (4.0, 1.0, 2.0):
        model.observe_forward(1, seconds)
    for _ in range(4):
        model.observe_forward(2, 10.0)
    assert refreshed(model).step(2) == 5.0


def test_a_new_curve_is_made_every_sixteen_forwards_and_early_once():
    """Also where a proposal of an unknown length was timed, and at nothing else."""
    model, versions = make_model(), []
    for _ in range(49):
        versions.append(model.curve.version)
        model.observe_forward(1, 1.0)
    assert versions == [0] * 4 + [1] * 12 + [2] * 16 + [3] * 16 + [4]
    for tokens, version in ((4, 5), (4, 5), (2, 6)):
        model.observe_draft("s", tokens, 1.0)
        assert model.curve.version == version
    model.observe_feed("s", 2, 1.0)
    assert model.curve is model.curve
    assert model.curve.version == 6


def test_a_plain_step_is_out_of_date_after_a_hundred_forwards():
    model = make_model()
    for needed in (True, True, False):
        model.observe_forward(1, 1.0)
        assert model.needs_plain_step == needed
    for _ in range(100):
        model.observe_forward(2, 5.0)
    assert (model.needs_plain_step, model.single_row_s) == (False, 1.0)
    model.observe_forward(2, 5.0)
    assert (model.needs_plain_step, model.single_row_s) == (True, 1.0)


def test_forwards_that_are_none_of_the_class_make_no_step_old():
    model = make_model()
    for _ in range(3):
        model.observe_forward(1, 1.0)
    for _ in range(200):
        model.observe_forward(64, 5.0)
    assert not model.needs_plain_step


@pytest.mark.parametrize(
    ("widths", "costs", "steps", "row"),
    [
        ((1, 2, 4), (1, 2, 4), (0, 1, 2, 4, 4), 1.0),
        ((1, 2), (2, 3), (0, 1, 1.5), 0.5),
        ((1,), (2,), (0, 1), 0.0),
        ((1, 2, 3, 4), (1, 4, 3, 2), (0, 1, 4, 3, 2), 0.0),
        ((1, 2, 3, 4), (1, 2, 2.25, 3.5), (0, 1, 2, 2.25, 3.5), 0.75),
        ((2, 4), (), (0, 1, 1, 1.6, 1.6), 0.3),
        ((1, 2), (0, 4), (0, 1, 4), 3.0),
        ((1, 2), (0.5, 1), (0, 1, 2), 1.0),
    ],
)
def test_steps_wider_than_any_cost_what_the_upper_half_of_the_table_goes_on_to(widths, costs, steps, row):
    """Never less than the widest; what a target did not measure takes 0.3 a row."""
    curve = make_model(widths, costs).curve
    assert curve.steps == pytest.approx(steps)
    assert curve.row == pytest.approx(row)
    assert curve.step(len(steps) + 1) == pytest.approx(steps[-1] + 2 * row)


def test_a_width_between_measured_ones_is_corrected_by_both():
    """In the logarithm of rows: 4 rows cost twice the prior, so 2 rows half again as much, and 8 twice."""
    model = in_seconds(1, 2, 4, 8, costs=(1.0, 2.0, 2.0, 3.0))
    for _ in range(4):
        model.observe_forward(4, 4.0)
    curve = refreshed(model)
    assert [curve.step(rows) for rows in (1, 2, 4, 8)] == pytest.approx([1, 3, 4, 6])


def test_half_of_a_drafts_cost_is_fixed_until_a_second_length_is_timed():
    model = in_seconds()
    model.observe_draft("s", 8, 4.0)
    curve = model.curve
    assert [curve.draft("s", tokens) for tokens in (0, 1, 4, 8, 16, 99)] == [0, 2.25, 3, 4, 4, 4]
    assert len(curve.drafts["s"]) == 17
    model.observe_draft("s", 4, 1.0)
    assert [model.curve.draft("s", tokens) for tokens in (1, 4, 6, 8, 9)] == [1, 1, 2.5, 4, 4]


def test_a_table_is_as_long_as_proposals_may_be():
    model = CostModel(WidthClass(ShapeIdentity("x"), (1, 2)), draft_max=4)
    model.observe_forward(1, 1.0)
    model.observe_draft("s", 1, 1.0)
    assert model.curve.drafts == {"s": (0, 1, 1, 1, 1)}


def test_nothing_is_made_of_a_timing_without_a_speed_or_for_nothing():
    """Before a step was timed, where one took no time, and of no tokens or rows."""
    model, instant = make_model(), make_model()
    instant.observe_forward(1, 0.0)
    for each in (model, instant):
        each.observe_draft("s", 4, 1.0)
        each.observe_feed("s", 4, 1.0)
    model.observe_forward(1, 1.0)
    model.observe_draft("s", 0, 1.0)
    model.observe_feed("s", 0, 1.0)
    for each in (model, instant):
        assert (dict(each.curve.drafts), dict(each.curve.feeds)) == ({}, {})


@pytest.mark.parametrize(
    ("timings", "feeds"),
    [
        ([(1, 3.0)], (3.0, 0.1875)),
        ([(16, 3.0)], (3.0, 0.1875)),
        ([(17, 34.0)], (32.0, 2.0)),
        ([(4, 3.0), (32, 16.0)], (3.0, 0.5)),
    ],
)
def test_telling_few_rows_takes_a_call_and_many_each_their_time(timings, feeds):
    """Where one of them was never timed it is taken from the other: 16 rows take what a call does."""
    model = in_seconds()
    model.observe_forward(1, 2.0), model.observe_forward(1, 2.0)
    for rows, seconds in timings:
        model.observe_feed("s", rows, 2 * seconds)
    assert refreshed(model).feeds["s"] == feeds


def test_what_a_curve_says_of_a_feed():
    curve = CostCurve(0, (0.0, 1.0), 0.5, {}, {"s": (2.0, 0.25), "t": (20.0, 0.25)})
    assert [curve.feed("s", rows) for rows in (0, 1, 16, 17, 20)] == [0, 2, 2, 4.25, 5]
    assert (curve.feed("t", 17), curve.feed("u", 17), curve.feed("u", 3)) == (20, 0, 0)


def test_a_curve_is_written_without_its_zeros():
    curve = CostCurve(0, (0.0, 1.0, 1.23456), 0.5, {"s": (0.0, 0.123456)}, {"s": (0.5, 0.0312549)})
    assert curve.to_json() == {
        "rows": {"1": 1.0, "2": 1.2346},
        "drafts": {"s": [0.12346]},
        "feeds": {"s": [0.5, 0.03125]},
    }


def test_a_curve_measured_elsewhere_is_brought_to_plain_steps():
    curve = fixed_curve([8.0, 16.0, 20.0], {"s": [4.0, 6.0]})
    assert (curve.version, curve.steps, curve.row) == (0, (0.0, 1.0, 2.0, 2.5), 0.75)
    assert [curve.draft("s", tokens) for tokens in (0, 1, 2, 3)] == [0, 0.5, 0.75, 0.75]
    assert [curve.step(rows) for rows in (3, 5)] == [2.5, 4.0]
    assert fixed_curve([8.0, 16.0]).row == 1.0
    assert fixed_curve([8.0]) == CostCurve(0, (0.0, 1.0), 0.0, {})


@pytest.mark.parametrize(("x", "y"), [(0, 10), (1, 10), (2, 20), (3, 30), (3.5, 35), (5, 50), (6, 50)])
def test_between_points_lies_a_line_and_beyond_them_the_last(x, y):
    assert interpolate([(1, 10), (3, 30), (5, 50)], x, default=7) == y
    assert interpolate([(1, 10)], x, default=7) == 10
    assert interpolate([], x, default=7) == 7
