"""The cost-aware policy by number: what each rule makes of costs, chances and the purse."""

from collections.abc import Sequence

import pytest
from attrs import evolve

from power_core.scheduler.cost_aware import CostAwarePolicy, _Forgone, _Worth, hot_widths
from power_core.scheduler.costs import fixed_curve
from power_core.scheduler.policy import DraftShape, Round
from scheduler.traces_of import CPU, K

CHEAP = 0.003  # what asking an n-gram lookup costs


@pytest.mark.parametrize(
    ("draft_max", "rows", "widths"),
    [
        (0, (), ()),
        (1, (), (1,)),
        (8, (), (1, 2, 3, 4, 5, 7, 8)),
        (70, (), (1, 2, 3, 4, 5, 7, 10, 15, 23, 31, 47, 63, 70)),
        (8, (1, 4, 8, 16), (3, 7, 8)),
        (8, (1, 2), (1, 8)),
        (8, (5, 9), (4, 8)),
        (8, (1, 10), (1, 2, 3, 4, 5, 7, 8)),
        (8, (1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5, 6, 8)),
        (8, (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 7, 8)),
    ],
)
def test_lengths_are_those_of_the_target_where_it_declares_few(draft_max, rows, widths):
    """Up to six; a length is a row less, as one row is the anchor's. The longest is always one of them."""
    assert hot_widths(draft_max, rows) == widths


def started(steps, draft=CHEAP, feeds=(), **settings):
    """A request whose drafter costs *draft* for any length, or for each."""
    table = draft if isinstance(draft, Sequence) else [draft] * 16
    costs = evolve(fixed_curve(steps, {"s": table}), feeds=dict(feeds))
    settings = {"head_start": 0.0, **settings}
    return CostAwarePolicy(lambda: costs, **settings).begin(DraftShape(K, strategy="s"))


def flat(extra):
    """Steps of which all that have more than one row cost *extra* more."""
    return (1.0, *[1.0 + extra] * 15)


@pytest.mark.parametrize(("purse", "bearable"), [(0.1, 1.9), (0.0, 1.5), (-0.25, 0.75), (-0.5, 0.0), (-0.6, 0.0)])
def test_an_unsure_proposal_risks_no_more_than_the_purse_holds(purse, bearable):
    """With a first token of 0.75 a quarter of the extra cost is at risk; 0.375 is lent, and less of it in debt."""
    for extra, cut in ((bearable - 0.01, K), (bearable + 0.01, 0)):
        width = started(flat(extra), allowance=purse)
        width.limit(K)
        assert width.trim([1] * K, None) == cut


@pytest.mark.parametrize(
    ("earlier", "steps", "cut"),
    [
        ((), [1 + 0.5 * n for n in range(16)], 2),  # 0.25, then 0.3125, then 0.234
        (([1] * 5,), [1 + 0.5 * n for n in range(16)], 1),  # at a rate of 1.197: 0.15, then 0.12
        ((), [1 + 0.74 * n for n in range(16)], 1),
        ((), [1 + 0.76 * n for n in range(16)], 0),
        ((), [1, 1.8, 2.2, 2.2, 3.0, *[9.0] * 11], 3),  # -0.05, then 0.11, then 0.53, then 0.05
    ],
)
def test_a_proposal_is_cut_where_its_worth_is_largest(earlier, steps, cut):
    """Tokens are right with 0.75 each, so they are expected to bring 0.75, 1.31, 1.73, 2.05, ..."""
    width = started(steps)
    for chosen in earlier:
        width.feedback(Round(0, 0, chosen))
    width.limit(K)
    assert width.trim([1] * K, None) == cut
    assert [*width.chances] == pytest.approx([0.75**n for n in range(1, K + 1)])
    assert width.trim([1] * 2, None) == min(cut, 2)
    assert width.trim([], None) == 0


