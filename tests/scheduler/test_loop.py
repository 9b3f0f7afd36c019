"""What the step loop counts and times."""

import time
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from power_core.request import GenerationRequest
from power_core.scheduler.drafting import DraftPool, OpenDraft
from power_core.scheduler.loop import StepLoop
from power_core.scheduler.policy import DraftShape, FixedPolicy
from power_core.target import SessionOptions
from power_core.testing import Faults, ScriptedDrafter, ScriptedTarget, one_class, two_classes
from power_core.types import FinishReason


@pytest.fixture
def loop():
    target = ScriptedTarget(vocab_size=24)
    session = target.open_session(SessionOptions(max_sequences=2, max_rows=8))
    return StepLoop(session, target.tokenizer, open_strategy=None, receipt=timings_of)


def timings_of(sequence, _result):
    timings = sequence.clock.timings()
    return {"prefill": timings.prefill_s, "first token": timings.ttft_s, "all": timings.request_s}


def drain(loop):
    events = []
    while loop.active:
        events += loop.step()
    return events


def test_steps_are_counted_by_what_they_hold(loop):
    """A prompt alone, then a prompt beside a generated row, then generated rows alone; and by the rows computed."""
    loop.submit(GenerationRequest((1, 2, 3), max_tokens=6))
    loop.step()
    totals = loop.queue.totals
    assert (totals.steps, totals.prefill_steps, totals.mixed_steps) == (1, 1, 0)
    loop.submit(GenerationRequest((4, 5), max_tokens=2))
    loop.step()
    assert (totals.steps, totals.prefill_steps, totals.mixed_steps) == (2, 1, 1)
    loop.step()
    assert (totals.steps, totals.prefill_steps, totals.mixed_steps) == (3, 1, 1)
    drain(loop)
    assert sum(totals.widths.values()) == totals.steps
    assert max(totals.widths.values()) > 1
    assert set(map(type, totals.widths.values())) == {int}


def test_time_is_measured_forwards(loop):
    """The target's share is some of the time there was, and the first token came within the request's."""
    started = time.perf_counter()
    loop.submit(GenerationRequest((1, 2, 3), max_tokens=6))
    timings = drain(loop)[-1].result.receipt
    assert 0 < loop.forward_seconds < time.perf_counter() - started
    assert 0 < timings["prefill"] <= timings["first token"] < timings["all"]


def test_the_first_token_has_one_time():
    """No chunk of a prompt before it counts, and no token after it."""
    target, times = ScriptedTarget(vocab_size=24), []
    loop = StepLoop(
        target.open_session(SessionOptions(max_rows=8)), target.tokenizer, open_strategy=None, prefill_chunk=2,
        receipt=lambda sequence, _result: sequence.clock.first_token,
    )  # fmt: skip
    loop.submit(GenerationRequest((1, 2, 3, 4), max_tokens=4))
    for _ in range(2):
        loop.step()
        times.append(time.perf_counter())
    assert times[0] < drain(loop)[-1].result.receipt < times[1]


@pytest.mark.parametrize(("profile", "prompt"), [(one_class, (1, 2, 3)), (two_classes, (1,))])
def test_costs_are_learned_from_generated_rows_alone(profile, prompt, monkeypatch):
    """Not from a prompt, whose rows are not read back or are computed in another class."""
    target = ScriptedTarget(vocab_size=24, profile=profile(8))
    loop = StepLoop(target.open_session(SessionOptions(max_rows=8)), target.tokenizer, open_strategy=None)
    timed = []
    monkeypatch.setattr(loop.costs, "observe_forward", lambda width, _seconds: timed.append(width))
    loop.submit(GenerationRequest(prompt, max_tokens=3))
    loop.step()
    assert timed == []
    drain(loop)
    assert len(timed) == 2


def test_plain_decoding_takes_no_rows_from_those_that_draft(loop):
    assert loop.prepare("off", 4).limit(9) == 0


def test_a_policy_is_told_of_no_more_than_a_step_can_hold(loop):
    """A step of 8 rows checks 7 tokens: policies, which tabulate up to K, hear of no more; requests keep theirs."""
    shapes, asked = [], []
    loop.policy = SimpleNamespace(name="mine", begin=lambda shape: shapes.append(shape) or FixedPolicy().begin(shape))
    loop.drafts = DraftPool(lambda name: OpenDraft(name, ScriptedDrafter([]).open(None, None)))
    loop._receipt = lambda sequence, _result: asked.append(sequence.draft_max) or {}
    for most in (3, 10**9):
        loop.submit(GenerationRequest((1, 2), max_tokens=2, spec="s", draft_max=most))
    drain(loop)
    assert ([shape.draft_max for shape in shapes], asked) == ([3, 7], [3, 10**9])


