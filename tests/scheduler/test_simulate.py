"""The replay of traces, cost curves, and `power simulate`."""

import json

import pytest
from click.testing import CliRunner

from power_core.cli import cli
from power_core.cli.state import State
from power_core.errors import ConfigError
from power_core.scheduler.cost_aware import CostAwarePolicy
from power_core.scheduler.costs import fixed_curve
from power_core.scheduler.policy import AdaptivePolicy, DraftShape, FixedPolicy, Round
from power_core.scheduler.simulate import FIXED_WIDTHS, Replay, compare, oracle_cost, read_curve, replay
from power_core.scheduler.traces import Trace, TracePoint, write_traces
from scheduler.traces_of import chance_trace, curve, trace

CURVE = {"rows": {"1": 8.0, "2": 16.0, "9": 32.0}, "drafts": {"s": 0.8}}


@pytest.fixture
def files(tmp_path):
    """A trace file of two workloads, and a cost curve."""
    copy, prose = trace((40, 8)), trace((40, 0))
    copy.workload, prose.workload = "copy", "prose"
    write_traces(tmp_path / "t.jsonl", [copy, prose, copy])
    (tmp_path / "c.json").write_text(json.dumps(CURVE))
    return tmp_path


class Watcher:
    """A policy that asks for and checks what it is told to, and notes what it is told."""

    name = "watcher"

    def __init__(self, asks, checks):
        self.asks, self.checks, self.seen = iter(asks), iter(checks), []

    def begin(self, shape):
        self.shape = shape
        return self

    def limit(self, room):
        self.room = room
        return next(self.asks)

    def trim(self, ids, confidences):
        self.offer = (self.room, [token if token >= 0 else "wrong" for token in ids], confidences)
        return next(self.checks)

    def feedback(self, outcome):
        self.seen.append((*self.offer, outcome))


def test_a_policy_is_told_what_it_would_be_told_in_an_engine():
    """Room for the bonus token, confidences of what is proposed, and nothing where nothing is proposed."""
    points = [
        TracePoint(3, 1, (0.75, 0.5, 0.25)),
        TracePoint(0, 0),
        TracePoint(2, 1),
        TracePoint(1, 0),
        TracePoint(1, 1),
    ]
    watcher = Watcher([2, 0, 1, 0], [1, 0, 1, 0])
    result = replay(watcher, Trace("s", 3, points), curve(), rollback=5)
    assert watcher.shape == DraftShape(3, 5, "s")
    assert watcher.seen == [
        (3, [0, "wrong"], (0.75, 0.5), Round(1, 1, range(2))),
        (2, [], None, Round(0, 0, range(2, 3))),
        (1, ["wrong"], None, Round(1, 0, range(3, 4))),
        (0, [], None, Round(0, 0, range(4, 5))),
    ]
    assert result.tokens == 5


def test_a_replay_adds_up():
    """Length 3 on proposals of 8 with 2 right: three tokens a round for a pass of 4 rows and a draft."""
    costs = curve(draft=0.5)
    result = replay(FixedPolicy(3), trace((30, 2)), costs)
    assert (result.rounds, result.tokens, result.accepted, result.drafted) == (10, 30, 20, 9 * 3 + 2)
    assert (result.asked, result.lengths) == (10, {3: 9, 2: 1})
    assert result.cost == pytest.approx(9 * (costs.step(4) + 0.5) + costs.step(3) + 0.5)
    assert result.speed == 30 / result.cost
    assert "milestones" not in repr(result)  # one a round


@pytest.mark.parametrize(("token", "rounds"), [(0, 1), (1, 1), (3, 1), (4, 2), (9, 3), (30, 10), (31, 10)])
def test_time_is_taken_until_the_round_in_which_a_token_came_out(token, rounds):
    costs = curve((1.0, 2.0, 2.0, 2.0), draft=0.5)
    assert replay(FixedPolicy(3), trace((30, 2)), costs).cost_until(token) == 2.5 * rounds


def test_what_takes_no_time_is_as_fast_as_plain_decoding():
    """A text of no tokens, and no traces at all."""
    assert replay(FixedPolicy(3), Trace("s", 4), curve()) == Replay()
    assert (Replay().speed, oracle_cost(Trace("s", 4), curve())) == (1.0, 0.0)
    for traces, shortest in ([], 0), ([Trace("s", 4)], 1):
        result = compare("w", traces, curve())
        assert (result.tokens, result.oracle, *set(result.speeds.values())) == (0, 1.0, 1.0)
        assert result.best_fixed == (shortest, 1.0)


def test_a_round_that_asks_for_nothing_costs_a_plain_step():
    result = replay(FixedPolicy(0), trace((300, 2)), curve(draft=0.5))
    assert (result.cost, result.rounds, result.asked, result.lengths) == (300.0, 300, 0, {0: 300})


