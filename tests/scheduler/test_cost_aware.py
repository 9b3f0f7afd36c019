"""The cost-aware policy: never slower than plain decoding, near the best fixed length, quick to recover (case 25)."""

import time

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from power_core.scheduler.cost_aware import CostAwarePolicy, hot_widths
from power_core.scheduler.costs import CostModel, fixed_curve
from power_core.scheduler.policy import DraftShape, FixedPolicy, Round
from power_core.scheduler.simulate import oracle_cost, replay
from power_core.shapes import ShapeIdentity, WidthClass
from scheduler.traces_of import CPU, GPU, K, chance_trace, confident_trace, curve, trace

NO_REGRET = 0.98
CHEAP, BLOCK = 0.003, 0.7  # what a proposal costs: an n-gram lookup, a pass of a block drafter


def run(recorded, steps=CPU, draft=CHEAP):
    costs = curve(steps, draft)
    return replay(CostAwarePolicy(lambda: costs), recorded, costs)


def best_fixed(recorded, steps=CPU, draft=CHEAP):
    return max(replay(FixedPolicy(k), recorded, curve(steps, draft)).speed for k in range(1, K + 1))


WORST = {
    "never right": trace((512, 0)),
    "first right, then wrong": trace((512, 1)),
    "two right": trace((512, 2)),
    "one time in three": chance_trace(512, 0.3, seed=1),
    "one time in two": chance_trace(512, 0.5, seed=2),
    "two in three": chance_trace(512, 0.65, seed=3),
    "right and wrong by turns": trace(*[(6, 0), (6, 6)] * 42),
    "a lure": trace(*[(3, 3), (20, 0)] * 22),
}