@pytest.mark.parametrize(("more", "cut"), [(-0.01, 1), (0.01, 0)])
@pytest.mark.parametrize(
    ("beside", "steps", "most"), [(1, (1.0, 2.0), 0.75), (2, (1.0, 3.0, 3.0), 0.75), (2, (1.0, 1.2, 1.5), 0.375)]
)
def test_extra_rows_are_counted_from_those_of_others(beside, steps, most, more, cut):
    """Beside two rows the first token is the fourth; all three requests wait for it, and bring a token each for 1.5."""
    width = started((*steps, steps[-1] + most + more, *[9.0] * 12))
    width.limit(K, beside=beside)
    assert width.trim([1] * K, None, beside=beside) == cut


@pytest.mark.parametrize(("apart", "cut"), [(False, 1), (True, 0)])
def test_rows_that_run_apart_take_a_step_of_their_own(apart, cut):
    """Beside one other request a third row adds 0.2 to a step; in a pass of its own it takes a whole one."""
    costs = evolve(fixed_curve((1.0, 2.0, 2.2, *[9.0] * 12)), apart=apart)
    width = CostAwarePolicy(lambda: costs).begin(DraftShape(K, strategy="s"))
    width.limit(K, beside=1)
    assert width.trim([1] * K, None, beside=1) == cut


def test_the_purse_and_the_rate_are_those_of_what_was_computed():
    """A round of 5 tokens for 2.72 steps; the rate forgets a part of 0.035 each round."""
    width = started(CPU, draft=0.1, feeds={"s": (0.03, 0.01)})
    width.feedback(Round(0, 0, [7]))
    assert width.summary() == {"asks": 0, "probes": 0, "purse": 0.7615, "rate": 1.0, "curve": 0}
    width.feedback(Round(4, 4, [7] * 5))
    tokens, cost = ((20 * 0.965 + 1) * 0.965 + further for further in (5, 2.72))
    assert width.summary()["rate"] == round(tokens / cost, 4)
    assert width.summary()["purse"] == round(0.7615 + 5 - 2.72 + 0.0575, 4)
    for _ in range(2):
        width.feedback(Round(8, 8, [7] * 9))
    assert width.summary()["purse"] == 6.0
    for _ in range(60):
        width.feedback(Round(8, 0, [7]))
    assert width.summary()["rate"] == 1.0


def test_what_asking_took_is_paid_for():
    """Also what the drafter was told before; not where it was not asked."""
    width = started(flat(0.0), draft=0.1, feeds={"s": (0.03, 0.01)}, budget=0.0)
    for asks, purse in ((1, 0.65), (2, 0.52)):
        assert width.limit(K, backlog=1) > 0
        width.trim([], None)
        width.feedback(Round(0, 0, [7]))
        assert (width.summary()["asks"], width.summary()["purse"]) == (asks, purse)
    assert width.limit(0, backlog=1) == 0
    width.feedback(Round(0, 0, [7]))
    assert (width.summary()["asks"], width.summary()["purse"]) == (2, 0.52)


def test_a_request_decodes_plainly_after_eight_rounds_without_a_draft():
    width = started(CPU)
    modes = [width.mode]
    for drafted in (1, *[0] * 8, 2):
        width.feedback(Round(drafted, 0, [7]))
        modes.append(width.mode)
    assert modes == ["plain", *["drafting"] * 8, "plain", "drafting"]


@pytest.mark.parametrize(
    ("cost", "room", "asked"),
    [(0.2, K, 3), (0.2, 2, 2), (0.2, 6, 3), (0.3, K, 2), (0.55, K, 1), (0.61, K, 0), (0.2, 0, 0)],
)
def test_a_drafter_is_asked_for_the_length_that_brings_most(cost, room, asked):
    """At first a token is taken to be right with 0.6: worth 0.6, 0.96, 1.18, 1.31, ... where rows are free."""
    assert started(flat(0.0), draft=[cost * n for n in range(1, 17)]).limit(room) == asked


def test_a_good_rate_makes_asking_dearer():
    """Time brings 1.197 tokens, so that a third token at 0.2 brings less than it takes."""
    width = started(flat(0.0), draft=[0.2 * n for n in range(1, 17)])
    width.feedback(Round(0, 0, [7] * 5))
    assert width.limit(K) == 2


@pytest.mark.parametrize(("purse", "asked"), [(-0.49, 3), (-0.5, 0)])
def test_a_request_deep_in_debt_asks_for_nothing(purse, asked):
    assert started(flat(0.0), draft=[0.2 * n for n in range(1, 17)], allowance=purse).limit(K) == asked