@pytest.mark.parametrize(
    ("confidences", "asked", "stop_below", "proposed"),
    [
        ((0.5, 0.5, 0.5), 3, 0.6, 1),
        ((0.5, 0.5, 0.5), 3, 0.5, 2),
        ((0.5, 0.5, 0.5), 3, 0.25, 3),
        ((0.5, 0.5, 0.5), 3, 0.0, 3),
        ((0.5, 0.5, 0.5), 2, 0.25, 2),
        ((0.5, 0.5, 0.5), 0, 0.6, 0),
        (None, 3, 0.6, 3),
    ],
)
def test_a_sequential_drafter_stops_itself_and_is_paid_for_what_it_proposed(confidences, asked, stop_below, proposed):
    """With the first token at which the product of its confidences is below what the policy says."""
    points = [TracePoint(3, 0, confidences), *[TracePoint(0, 0)] * 4]
    watcher, costs = Watcher([asked, *[0] * 4], [proposed, *[0] * 4]), fixed_curve([1.0] * 8, {"s": [0.25, 0.5, 0.75]})
    watcher.stop_below = stop_below
    result = replay(watcher, Trace("s", 3, points, sequential=True), costs)
    assert watcher.shape.sequential
    assert watcher.seen[0][1] == ["wrong"] * proposed
    assert (result.cost, result.asked) == (5.0 + 0.25 * proposed, proposed > 0)


@pytest.mark.parametrize("recorded", [trace((3, 1), (3, 2), (2, 0)), trace((9, 8))])
def test_the_oracle_takes_the_cheapest_way_through_the_text(recorded):
    """Checked against trying every sequence of lengths on a short text."""
    costs = curve(draft=0.1)

    def cheapest(position):
        if position == len(recorded.points):
            return 0.0
        most = min(recorded.points[position].accepted, len(recorded.points) - position - 1)
        ways = (costs.step(1 + k) + costs.draft("s", k) + cheapest(position + k + 1) for k in range(most + 1))
        return min(ways)

    assert oracle_cost(recorded, costs) == pytest.approx(cheapest(0))


def test_the_oracle_bounds_every_policy():
    result = compare("w", [trace((60, 3), (60, 0))], curve())
    assert max(result.speeds.values()) <= result.oracle
    assert result.best_fixed[1] == result.speeds[f"fixed {result.best_fixed[0]}"]


def test_a_workload_is_all_tokens_over_all_time():
    """Each trace is a request of its own, and its strategy has costs of its own."""
    other = chance_trace(40, 0.5, seed=1)
    other.strategy = "other"
    traces, costs = [trace((50, 3)), other], fixed_curve([1.0, 1.5, 1.75, 2.0], {"s": [0.25], "other": [0.5]})
    policies = {
        "fixed 3": FixedPolicy(3),
        "adaptive": AdaptivePolicy(),
        "cost-aware": CostAwarePolicy(lambda: costs, (2, 4)),
    }
    result = compare("w", iter(traces), costs, rollback=2, rows=(2, 4))
    for name, policy in policies.items():
        assert result.speeds[name] == 90 / sum(replay(policy, one, costs, rollback=2).cost for one in traces)
    assert (result.workload, result.tokens) == ("w", 90)
    assert result.oracle == 90 / sum(oracle_cost(one, costs) for one in traces)


@pytest.mark.parametrize("longest", [1, 5, 8, 300])
def test_fixed_lengths_are_compared_up_to_the_longest_that_was_recorded(longest):
    """In order, and that one as well: it is what `fixed` means where no length is given."""
    result = compare("w", [trace((9, 2), k=1), trace((9, 2), k=longest)], curve())
    lengths = sorted({k for k in FIXED_WIDTHS if k <= longest} | {longest})
    assert list(result.speeds) == [*(f"fixed {k}" for k in lengths), "adaptive", "cost-aware"]
    assert result.best_fixed == max(((k, result.speeds[f"fixed {k}"]) for k in lengths), key=lambda pair: pair[1])


def test_a_curve_is_read_in_any_unit(files):
    costs = read_curve(files / "c.json")
    assert [costs.step(n) for n in (1, 2, 9)] == [1.0, 2.0, 4.0]
    assert costs.step(3) == pytest.approx(2 + 2 / 7)
    assert costs.draft("s", 5) == pytest.approx(0.1)


def curve_of(folder, document):
    """The curve that *document* makes, a text or what JSON makes of it."""
    file = folder / "c.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return read_curve(file)


def test_a_curve_has_a_cost_of_each_row_and_of_each_length(tmp_path):
    """Rows in any order, up to the last; one cost is that of every length, which may be 0."""
    costs = curve_of(tmp_path, {"rows": {"3": 6, "1": 2}, "drafts": {"a": [1, 2], "b": 0, "c": 4}})
    assert costs.steps == (0.0, 1.0, 2.0, 3.0)
    assert costs.drafts == {"a": (0.0, 0.5, 1.0), "b": (0.0, 0.0), "c": (0.0, 2.0)}
    assert curve_of(tmp_path, {"rows": {"1": 2}}).steps == (0.0, 1.0)


