"""Events and results of a request, by hand."""

import pytest

from power_core.errors import BackendError, RequestError
from power_core.request import SamplingSpec
from power_core.scheduler.outcome import closing_event, token_events, wrapped
from power_core.types import FinishReason, Origin
from scheduler.sequences import make_member, make_sequence

A, B, C, P = Origin.ACCEPTED, Origin.BONUS, Origin.CORRECTION, Origin.PLAIN


@pytest.mark.parametrize(
    ("proposal", "accepted", "chosen", "origins"),
    [
        ((), 0, (5,), [P]),
        ((5, 6), 2, (5, 6, 7), [A, A, B]),
        ((5, 6), 1, (5, 9), [A, C]),
        ((5, 6), 0, (9,), [C]),
        ((5, 6), 2, (5, 6), [A, A]),
    ],
)
def test_every_token_says_where_it_came_from(proposal, accepted, chosen, origins):
    """Indices go on from what was emitted before; without log-probabilities there are none."""
    sequence = make_sequence()
    sequence.origins = [P, P]
    member = make_member(sequence, proposal=proposal)
    member.accepted, member.chosen, member.texts = accepted, [*chosen], [str(token) for token in chosen]
    events = token_events(member)
    assert [event.origin for event in events] == origins
    assert [(event.token_id, event.text) for event in events] == [(token, str(token)) for token in chosen]
    assert [event.index for event in events] == [*range(2, 2 + len(chosen))]
    assert {(event.request_id, event.logprobs, event.result) for event in events} == {(7, None, None)}


def test_each_token_has_its_own_log_probabilities():
    """Those of earlier steps were given out already."""
    sequence = make_sequence(sampling=SamplingSpec(logprobs=1))
    sequence.origins, sequence.sampler.entries = [P], ["before", "first", "second"]
    member = make_member(sequence, proposal=(5,))
    member.accepted, member.chosen, member.texts = 1, [5, 6], ["5", "6"]
    assert [event.logprobs for event in token_events(member)] == ["first", "second"]


@pytest.mark.parametrize("logprobs", [None, 0])
def test_the_last_event_brings_the_rest_of_the_text_and_the_result(logprobs):
    """Of the tokens after the prompt, with log-probabilities where they were asked for."""
    sequence = make_sequence((1, 2, 3), sampling=SamplingSpec(logprobs=logprobs), client_id="me")
    sequence.sampler.history += [5, 6]
    sequence.texts, sequence.origins, sequence.sampler.entries = ["5", "6"], [P, P], ["x", "y"]
    event = closing_event(sequence, FinishReason.STOP, None, None)
    result = event.result
    assert (event.request_id, event.text, event.token_id, event.origin, event.index) == (7, "!", None, Origin.END, 2)
    assert (result.text, result.token_ids, result.prompt_token_ids) == ("56!", (5, 6), (1, 2, 3))
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 2)
    assert (result.origins, result.client_id, result.error) == ((P, P), "me", None)
    assert result.logprobs == (None if logprobs is None else ("x", "y"))
    assert sequence.clock.finished >= sequence.clock.submitted


def test_a_receipt_is_made_of_what_did_not_fail():
    """One that cannot be made is an error of the request, whose text stands all the same."""
    made = []

    def receipt(sequence, result):
        made.append(result.finish_reason)
        return {"is": "a receipt"}

    def fails(sequence, result):
        raise ValueError("no receipt")

    error = BackendError("lost", who="target")
    assert closing_event(make_sequence(), FinishReason.STOP, None, receipt).result.receipt == {"is": "a receipt"}
    failed = closing_event(make_sequence(), FinishReason.ERROR, error, receipt).result
    assert (failed.error, made) == (error, [FinishReason.STOP])
    broken = closing_event(make_sequence(), FinishReason.STOP, None, fails).result
    assert (broken.finish_reason, broken.text) == (FinishReason.ERROR, "!")
    assert "ValueError: no receipt" in str(broken.error)


def test_errors_are_powers_own():
    """Others are wrapped, and stay their cause."""
    own, other = RequestError("x", who="y"), KeyError("z")
    assert wrapped(own) is own
    assert wrapped(other).__cause__ is other


def test_a_token_without_its_text_is_no_event():
    """An account that does not add up is an error, and loses no token in silence."""
    member = make_member(make_sequence())
    member.chosen, member.texts = [5, 6], ["5"]
    with pytest.raises(ValueError, match="shorter"):
        token_events(member)
