"""Acceptance traces: their file, and the policy that records them."""

import json

import pytest

from power_core.errors import ConfigError
from power_core.scheduler.policy import DraftShape, Round
from power_core.scheduler.traces import RecordingPolicy, Trace, TracePoint, read_traces, write_traces
from scheduler.traces_of import trace

HEAD = {"format": "power-trace/1", "strategy": "s", "draft_max": 4}


def file_of(folder, *lines):
    """A trace file of *lines*, texts or what JSON makes of them."""
    file = folder / "t.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return file


def a_round(position=0, proposed=3, accepted=2, **more):
    return {"position": position, "proposed": proposed, "accepted": accepted, **more}


def test_traces_survive_writing_and_reading(tmp_path):
    """Those of several requests in one file, one of them longer than any number that Python keeps but one of."""
    traces = [
        Trace("s", 4, [TracePoint(3, 2, (0.5, 0.25, 0.125)), TracePoint(0, 0)], "w"),
        trace((300, 1)),
        Trace("", 0, sequential=True),
    ]
    write_traces(tmp_path / "t", traces)
    assert read_traces(tmp_path / "t") == traces


def test_a_file_has_the_documented_form(tmp_path):
    """Confidences to four digits, and none where the drafter has none."""
    points = [TracePoint(2, 1, (0.123456, 1.0)), TracePoint(0, 0)]
    write_traces(tmp_path / "t", [Trace("s", 4, points, "w")])
    assert [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()] == [
        {**HEAD, "sequential": False, "workload": "w"}, a_round(0, 2, 1, confidences=[0.1235, 1.0]), a_round(1, 0, 0)
    ]  # fmt: skip


def test_what_a_file_may_leave_out(tmp_path):
    """The workload, confidences, and anything on a line; a text may hold what other files end their lines with."""
    head = json.dumps({**HEAD, "workload": "a\u2028b\x85c"}, ensure_ascii=False)
    more = [0.5, 0.5, 0.5, 0.5]
    (first, second) = read_traces(
        file_of(tmp_path, HEAD, "", a_round(confidences=[]), "  ", head, a_round(confidences=more))
    )
    assert (first.workload, first.points) == ("", [TracePoint(3, 2)])
    assert (second.workload, second.points) == ("a\u2028b\x85c", [TracePoint(3, 2, (0.5, 0.5, 0.5, 0.5))])


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([a_round()], "a round before the header"),
        ([{**HEAD, "format": "power-trace/0"}], "power-trace/0"),
        ([{**HEAD, "format": "power-trace/9"}], "power-trace/9"),
        ([{"format": "power-trace/1", "draft_max": 4}], "KeyError"),
        ([{**HEAD, "draft_max": None}], "TypeError"),
        ([{**HEAD, "draft_max": float("inf")}], "OverflowError"),
        ([HEAD, a_round(1)], "position 1 where 0 is due"),
        ([HEAD, a_round(), "", a_round()], "position 0 where 1 is due"),
        ([HEAD, a_round(0, 1, 2)], "accepted 2 of 1 proposed"),
        ([HEAD, a_round(0, 1, -1)], "accepted -1 of 1 proposed"),
        ([HEAD, a_round(0, 5, 2)], "draft_max 4"),
        ([HEAD, a_round(confidences=[0.5, 0.5])], "accepted 2 of 3 proposed"),
        ([HEAD, a_round(confidences=[10**400] * 3)], "OverflowError"),
        ([HEAD, a_round(confidences=[1, 0, 1.01])], "a confidence outside 0 to 1"),
        ([HEAD, a_round(confidences=[0.5, -0.01, 0.5])], "a confidence outside 0 to 1"),
        ([HEAD, a_round(confidences=[0.5, 0.5, float("nan")])], "a confidence outside 0 to 1"),
        ([HEAD, "no json"], "JSONDecodeError"),
        ([HEAD, "[" * 100_000], "RecursionError"),
        ([HEAD, "[1]"], "TypeError"),
    ],
)
def test_a_line_that_is_no_trace_is_named(tmp_path, lines, problem):
    """Whatever it holds: one error, which says where."""
    with pytest.raises(ConfigError, match="not a trace") as caught:
        read_traces(file_of(tmp_path, *lines))
    assert problem in str(caught.value)
    assert caught.value.where.endswith(f"t.jsonl:{len(lines)}")
    assert caught.value.expected == "JSON lines of format power-trace/1"


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read"), (b"\xff", "cannot be read"), (b"", "holds no trace"), (b"\n \n", "holds no trace")],
)
def test_a_file_without_a_trace_is_named(tmp_path, content, problem):
    file = tmp_path / "t.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_traces(file)
    assert (caught.value.who, caught.value.where) == ("trace", str(file))