@pytest.mark.parametrize("cost", [1e-12, 1e12])
def test_a_curve_may_reach_as_far_as_costs_and_rows_may(tmp_path, cost):
    costs = curve_of(tmp_path, {"rows": {"1": cost, "4096": 1e12}, "drafts": {"s": 1e12}})
    assert (len(costs.steps), costs.step(4096), costs.draft("s", 1)) == (4097, 1e12 / cost, 1e12 / cost)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("", "Expecting value"), ("[" * 100_000, "recursion depth"), ("[]", "it has no table of rows"),
        ({}, "it has no table of rows"), ({"rows": [1]}, "it has no table of rows"),
        ({"rows": {"1": 1}, "drafts": [1]}, "its drafts are no table"), ({"rows": {"a": 1}}, "could not convert"),
        ({"rows": {}}, "begin with 1 and end at 4096"), ({"rows": {"2": 1}}, "begin with 1"),
        ({"rows": {"0": 1, "1": 1}}, "begin with 1"), ({"rows": {"1": 1, "4097": 3}}, "end at 4096"),
        ({"rows": {"1": 1, "NaN": 3, "2": 4}}, "end at 4096"), ({"rows": {"1": 10**400}}, "too large"),
        ({"rows": {"1": 0}}, "rows must cost"), ({"rows": {"1": 1, "2": -1}}, "rows must cost"),
        ({"rows": {"1": 1e-13}}, "more than 0"), ({"rows": {"1": 1, "2": 1e12 + 1}}, "at most 1e\\+12"),
        ({"rows": {"1": 1}, "drafts": {"s": [float("nan")]}}, "a draft costs"),
        ({"rows": {"1": 1}, "drafts": {"s": []}}, "a draft costs"),
        ({"rows": {"1": 1}, "drafts": {"s": -1}}, "a draft costs 0 or more"),
        ({"rows": {"1": 1}, "drafts": {"a": 1, "s": [1, 1e12 + 1]}}, "at most 1e\\+12"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_curve_is_refused(tmp_path, document, problem):
    """In one line that says what is wrong and what a curve looks like."""
    with pytest.raises(ConfigError, match=f"no cost curve: [^:]*{problem}") as caught:
        curve_of(tmp_path, document)
    assert (caught.value.who, caught.value.where) == ("cost curve", str(tmp_path / "c.json"))
    assert caught.value.expected.startswith('{"rows": {"1": COST')


def test_a_curve_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file") as caught:
        read_curve(tmp_path / "none.json")
    assert (caught.value.who, caught.value.where) == ("cost curve", str(tmp_path / "none.json"))


def test_the_command_prints_a_row_a_workload_and_the_limit(files):
    answer = CliRunner().invoke(
        cli,
        ["simulate", str(files / "t.jsonl"), "--cost-curve", str(files / "c.json")],
        obj=State(),
        catch_exceptions=False,
    )
    assert answer.exit_code == 0
    header, copy, prose = answer.output.splitlines()[:3]
    assert header.split()[-3:] == ["ADAPTIVE", "COST-AWARE", "ORACLE"]
    assert copy.split()[:3] == ["copy", "(s)", "80"]
    assert prose.split()[:3] == ["prose", "(s)", "40"]


def test_the_command_prints_one_json_document(files):
    arguments = [str(files / "t.jsonl"), "--cost-curve", str(files / "c.json"), "--json"]
    document = json.loads(CliRunner().invoke(cli, ["simulate", *arguments], obj=State(), catch_exceptions=False).output)
    copy = document["workloads"][0]
    assert copy["oracle"] >= copy["speeds"]["cost-aware"] > 1.5
    assert document["curve"]["rows"]["2"] == 2
    (files / "again.json").write_text(json.dumps(document["curve"]))
    assert read_curve(files / "again.json").step(9) == pytest.approx(4.0)


def test_what_a_comparison_leaves_out_or_takes_as_nothing_is_said(files):
    """On stderr, a line each: traces without a round, and draft costs that a curve has of other strategies only."""
    other, empty = trace((9, 2)), Trace("e", 4)
    other.strategy = "o"
    write_traces(files / "t.jsonl", [trace((9, 2)), empty, other, other])
    arguments = ["simulate", str(files / "t.jsonl"), "--cost-curve", str(files / "c.json")]
    answer = CliRunner().invoke(cli, arguments, obj=State(), catch_exceptions=False)
    assert [line.split()[:3] for line in answer.stdout.splitlines()[1:3]] == [["t", "(s)", "9"], ["t", "(o)", "18"]]
    assert answer.stderr.splitlines() == [
        f"power: a trace of e in {files / 't.jsonl'} has no rounds and is left out",
        "power: the cost curve has no draft costs of o, only of s: taken as 0",
    ]
    write_traces(files / "t.jsonl", [empty])
    refused = CliRunner().invoke(cli, arguments, obj=State())
    assert refused.exit_code != 0
    assert "no trace has a round" in refused.stderr