@pytest.mark.parametrize(("cost", "asked"), [(0.008, 2), (0.009, 0)])
def test_what_costs_next_to_nothing_is_always_asked(cost, asked):
    """For all there is room for, also in debt."""
    assert started(CPU, draft=cost, allowance=-1.0).limit(2) == asked


def probes(width, chosen, rounds=45):
    """The rounds in which something was asked, and the lengths, where the target chooses *chosen* each time."""
    asked = {}
    for round_ in range(rounds):
        length = width.limit(K, backlog=1)
        width.trim([1] * length, None)
        width.feedback(Round(0, 0, [chosen]))
        if length:
            asked[round_] = length
    return asked


def test_a_drafter_without_worth_is_probed_ever_more_seldom():
    """After 2 tokens, 4, 8 and then each 12; where its first token was right, after 2 again."""
    assert [*probes(started(CPU, draft=0.05), chosen=2)] == [2, 7, 16, 29, 42]
    assert [*probes(started([1 + 0.99 * n for n in range(16)], draft=0.05), chosen=1, rounds=12)] == [2, 5, 8, 11]


def test_a_probe_asks_for_what_costs_little_more_than_the_shortest():
    """Up to half more."""
    assert probes(started(CPU, draft=[0.05, 0.06, 0.0749, *[0.0751] * 13]), chosen=2, rounds=3) == {2: 3}


@pytest.mark.parametrize(("purse", "rounds"), [(0.071, [2]), (0.069, [])])
def test_a_probe_is_paid_from_the_purse(purse, rounds):
    """Asking takes 0.05, and telling the drafter before 0.02."""
    width = started(CPU, draft=0.05, feeds={"s": (0.02, 0.01)}, allowance=purse, budget=0.0)
    assert [*probes(width, chosen=2, rounds=20)] == rounds
    assert width.summary()["probes"] == len(rounds)
    assert width.summary()["purse"] == round(purse - 0.07 * len(rounds), 4)


@pytest.mark.parametrize(("cost", "rounds"), [(0.07, [2]), (0.09, [])])
def test_a_probe_that_could_not_pay_is_not_made(cost, rounds):
    """Where each row takes 0.99 of a step, 8 right tokens save 0.08."""
    assert [*probes(started([1 + 0.99 * n for n in range(16)], draft=cost), chosen=2, rounds=4)] == rounds


def test_proposals_that_would_have_paid_fill_the_purse_up():
    """Each time 3 tokens and one more came for the 2 steps that checking would have cost; drift takes 0.4."""
    forgone = _Forgone()
    assert forgone.follow([1]) == 0.0
    earned = []
    for _ in range(6):
        forgone.watch([1, 2, 3], 2.0)
        earned.append((forgone.follow([1]), forgone.follow([2, 3, 4])))
    assert earned == [(0.0, pytest.approx(gain)) for gain in (0, 0, 0, 6.4 * 0.6, 0, 0)]


def test_losses_count_against_what_was_forgone_down_to_nothing():
    """A proposal that is wrong at once would have lost the steps of checking it, but for one token."""
    forgone, earned = _Forgone(), []
    for ids, chosen in (([1] * 5, [2]), ([1] * 5, [1] * 6), ([1] * 5, [1, 2]), ([1] * 5, [1] * 5), ([1] * 5, [1] * 5)):
        forgone.watch(ids, 2.0)
        earned.append(forgone.follow(chosen))
    # After each: 0, 3.6, 3.2, 6.8 of which 0.6 are given, 3.6
    assert earned == [0, 0, 0, pytest.approx(6.8 * 0.6), 0]


def test_one_proposal_is_watched_at_a_time():
    forgone = _Forgone()
    forgone.watch([1] * 9, 2.0)
    assert forgone.follow([1, 1]) == 0.0
    forgone.watch([5], 0.0)
    assert forgone.follow([1] * 7) == pytest.approx((9 + 1 - 2.0 - 0.4) * 0.6)
    assert forgone.follow([5]) == 0.0


