"""Requests decoded together: each as if it were alone (case 23)."""

import random

import pytest

from power_core.errors import CapabilityError, RequestError
from power_core.request import GenerationRequest, SamplingSpec
from power_core.testing import (
    AdversarialDrafter,
    OracleDrafter,
    RandomDrafter,
    ScriptedTarget,
    ZeroDrafter,
    one_class,
    padded_class,
    two_classes,
)
from power_core.types import FinishReason

VOCAB = 24
PROFILES = {"one": one_class(), "padded": padded_class(), "two": two_classes(8), "narrow": one_class(4)}


def strategies_for(target):
    right = target.greedy
    return {
        "oracle": OracleDrafter(right, VOCAB),
        "zero": ZeroDrafter(right, VOCAB),
        "wrong-at-2": AdversarialDrafter(right, VOCAB, wrong_at=2),
        "random": RandomDrafter(VOCAB),
    }


def mixed_requests(count, *, seed):
    """Requests that differ in everything a request can differ in."""
    dice = random.Random(seed)
    requests = []
    for number in range(count):
        sampling = SamplingSpec(
            temperature=dice.choice([0.0, 0.9]), seed=number, repeat_penalty=dice.choice([1.0, 1.3]),
            top_k=dice.choice([0, 6]),
        )  # fmt: skip
        requests.append(
            GenerationRequest(
                [dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))],
                sampling=sampling,
                max_tokens=dice.choice([0, 1, 5, 17, 30]),
                stop=dice.choice([(), ("ab",), ("c", "de")]),
                stop_ids=frozenset(dice.choice([(), (3,)])),
                spec=dice.choice(["off", "oracle", "zero", "wrong-at-2", "random"]),
                draft_max=dice.choice([None, 1, 2, 5]),
                client_id=f"client {number}",
            )
        )
    return requests


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
@pytest.mark.parametrize(("capacity", "snapshots"), [(None, True), (1, True), (2, False)])
@pytest.mark.parametrize("parallel", [2, 4, 6])
def test_each_request_of_a_batch_is_as_if_alone(make_lab, parallel, capacity, snapshots, profile):
    """Prompts, samplers, stops, strategies and widths of all kinds in one batch: every field as in plain decoding."""
    target = ScriptedTarget(VOCAB, rollback_capacity=capacity, snapshots=snapshots, profile=profile)
    lab = make_lab(target, strategies_for(target), parallel=parallel)
    requests = mixed_requests(24, seed=parallel)
    for request, result in zip(requests, lab.run(*requests), strict=True):
        lab.check_same(request, result)
        assert result.client_id == request.client_id
        assert result.prompt_token_ids == tuple(request.prompt)


@pytest.mark.parametrize("seed", range(6))
def test_requests_join_between_steps_and_are_cancelled(make_lab, seed):
    """Joins and cancels at any step leave every other request as it would have been, and cut the cancelled one."""
    dice = random.Random(seed)
    target = ScriptedTarget(VOCAB, rollback_capacity=dice.choice([None, 1]))
    lab = make_lab(target, strategies_for(target), parallel=4)
    waiting, submitted, cancelled = mixed_requests(30, seed=seed), {}, set()
    while waiting or lab.loop.active:
        if waiting and dice.random() < 0.5:
            request = waiting.pop()
            submitted[lab.submit(request)] = request
        running = [number for number in submitted if number not in lab.results]
        if running and dice.random() < 0.05:
            cancelled.add(dice.choice(running))
            lab.loop.cancel(max(cancelled))
        lab.step()
    for number, request in submitted.items():
        result = lab.results[number]
        lab.check_events(number)
        if result.finish_reason is FinishReason.CANCELLED:
            assert number in cancelled
            assert lab.plain(request)[0][: len(result.token_ids)] == result.token_ids
        else:
            lab.check_same(request, result)


def test_one_request_alone_costs_the_same_passes_as_in_a_batch(make_lab):
    """What a request drafts and gets accepted does not depend on the company (case 23: acceptance)."""
    target = ScriptedTarget(VOCAB)
    requests = [GenerationRequest((n, 2, 3), max_tokens=24, spec="wrong-at-2", draft_max=3) for n in range(4)]
    alone = [make_lab(target, strategies_for(target)).run(request)[0] for request in requests]
    together = make_lab(target, strategies_for(target), parallel=4).run(*requests)
    for solo, result in zip(alone, together, strict=True):
        assert (solo.token_ids, solo.counts.accepted) == (result.token_ids, result.counts.accepted)


def test_cancel_during_a_long_prefill(make_lab):
    """A cancel takes effect after at most one chunk of the prompt, and frees the sequence."""
    lab = make_lab(ScriptedTarget(VOCAB), prefill_chunk=4)
    number = lab.submit(GenerationRequest([1] * 200))
    lab.step()
    assert lab.loop.progress(number) == (4, 200)
    lab.loop.cancel(number)
    lab.step()
    assert lab.results[number].finish_reason is FinishReason.CANCELLED
    assert lab.results[number].token_ids == ()
    request = GenerationRequest((1, 2), max_tokens=3)
    lab.check_same(request, *lab.run(request))


def test_cancel_of_a_waiting_an_unknown_and_a_finished_request(make_lab):
    """A waiting request ends without having run; the other two cancels change nothing."""
    lab = make_lab(ScriptedTarget(VOCAB))
    request = GenerationRequest((1, 2), max_tokens=3)
    first, second = lab.submit(request), lab.submit(request)
    lab.loop.cancel(second)
    lab.loop.cancel(99)
    lab.drain()
    lab.loop.cancel(first)
    assert lab.step() == []
    assert lab.results[second].finish_reason is FinishReason.CANCELLED
    assert lab.results[second].counts.target_passes == 0
    lab.check_same(request, lab.results[first])


def test_a_request_that_cannot_be_served_is_refused_at_submission(make_lab):
    """Bad ids, limits and strategies raise where they are submitted; nothing is queued."""
    lab = make_lab(ScriptedTarget(VOCAB), draft_max=4)
    good = GenerationRequest((1, 2), max_tokens=3)
    for change in ({"prompt": (1, VOCAB)}, {"prompt": (-1,)}, {"draft_max": -1}, {"stop": ("",)}, {"stop_ids": {99}}):
        with pytest.raises(RequestError):
            lab.submit(good.with_(**change))
    with pytest.raises(CapabilityError):
        lab.submit(good.with_(spec="nobody"))
    assert lab.loop.active == 0
    lab.check_same(good, *lab.run(good))