def test_a_policy_that_changes_its_mind_says_so_once(loop):
    """Whichever way it goes, and nothing while it does not."""
    modes, width = iter("bba"), FixedPolicy().begin(DraftShape(4))
    width.mode, width.feedback = "a", lambda _outcome: setattr(width, "mode", next(modes))
    loop.policy = SimpleNamespace(name="mine", begin=lambda _shape: width)
    loop.drafts = DraftPool(lambda name: OpenDraft(name, ScriptedDrafter([]).open(None, None)))
    loop.submit(GenerationRequest((1, 2), max_tokens=3, spec="s"))
    with capture_logs() as logs:
        drain(loop)
    changes = [(entry["policy"], entry["before"], entry["after"]) for entry in logs if "switched" in entry["event"]]
    assert changes == [("mine", "a", "b"), ("mine", "b", "a")]


def test_a_request_counts_until_its_end_was_handed_out(loop, monkeypatch):
    """A step that breaks off after one request has ended: that end is still to be fetched, and counts too."""
    ended, *others = (loop.submit(GenerationRequest((1, 2), max_tokens=3)) for _ in range(3))
    loop.step()
    assert loop.active == 3
    loop.cancel(ended)
    with monkeypatch.context() as patch:
        patch.setattr(loop.session, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    assert loop.active == 3
    ends = {event.request_id: event.result.finish_reason for event in drain(loop) if event.result}
    assert ends == {ended: FinishReason.CANCELLED, **dict.fromkeys(others, FinishReason.LENGTH)}
    assert (loop.active, loop.is_idle, loop.has_room) == (0, True, True)


def test_a_name_is_compared_by_value(loop):
    """A strategy's name that was read from somewhere is another object than the program's own."""
    loop.submit(GenerationRequest((1, 2), max_tokens=2, spec="".join(["o", "ff"])))
    assert drain(loop)[-1].result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("at", [{"propose": 1}, {"propose": 1, "restore": 1}], ids=["propose", "propose and restore"])
def test_a_request_whose_drafter_fails_ends_and_the_others_go_on(loop, at):
    """Whether or not the drafter can be brought back, the error is the request's, and the sequence is free again."""
    drafter = ScriptedDrafter([[1], [1], [1]], faults=Faults(at))
    loop.drafts = DraftPool(lambda name: OpenDraft(name, drafter.open(None, None)))
    failing = loop.submit(GenerationRequest((1, 2), max_tokens=4, spec="failing", draft_max=2))
    other = loop.submit(GenerationRequest((1, 2), max_tokens=4))
    ends = {event.request_id: event.result for event in drain(loop) if event.result}
    assert {number: end.finish_reason for number, end in ends.items()} == {
        failing: FinishReason.ERROR, other: FinishReason.LENGTH,
    }  # fmt: skip
    assert "propose" in str(ends[failing].error)
    assert loop.is_idle


def test_a_request_whose_token_cannot_be_chosen_ends_and_the_others_go_on():
    """Whatever reading a row raises: the step is undone for this request alone."""
    target = ScriptedTarget(vocab_size=24, faults=Faults({"rows.greedy": 1}))
    loop = StepLoop(
        target.open_session(SessionOptions(max_sequences=2, max_rows=8)), target.tokenizer, open_strategy=None
    )
    failing, other = (loop.submit(GenerationRequest((1, 2), max_tokens=3)) for _ in range(2))
    ends = {event.request_id: event.result for event in drain(loop) if event.result}
    assert (ends[failing].finish_reason, ends[failing].token_ids) == (FinishReason.ERROR, ())
    assert (ends[other].finish_reason, len(ends[other].token_ids)) == (FinishReason.LENGTH, 3)


@pytest.mark.parametrize(("at", "level"), [({}, "info"), ({"propose": 1}, "warning")], ids=["late", "failed"])
def test_what_failed_a_request_is_told_as_loud_as_it_concerns_others(loop, at, level):
    """A deadline is its caller's affair, who has the error; a drafter that fails is the engine's too."""
    drafter = ScriptedDrafter([[1], [1], [1]], faults=Faults(at))
    loop.drafts = DraftPool(lambda name: OpenDraft(name, drafter.open(None, None)))
    deadline = None if at else 0.02
    loop.submit(GenerationRequest((1, 2), max_tokens=4, spec="failing", draft_max=2, deadline_s=deadline))
    with capture_logs() as logs:
        loop.step()
        time.sleep(0.03)
        drain(loop)
    assert [entry["log_level"] for entry in logs if entry["event"] == "request failed"] == [level]


def interrupted(*_args):
    raise KeyboardInterrupt


def test_the_lowest_free_sequence_is_taken_and_rows_go_by_sequence():
    """Two of three requests have ended; the next one takes the first sequence, and its rows come first."""
    target = ScriptedTarget(vocab_size=24)
    session = target.open_session(SessionOptions(max_sequences=3, max_rows=8))
    loop = StepLoop(session, target.tokenizer, open_strategy=None)
    for length in (3, 4, 9):
        loop.submit(GenerationRequest((1, 2), max_tokens=length))
    for _ in range(4):
        loop.step()
    loop.submit(GenerationRequest((1, 2), max_tokens=2))
    drain(loop)
    steps = [tuple(chain.seq for chain in forward.chains) for forward in session.history]
    assert list(dict.fromkeys(steps)) == [(0, 1, 2), (1, 2), (0, 2), (2,)]