@pytest.mark.parametrize("draft", [CHEAP, BLOCK])
@pytest.mark.parametrize("steps", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("text", WORST)
def test_no_text_makes_it_slower_than_plain_decoding(text, steps, draft):
    assert run(WORST[text], steps, draft).speed >= NO_REGRET


@pytest.mark.parametrize("steps", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("right", [2, 4, 8])
def test_text_that_drafts_well_gets_nearly_the_best_fixed_length(right, steps):
    recorded = trace((512, right))
    assert run(recorded, steps).speed >= 0.95 * best_fixed(recorded, steps)


def test_confidence_is_worth_more_than_any_fixed_length():
    recorded = confident_trace(1024, seed=5)
    assert run(recorded).speed > best_fixed(recorded)


def test_the_oracle_is_a_limit():
    for recorded in WORST.values():
        assert run(recorded).cost >= oracle_cost(recorded, curve()) - 1e-9


@pytest.mark.parametrize("draft", [CHEAP, BLOCK])
def test_a_drafter_that_finds_its_text_again_is_used_again(draft):
    """100 tokens without a hit, then an oracle: after 64 tokens more, above 80 % of the oracle's speed."""
    recorded = trace((100, 0), (200, K))
    result = run(recorded, draft=draft)
    oracle = run(trace((400, K)), draft=draft)
    late = 136 / (result.cost - result.cost_until(164))
    assert late >= 0.8 * 200 / (oracle.cost - oracle.cost_until(200))


def test_a_drafter_that_is_never_right_is_left_alone():
    """Case 25a: proposals checked per emitted token stay below 1/4 after the first 64 tokens."""
    costs = curve()
    result = replay(CostAwarePolicy(lambda: costs), trace((256, 0)), costs)
    assert result.drafted <= 3


def test_a_free_drafter_is_asked_every_fourth_token_once_it_is_no_use():
    """Even a look that costs nothing takes the step some time; one right token, and it is asked each round again."""
    costs, asked = curve(), []
    width = CostAwarePolicy(lambda: costs).begin(DraftShape(K, strategy="s"))
    for round_ in range(120):
        asked.append(bool(width.limit(K)))
        ids = [7 if round_ < 100 else 1] * K if asked[-1] else []
        kept = width.trim(ids, None)
        width.feedback(Round(kept, kept if round_ >= 100 else 0, [1] * (kept if round_ >= 100 else 0) + [1]))
    counts = [sum(asked[first : first + 20]) for first in (0, 20, 40, 60, 80)]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (16, 5)
    assert asked[104:] == [True] * 16


def test_nothing_to_propose_is_no_wrong_proposal():
    """A lookup that finds nothing for long finds all the more once the text repeats itself."""
    width = CostAwarePolicy(curve).begin(DraftShape(K, strategy="s"))
    for _ in range(60):
        assert width.limit(K) == K
        width.trim([], None)
        width.feedback(Round(0, 0, [1]))


def test_an_expensive_drafter_is_asked_seldom_once_it_is_no_use():
    assert run(trace((256, 0)), draft=BLOCK).asked <= 8


def test_a_fixed_shape_is_asked_for_whole_or_not_at_all():
    costs = curve(GPU, BLOCK)
    width = CostAwarePolicy(lambda: costs).begin(DraftShape(K, strategy="s", fixed=True))
    for round_ in range(60):
        room = 3 if round_ % 7 == 0 else K
        asked = width.limit(room)
        assert asked in (0, K)
        assert asked <= room
        width.trim([*range(asked)], None)
        width.feedback(Round(asked, asked, [*range(asked), 99]))


def test_a_sequential_drafter_is_asked_for_all_and_told_when_to_stop():
    """One more token costs 0.3 with its row; rows are free, so is the drafter of which nothing is known yet."""
    costs = fixed_curve(GPU, {"s": [0.3 * n for n in range(1, 17)]})
    width = CostAwarePolicy(lambda: costs).begin(DraftShape(K, strategy="s", sequential=True))
    asked = width.limit(K)
    assert (asked, width.stop_below) == (K, pytest.approx(0.303 / 0.75, abs=1e-3))
    width.trim([1, 2, 3], [0.9, 0.8, 0.1])
    width.feedback(Round(3, 2, [1, 2, 9]))
    assert width.limit(K) == K
    assert width.stop_below > 0.303 / 0.75  # time is worth more by now
    costs = fixed_curve(GPU, {"s": [0.001] * 16})
    assert (width.limit(K), width.stop_below) == (K, 0.0)  # asking has become free
    other = CostAwarePolicy(lambda: costs).begin(DraftShape(K, strategy="other", sequential=True))
    assert (other.limit(K), other.stop_below) == (K, 0.0)


@pytest.mark.parametrize("token", [0.02, 0.15, 0.5])
@pytest.mark.parametrize("steps", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("make", [confident_trace, lambda tokens, seed: confident_trace(tokens, seed, sure=0.7)])
def test_a_sequential_drafter_gets_nearly_the_best_fixed_length(make, steps, token):
    """Whatever a token takes, and never slower than plain decoding."""
    recorded = evolve(make(512, seed=4), sequential=True)
    costs = fixed_curve(steps, {"s": [token * n for n in range(1, 17)]})
    best = max(replay(FixedPolicy(k), recorded, costs).speed for k in range(K + 1))
    found = replay(CostAwarePolicy(lambda: costs), recorded, costs)
    assert found.speed >= max(0.95 * best, NO_REGRET)


def taught(steps, confidences, rights):
    """A request's width after rounds in which the first 4, 6, ... proposed tokens were right."""
    costs = curve(steps)
    width = CostAwarePolicy(lambda: costs).begin(DraftShape(K, strategy="s"))
    for right in rights:
        width.limit(K)
        kept = width.trim([1] * K, confidences)
        accepted = min(kept, right)
        width.feedback(Round(kept, accepted, [1] * accepted + [2 if accepted == right else 1]))
    return width


@pytest.mark.parametrize(("steps", "cut"), [(CPU, 4), (GPU, K)], ids=["cpu", "gpu"])
def test_proposals_are_cut_where_they_stop_paying(steps, cut):
    """Four sure tokens, then coin flips: on a CPU these cost more than they bring, on a GPU they are free."""
    width = taught(steps, [0.99] * 4 + [0.5] * 4, rights=[4, 6] * 8)
    width.limit(K)
    assert width.trim([1] * K, [0.99] * 4 + [0.45] * 4) == cut


@pytest.mark.parametrize(
    ("rows", "fewer"), [((4, 8, 16), {}), ((), {6: 5}), (tuple(range(1, 17)), {6: 5})],
    ids=["padded", "unknown", "every row count"],
)  # fmt: skip
def test_where_rows_are_padded_a_whole_proposal_is_checked(rows, fewer):
    """Two sure tokens take what three take, six what seven; elsewhere seven rows would be one more shape in use."""
    costs = curve(GPU)
    width = CostAwarePolicy(lambda: costs, rows=rows).begin(DraftShape(K, strategy="s"))
    for count in range(1, K + 1):
        width.limit(K)
        assert width.trim([1] * count, [0.99] * count) == fewer.get(count, count)
        width.feedback(Round(count, count, [1] * (count + 1)))


def test_rows_beside_others_need_no_plain_step_first():
    """Alone, nothing is checked until plain steps have been timed; beside others none could be."""
    model = CostModel(WidthClass(ShapeIdentity("x"), tuple(range(1, 17)), CPU))
    width = CostAwarePolicy(model).begin(DraftShape(K, strategy="s"))
    width.limit(K)
    assert width.trim([1] * K, [0.99] * K) == 0
    assert width.trim([1] * K, [0.99] * K, beside=3) > 0


def test_a_request_that_never_proposes_can_begin():
    """Its K is 0, and what its strategy costs is known."""
    costs = curve(CPU, BLOCK)
    assert CostAwarePolicy(lambda: costs).begin(DraftShape(0, strategy="s")).limit(0) == 0


@pytest.mark.parametrize("steps", [CPU, [1 + 0.15 * n for n in range(16)]])
@pytest.mark.parametrize("apart", [False, True])
def test_beside_others_no_text_makes_all_of_them_slower(steps, apart):
    """Seven requests wait for the rows of one that is sometimes right: what it gains outweighs what they lose."""
    costs = evolve(curve(steps), apart=apart)
    for text in (chance_trace(512, 0.5, seed=2), chance_trace(512, 0.8, seed=2), trace((512, 0))):
        width, position, time_, steps_ = CostAwarePolicy(lambda: costs).begin(DraftShape(K, strategy="s")), 0, 0.0, 0
        while position < len(text.points):
            point = text.points[position]
            asked = width.limit(min(K, len(text.points) - position - 1), 7)
            right = min(point.accepted, asked)
            kept = width.trim([1] * right + [2] * (asked - right), None, 7)
            accepted = min(kept, right)
            width.feedback(Round(kept, accepted, [1] * (accepted + 1)))
            position += accepted + 1
            time_ += costs.step(8) + costs.added(kept, 7)
            steps_ += 1
        plain = costs.step(8) / 8  # of one token
        assert (7 * steps_ + position) * plain >= NO_REGRET * time_


def test_rows_beside_others_cost_what_the_curve_says():
    """Alone, the first extra row costs 0.9 of a step; beside 7 rows of others 0.2, though all of them wait for it."""
    width = taught(CPU, [0.99] * K, rights=[8] * 2)
    unsure = [0.6] * K
    width.limit(K)
    assert width.trim([1] * K, unsure) == 0
    width.limit(K, beside=7)
    assert width.trim([1] * K, unsure, beside=7) > 0


def test_a_step_that_is_undone_leaves_no_trace():
    """`limit` and `trim` may be called again; only `feedback` learns."""

    def play(undone):
        costs = curve()
        width = CostAwarePolicy(lambda: costs).begin(DraftShape(K, strategy="s"))
        answers = []
        for i in range(80):
            for _ in range(1 + undone * (i % 3)):
                asked = width.limit(K)
                kept = width.trim([*range(asked)], None)
            answers.append((asked, kept))
            right = min(kept, i % 5)
            width.feedback(Round(kept, right, [*range(i % 5), 99][: right + 1]))
        return answers

    assert play(undone=True) == play(undone=False)


def test_a_replay_is_no_feedback():
    costs = curve()
    width = CostAwarePolicy(lambda: costs).begin(DraftShape(K, strategy="s"))
    before = width.summary()
    width.limit(K)
    width.trim([*range(K)], None)
    width.feedback(Round(K, 2, [0, 1, 99], replayed=True))
    assert width.summary() == before


@given(
    rounds=st.lists(
        st.tuples(st.integers(0, K), st.integers(0, K), st.lists(st.floats(0, 1), min_size=K, max_size=K)), max_size=60
    ),
    draft=st.sampled_from([CHEAP, 0.2, BLOCK]),
)
@settings(max_examples=60, deadline=None)
def test_answers_stay_in_range_and_follow_from_what_was_recorded(rounds, draft):
    """The same inputs give the same answers, so a decision can be computed again offline."""

    def play():
        costs = curve(draft=draft)
        width = CostAwarePolicy(lambda: costs).begin(DraftShape(K, strategy="s"))
        answers = []
        for room, right, confidences in rounds:
            asked = width.limit(room)
            assert 0 <= asked <= room
            kept = width.trim([*range(asked)], confidences[:asked])
            assert 0 <= kept <= asked
            accepted = min(kept, right)
            width.feedback(Round(kept, accepted, [*range(accepted), 99 if right < kept else accepted]))
            answers.append((asked, kept))
        return answers, width.summary()

    assert play() == play()


def test_few_shapes_are_used():
    assert hot_widths(0) == ()
    assert len(hot_widths(64)) <= 13
    assert hot_widths(15, rows=(1, 2, 4, 8, 16)) == (1, 3, 7, 15)
    used = {length for recorded in WORST.values() for length in run(recorded).lengths}
    assert used <= {0, *hot_widths(K)}


def test_costs_learned_online_repair_a_wrong_prior():
    """The target claims that rows are free; timings say otherwise, and a poor drafter is then left alone."""
    model = CostModel(WidthClass(ShapeIdentity("x"), tuple(range(1, 10)), (1.0,) * 9))
    true, recorded = curve(), chance_trace(2000, 0.5, seed=9)
    policy, position, cost = CostAwarePolicy(model), 0, 0.0
    width = policy.begin(DraftShape(K, strategy="s"))
    while position < len(recorded.points):
        point = recorded.points[position]
        asked = width.limit(min(K, len(recorded.points) - position - 1))
        right = min(point.accepted, asked)
        kept = width.trim([*range(position, position + right), *[-1] * (asked - right)], None)
        accepted = min(kept, right)
        model.observe_forward(1 + kept, true.step(1 + kept) * 0.01)
        width.feedback(Round(kept, accepted, range(position, position + accepted + 1)))
        position += accepted + 1
        cost += true.step(1 + kept)
    assert len(recorded.points) / cost >= 0.97


def test_a_round_takes_little_time():
    """Far below 3 % of a forward of the embedded model; a median, since the machine may be busy."""
    costs, times = curve(draft=BLOCK), []
    width = CostAwarePolicy(lambda: costs).begin(DraftShape(K, strategy="s"))
    for i in range(600):
        ids = [*range(K)]
        started = time.perf_counter()
        asked = width.limit(K)
        kept = width.trim(ids[:asked], [0.9] * asked)
        width.feedback(Round(kept, min(kept, i % 9), [*range(min(kept, i % 9)), 99]))
        times.append(time.perf_counter() - started)
    assert sorted(times)[300] < 100e-6


def fed(backlogs, steps, draft, rounds=200):
    """A request whose drafter is never right: what it was asked for in rounds with *backlogs* rows to be told."""
    costs = evolve(curve(steps, draft), feeds={"s": (0.1, 0.01)})
    width = CostAwarePolicy(lambda: costs).begin(DraftShape(K, strategy="s"))
    asked = []
    for round_ in range(rounds):
        asked.append(width.limit(K, backlog=backlogs(round_)))
        width.trim([1] * asked[-1], None)
        width.feedback(Round(0, 0, [2]))
    return asked


def test_a_long_prompt_is_not_told_to_a_drafter_that_promises_nothing():
    """Where rows cost much, 400 prompt rows are 4 steps: more than a short request may lose on finding out."""
    assert not any(fed(lambda round_: 400 + round_, CPU, BLOCK, rounds=128))
    assert any(fed(lambda round_: 1, CPU, BLOCK, rounds=128))


def test_a_long_prompt_is_told_at_once_where_drafting_promises_much():
    """Where rows are free the prompt's rows are told once, and the request has all its length to gain from it."""
    assert fed(lambda round_: 400 if round_ == 0 else 1, GPU, BLOCK)[0] > 0


def test_a_drafter_that_costs_more_than_it_could_ever_save_is_never_asked():
    """Asking takes 9 steps and saves at most 8: not even the largest purse is spent on that."""
    costs = curve(CPU, 9.0)
    assert replay(CostAwarePolicy(lambda: costs), trace((4000, K)), costs).asked == 0


def test_what_a_drafter_costs_is_not_found_out_before_a_plain_step_was_timed():
    """Nothing could be made of the timing: it would be lost, and asked for again."""
    model = CostModel(WidthClass(ShapeIdentity("x"), tuple(range(1, 17)), CPU))
    width = CostAwarePolicy(model).begin(DraftShape(K, strategy="s"))
    assert width.limit(K) == 0
    assert width.limit(K, beside=3) == K
    for _ in range(3):
        model.observe_forward(1, 0.01)
    assert width.limit(K) == K
