"""Traces, their replay, and `power simulate`."""

import json

import pytest
from click.testing import CliRunner

from power_core.cli import cli
from power_core.cli.state import State
from power_core.errors import ConfigError
from power_core.scheduler.policy import DraftShape, FixedPolicy, Round
from power_core.scheduler.simulate import compare, oracle_cost, read_curve, replay
from power_core.scheduler.traces import RecordingPolicy, Trace, TracePoint, read_traces, write_traces
from scheduler.traces_of import curve, trace

CURVE = {"rows": {"1": 8.0, "2": 16.0, "9": 32.0}, "drafts": {"s": 0.8}}


@pytest.fixture
def files(tmp_path):
    """A trace file of two workloads, and a cost curve."""
    copy, prose = trace((40, 8)), trace((40, 0))
    copy.workload, prose.workload = "copy", "prose"
    write_traces(tmp_path / "t.jsonl", [copy, prose, copy])
    (tmp_path / "c.json").write_text(json.dumps(CURVE))
    return tmp_path


def test_traces_survive_writing_and_reading(tmp_path):
    traces = [Trace("s", 4, [TracePoint(3, 2, (0.5, 0.25, 0.125)), TracePoint(0, 0)], "w"), trace((5, 1))]
    write_traces(tmp_path / "t", traces)
    assert read_traces(tmp_path / "t") == traces


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"position": 0, "proposed": 1, "accepted": 0}', "before the header"),
        ('{"format": "power-trace/9", "strategy": "s", "draft_max": 4}', "power-trace/9"),
        ('HEAD\n{"position": 1, "proposed": 1, "accepted": 0}', "0 is due"),
        ('HEAD\n{"position": 0, "proposed": 1, "accepted": 2}', "accepted 2 of 1"),
        ('HEAD\n{"position": 0, "proposed": 9, "accepted": 2}', "draft_max 4"),
        ("HEAD\nno json", "JSONDecodeError"),
        ("HEAD\n[1]", "not a trace"),
        ("", "no trace"),
    ],
)
def test_a_line_that_is_no_trace_is_named(tmp_path, line, problem):
    file = tmp_path / "t.jsonl"
    file.write_text(line.replace("HEAD", '{"format": "power-trace/1", "strategy": "s", "draft_max": 4}'))
    with pytest.raises(ConfigError, match=problem) as caught:
        read_traces(file)
    assert "t.jsonl" in str(caught.value)


def test_a_replay_adds_up():
    """Length 3 on proposals of 8 with 2 right: three tokens a round for a pass of 4 rows and a draft."""
    costs = curve(draft=0.5)
    result = replay(FixedPolicy(3), trace((30, 2)), costs)
    assert (result.rounds, result.tokens, result.accepted, result.drafted) == (10, 30, 20, 9 * 3 + 2)
    assert result.cost == pytest.approx(9 * (costs.step(4) + 0.5) + costs.step(3) + 0.5)
    assert result.cost_until(3) == pytest.approx(costs.step(4) + 0.5)


def test_the_oracle_takes_the_cheapest_way_through_the_text():
    """Checked against trying every sequence of lengths on a short text."""
    recorded, costs = trace((3, 1), (3, 2), (2, 0)), curve(draft=0.1)

    def cheapest(position):
        if position == len(recorded.points):
            return 0.0
        most = min(recorded.points[position].accepted, len(recorded.points) - position - 1)
        ways = (costs.step(1 + k) + costs.draft("s", k) + cheapest(position + k + 1) for k in range(most + 1))
        return min(ways)

    assert oracle_cost(recorded, costs) == pytest.approx(cheapest(0))


def test_plain_text_and_oracle_bound_every_policy():
    result = compare("w", [trace((60, 3), (60, 0))], curve())
    assert max(result.speeds.values()) <= result.oracle
    assert result.best_fixed[1] == result.speeds[f"fixed {result.best_fixed[0]}"]


def test_recording_asks_for_everything_and_lets_nothing_be_checked():
    """What would have been accepted is known from what was written in the end."""
    policy = RecordingPolicy()
    width = policy.begin(DraftShape(4, strategy="s"))
    text = [5, 6, 7, 8]
    width.feedback(Round(0, 0, [5]))  # chosen with the prompt's last row
    for position, (proposal, confidences) in enumerate([([6, 7, 9], [0.5, 0.5, 0.5]), ([], None), ([8, 1], None)], 1):
        assert width.limit(4) == 4
        assert width.trim(proposal, confidences) == 0
        width.feedback(Round(0, 0, [text[position]]))
    (recorded,) = policy.traces()
    assert recorded.points == [
        TracePoint(0, 0), TracePoint(3, 2, (0.5, 0.5, 0.5)), TracePoint(0, 0), TracePoint(1, 1)
    ]  # fmt: skip


def test_a_curve_is_read_in_any_unit(files):
    costs = read_curve(files / "c.json")
    assert [costs.step(n) for n in (1, 2, 9)] == [1.0, 2.0, 4.0]
    assert costs.step(3) == pytest.approx(2 + 2 / 7)
    assert costs.draft("s", 5) == pytest.approx(0.1)


@pytest.mark.parametrize("text", [
    "", "[]", '{"rows": {}}', '{"rows": {"2": 1}}', '{"rows": {"1": 0}}', '{"rows": {"a": 1}}',
    '{"rows": {"1": 1, "99999999999999999999": 3}}', '{"rows": {"1": 1, "NaN": 3}}',
    '{"rows": {"1": 1, "2": Infinity}}',
    '{"rows": {"1": 1}, "drafts": {"s": [NaN]}}',
])  # fmt: skip
def test_a_file_that_is_no_curve_is_refused(tmp_path, text):
    file = tmp_path / "c.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="no cost curve"):
        read_curve(file)


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


@pytest.mark.parametrize("draft_max", [-1, 4096, 10**12])
def test_a_header_of_absurd_length_is_refused(tmp_path, draft_max):
    """A length no step can have would lay out a table for it."""
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps({"format": "power-trace/1", "strategy": "s", "draft_max": draft_max}))
    with pytest.raises(ConfigError, match="are possible"):
        read_traces(file)
