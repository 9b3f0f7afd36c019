"""What becomes of the requests of a step that breaks off in the middle of its commits."""

import pytest

from power_core.request import GenerationRequest
from power_core.scheduler.drafting import OpenDraft
from power_core.scheduler.loop import StepLoop
from power_core.scheduler.policy import FixedPolicy
from power_core.target import SessionOptions
from power_core.testing import Faults, ScriptedDrafter, ScriptedTarget, plain_decode
from power_core.types import FinishReason, Origin

TARGET = ScriptedTarget(vocab_size=24)


class Interrupting:
    """A policy that is interrupted while it takes up what became of a round: of the *at*-th in all."""

    name = "interrupting"

    def __init__(self, at):
        self.left = at

    def begin(self, shape):
        width = FixedPolicy().begin(shape)
        width.feedback = self.feedback
        return width

    def feedback(self, _outcome):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def make_loop(policy, faults):
    """A loop over drafters that are always wrong; one of them, `failing`, meets *faults*."""
    session = TARGET.open_session(SessionOptions(max_sequences=2, max_rows=8))

    def open_strategy(name):
        drafter = ScriptedDrafter([[0]] * 9, faults=Faults(faults if name == "failing" else {}))
        return OpenDraft(name, drafter.open(None, None))

    return StepLoop(session, TARGET.tokenizer, open_strategy=open_strategy, make_policy=lambda _costs: policy)


def drain(loop):
    """All events, and how many requests were still to end whenever a step was interrupted."""
    events, interrupts = [], []
    while loop.active:
        try:
            events += loop.step()
        except KeyboardInterrupt:
            interrupts.append(loop.active)
    return events, interrupts


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_what_was_committed_before_an_interrupt_is_emitted_and_the_rest_done_again(at):
    """The interrupted request's token and those of whoever came before; the one after it has none of the step."""
    loop = make_loop(Interrupting(at), {})
    requests = [GenerationRequest(prompt, max_tokens=4, spec="wrong") for prompt in ((1, 2), (3, 4))]
    numbers = [loop.submit(request) for request in requests]
    events, interrupts = drain(loop)
    assert interrupts == [2]
    for number, request in zip(numbers, requests, strict=True):
        *tokens, end = [event for event in events if event.request_id == number]
        assert end.result.token_ids == plain_decode(TARGET, request).token_ids
        assert tuple(event.token_id for event in tokens) == end.result.token_ids


def test_a_request_whose_commit_failed_stays_ended_when_the_next_one_is_interrupted():
    """What it had chosen in the step is not emitted behind its end."""
    loop = make_loop(Interrupting(3), {"observe": 2})
    failing = loop.submit(GenerationRequest((1, 2), max_tokens=4, spec="failing"))
    other = loop.submit(GenerationRequest((3, 4), max_tokens=4, spec="wrong"))
    events, interrupts = drain(loop)
    of_failing = [event for event in events if event.request_id == failing]
    assert [event.origin is Origin.END for event in of_failing] == [False, True]
    assert of_failing[-1].result.finish_reason is FinishReason.ERROR
    ends = {event.request_id: event.result for event in events if event.result}
    assert ends[other].token_ids == plain_decode(TARGET, GenerationRequest((3, 4), max_tokens=4)).token_ids
    assert (interrupts, loop.is_idle) == ([2], True)