def worths(worth, context, ladder):
    """What each length is taken to be worth: asking for it pays up to that cost."""
    found = []
    for k in ladder:
        low, high = 0.0, 16.0
        for _ in range(40):
            middle = (low + high) / 2
            is_worth = worth.best(context, [k], (0.0,), middle, 1.0) == k
            low, high = (middle, high) if is_worth else (low, middle)
        found.append(round(low, 6))
    return found


@pytest.mark.parametrize(("was_right", "curiosity"), [(False, 0.0), (True, 0.6)])
def test_worth_moves_toward_what_proposals_were_worth(was_right, curiosity):
    """By 0.2; lengths that were not asked for keep their lead, with a part of the last step where all was right."""
    ladder = (1, 2, 4, 8)
    worth = _Worth(ladder, fixed_curve([1.0] * 9))
    before = [sum(0.6**i for i in range(1, k + 1)) for k in ladder]
    assert worths(worth, 1, ladder) == pytest.approx(before, abs=1e-5)
    worth.add(1, 2, [0.9, 1.7], was_right=was_right)
    moves = [0.9 - before[0], 1.7 - before[1], *[1.7 - before[1] + curiosity * 0.8] * 2]
    assert worths(worth, 1, ladder) == pytest.approx(
        [b + 0.2 * move for b, move in zip(before, moves, strict=True)], abs=1e-5
    )
    assert worths(worth, 2, ladder) == pytest.approx([sum(0.9**i for i in range(1, k + 1)) for k in ladder], abs=1e-5)


def test_a_short_proposal_is_worth_as_much_at_every_length_asked():
    """Of 8 tokens asked for one came."""
    ladder = (1, 2, 4, 8)
    worth = _Worth(ladder, fixed_curve([1.0] * 9))
    before = worths(worth, 0, ladder)
    worth.add(0, 8, [0.4], was_right=False)
    assert worths(worth, 0, ladder) == pytest.approx([b + 0.2 * (0.4 - b) for b in before], abs=1e-5)


def test_at_first_a_length_is_worth_what_its_best_cut_is():
    """Rows take 0.5 each: one token of chance 0.6 brings 0.1, and no more are worth more."""
    ladder = (1, 2, 4)
    worth = _Worth(ladder, fixed_curve([1 + 0.5 * n for n in range(9)]))
    assert worths(worth, 1, ladder) == pytest.approx([0.1] * 3, abs=1e-5)
    sure = [sum(0.95**i for i in range(1, k + 1)) - 0.5 * k for k in ladder]
    assert worths(worth, 3, ladder) == pytest.approx(sure, abs=1e-5)


def test_an_empty_purse_is_filled_up_by_what_it_kept_from_being_checked():
    """Twice 5 right tokens, for 2.2 steps each: 0.6 of twice 5 + 1 - 2.2 - 0.4."""
    width = started((1.0, *[2.0] * 4, 2.2, *[9.0] * 10), allowance=-0.5, budget=0.0)
    purses = []
    for _ in range(10):
        width.limit(K)
        assert width.trim([1] * K, None) == 0
        width.feedback(Round(0, 0, [1]))
        purses.append(width.summary()["purse"])
    assert purses[-2:] == pytest.approx([-0.5 - 9 * CHEAP, -0.5 - 10 * CHEAP + 0.6 * 6.8])


def test_longer_proposals_are_tried_where_short_ones_were_right():
    """A second token at 0.4 would not be worth it, had the only one asked for not been right."""
    width = started(flat(0.0), draft=[0.3, 0.7, *[9.0] * 14])
    asked = []
    for room, chosen in ((1, [1]), (K, [1, 2]), (K, [1])):  # then the last proposal was right in part, as at first
        asked.append(width.limit(room))
        width.trim([1] * asked[-1], None)
        width.feedback(Round(0, 0, chosen))
    assert asked == [1, 2, 2]


def test_lengths_beyond_those_timed_cost_what_the_longest_does():
    assert probes(started(CPU, draft=[0.05] * 4), chosen=2, rounds=3) == {2: K}
    assert started(flat(0.0), draft=[0.1, 0.1, 2.0]).limit(K) == 2
