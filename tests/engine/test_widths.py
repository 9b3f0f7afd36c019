"""Every forward of a request stays in one width class, prefill included (exactness)."""

import pytest

from power_core.errors import ConfigError
from power_core.request import GenerationRequest
from power_core.scheduler.loop import StepLoop
from power_core.target import SessionOptions
from power_core.testing import OracleDrafter, RandomDrafter, ScriptedTarget, one_class, padded_class, two_classes

VOCAB = 24
PROMPT = tuple(i % VOCAB for i in range(3, 44))


def lab_for(make_lab, profile, **options):
    target = ScriptedTarget(VOCAB, profile=profile)
    drafters = {"oracle": OracleDrafter(target.greedy, VOCAB), "random": RandomDrafter(VOCAB)}
    return make_lab(target, drafters, **options)


def test_leaving_the_class_would_be_seen():
    """The scripted target really decodes otherwise outside its decode class, so the tests here can fail."""
    target = ScriptedTarget(VOCAB, profile=two_classes(8))
    numerics, inside, outside = target.numerics, target.numerics.start, target.numerics.start
    flips = 0
    for token in PROMPT:
        inside = numerics.extend(inside, token, drifts=False)
        outside = numerics.extend(outside, token, drifts=True)
        flips += numerics.row(inside, ()).argmax() != numerics.row(outside, ()).argmax()
    assert flips >= 10


def test_narrow_steps_are_padded_into_the_class(make_lab):
    """Where width 1 is alone a single row is computed at width 2, in plain decoding too."""
    lab = lab_for(make_lab, padded_class())
    request = GenerationRequest(PROMPT, max_tokens=10)
    [result] = lab.run(request)
    lab.check_same(request, result)
    assert {record.width for record in lab.session.history if record.rows == 1} == {2}
    assert sum(result.counts.widths.values()) == result.counts.target_passes


@pytest.mark.parametrize("spec", ["oracle", "random", "off"])
@pytest.mark.parametrize("chunk", [1, 3, 8, 9, 256])
def test_prompt_rows_and_generated_rows_of_two_classes_never_meet(make_lab, spec, chunk):
    """Where the classes differ, each forward is of one kind, and generated rows stay below the border."""
    lab = lab_for(make_lab, two_classes(8), parallel=3, prefill_chunk=chunk, draft_max=16)
    requests = [GenerationRequest(PROMPT[: 5 * n], max_tokens=20, spec=spec) for n in range(1, 6)]
    for request, result in zip(requests, lab.run(*requests), strict=True):
        lab.check_same(request, result)
    decode = lab.session.profile.decode
    for record in lab.session.history:
        assert (record.identity == decode.identity) == (record.width < 8)


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 41, 256])
def test_prompt_is_cut_into_chunks(make_lab, chunk):
    """No forward holds more prompt rows than a chunk, and how the prompt is cut does not show."""
    lab = lab_for(make_lab, one_class(32), prefill_chunk=chunk)
    request = GenerationRequest(PROMPT, max_tokens=6)
    [result] = lab.run(request)
    lab.check_same(request, result)
    assert max(record.rows for record in lab.session.history) == min(chunk, 32, len(PROMPT))
    assert result.counts.prefill_passes == -(-len(PROMPT) // min(chunk, 32)) - 1


def test_a_long_prompt_does_not_stop_the_others(make_lab):
    """While one request's long prompt is read, the others go on emitting."""
    for profile in (one_class(4), two_classes(8, prefill_rows=8)):
        lab = lab_for(make_lab, profile, parallel=2)
        early = lab.submit(GenerationRequest((1, 2), max_tokens=40))
        lab.step()
        late = lab.submit(GenerationRequest(PROMPT * 4, max_tokens=1))
        while late not in lab.results:
            lab.step()
        assert len([event for event in lab.events if event.request_id == early]) >= 15
        lab.drain()


@pytest.mark.parametrize("max_rows", [3, 4, 7, 16])
def test_rows_of_all_sequences_fit_the_class(make_lab, max_rows):
    """Three drafting requests share the rows of one exact step; none starves."""
    lab = lab_for(make_lab, one_class(), parallel=3, max_rows=max_rows, draft_max=8)
    requests = [GenerationRequest((n, n + 1), max_tokens=20, spec="oracle") for n in range(3)]
    for request, result in zip(requests, lab.run(*requests), strict=True):
        lab.check_same(request, result)
    decoding = [record for record in lab.session.history if all(chain.start >= 2 for chain in record.chains)]
    assert max(record.rows for record in decoding) <= max_rows


def test_more_sequences_than_rows_are_refused():
    """An engine whose step cannot hold a row of each sequence is refused when it is made."""
    target = ScriptedTarget(VOCAB)
    session = target.open_session(SessionOptions(max_sequences=5, max_rows=4))
    with pytest.raises(ConfigError, match="5 parallel requests"):
        StepLoop(session, target.tokenizer, open_strategy=lambda name: None)