@pytest.mark.parametrize("draft_max", [-1, 4096, 10**12])
def test_a_header_of_absurd_length_is_refused(tmp_path, draft_max):
    """A length no step can have would lay out a table for it."""
    with pytest.raises(ConfigError, match=f"draft_max {draft_max} where 0 to 4095 are possible"):
        read_traces(file_of(tmp_path, {**HEAD, "draft_max": draft_max}))


@pytest.mark.parametrize("draft_max", [0, 4095])
def test_a_header_of_any_other_length_is_taken(tmp_path, draft_max):
    assert read_traces(file_of(tmp_path, {**HEAD, "draft_max": draft_max})) == [Trace("s", draft_max)]


def recorded(text, proposals, draft_max=4):
    """The points of a request that wrote *text*, each token but the first after one of *proposals*."""
    policy = RecordingPolicy()
    width = policy.begin(DraftShape(draft_max, strategy="s"))
    width.feedback(Round(0, 0, text[:1]))  # chosen with the prompt's last row
    for token, (proposal, confidences) in zip(text[1:], proposals, strict=True):
        assert width.limit(9) == draft_max
        assert width.trim(proposal, confidences) == 0
        width.feedback(Round(0, 0, [token]))
    assert (width.summary(), width.stop_below) == ({"rounds": len(text)}, 0.0)  # so that no drafter stops early
    (trace,) = policy.traces()
    assert (trace.strategy, trace.draft_max) == ("s", draft_max)
    return trace.points


def test_recording_asks_for_everything_and_lets_nothing_be_checked():
    """What would have been accepted is known from what was written in the end."""
    points = recorded([5, 6, 7, 8], [([6, 7, 9], [0.5, 0.5, 0.5]), ([], None), ([8, 1], None)])
    assert points == [TracePoint(0, 0), TracePoint(3, 2, (0.5, 0.5, 0.5)), TracePoint(0, 0), TracePoint(1, 1)]


def test_what_a_proposal_says_beyond_the_end_of_the_text_is_not_recorded():
    """Its confidences neither. Ids that are larger than what was written are wrong, and smaller ones."""
    points = recorded([501, 502, 503], [([500, 503], [0.5, 0.25]), ([503, 504, 505], [0.5, 0.25, 0.125])])
    assert points == [TracePoint(0, 0), TracePoint(2, 0, (0.5, 0.25)), TracePoint(1, 1, (0.5,))]
    assert recorded([501, 502], [([int("502")], None)]) == [TracePoint(0, 0), TracePoint(1, 1)]  # equal, not the same


def test_a_round_that_asks_for_nothing_takes_no_earlier_proposal():
    """Where there was no room, or the round before was undone after its proposal."""
    policy = RecordingPolicy()
    width = policy.begin(DraftShape(4))
    for asks in (True, False):
        width.limit(3)
        width.trim([6, 7], [0.5, 0.5])
        if asks:
            width.limit(0)
        width.feedback(Round(0, 0, [6]))
    width.feedback(Round(0, 0, [7]))
    (trace,) = policy.traces()
    assert trace.points == [TracePoint(0, 0), TracePoint(2, 2, (0.5, 0.5)), TracePoint(0, 0)]


def test_recording_asks_for_no_more_than_there_is_room_for():
    width = RecordingPolicy().begin(DraftShape(4))
    assert [width.limit(room) for room in (0, 3, 4, 5)] == [0, 3, 4, 4]


def test_requests_are_recorded_apart_and_in_the_order_they_began():
    policy = RecordingPolicy()
    first, second = policy.begin(DraftShape(4, strategy="a")), policy.begin(DraftShape(8, strategy="b"))
    second.trim([2], None)
    second.feedback(Round(0, 0, [2]))
    first.feedback(Round(0, 0, [1]))
    assert policy.traces() == [Trace("a", 4, [TracePoint(0, 0)]), Trace("b", 8, [TracePoint(1, 1)])]
