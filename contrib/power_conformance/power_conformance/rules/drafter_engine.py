"""Rules of drafters: what the engine emits with them. It is never their choice, so it must be plain decoding's."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
from attrs import evolve

from power_conformance.drafting import session_options
from power_conformance.engine import expect_plain, finish, step_loop
from power_conformance.failures import fail, refuse
from power_conformance.registry import rule
from power_conformance.subjects import DrafterSubject
from power_core.drafter import Drafter, DrafterRequirements, DraftSession
from power_core.errors import PowerError
from power_core.request import Event, GenerationRequest, SamplingSpec
from power_core.scheduler.loop import StepLoop
from power_core.target import SessionOptions, TargetModel, TargetSession
from power_core.testing import ScriptedTarget, plain_decode
from power_core.types import FinishReason, Origin, TokenId

_LOOP = "docs/exactness.md; compare with power_core.testing.plain_decode"
_TINY = 4  # ids of a vocabulary small enough to try everything
# Standard normal quantile of a chance of one in ten million: no seed fails by bad luck.
_LUCK = 5.2


@rule("D-PARITY-01", look=_LOOP)
def check_exhaustive_parity(subject: DrafterSubject) -> None:
    """
    With a vocabulary of four ids, every prompt of up to three gives the ids of plain decoding at every proposal
    length.
    """
    model = ScriptedTarget(_TINY, seed=subject.seed, order=2)
    options = SessionOptions(context_size=24, max_sequences=1, max_rows=6)
    prompts = [p for n in (1, 2, 3) for p in itertools.product(range(_TINY), repeat=n)]
    requests = [GenerationRequest(prompt, max_tokens=9) for prompt in prompts]
    plain = [plain_decode(model, request, options=options).token_ids for request in requests]
    for draft_max in (1, 2, 5):
        with _engine(subject, model, options, draft_max) as loop:
            for request, ids in zip(requests, plain, strict=True):
                [result] = finish(loop, [request])
                expect_plain(result, ids, f"prompt {list(request.prompt)} with K = {draft_max}")


@rule("D-PARITY-02", look=_LOOP)
def check_parity_together(subject: DrafterSubject) -> None:
    """
    Greedy and seeded requests decoded together give the ids each has by plain decoding, on the drafter's own
    target.
    """
    options = evolve(session_options(subject.drafter, subject.options), max_sequences=4, max_rows=16)
    sampled = SamplingSpec(temperature=0.9, top_p=0.95, seed=subject.seed + 11)
    requests = [
        GenerationRequest(tuple(subject.text(6 + 5 * i, stream=i)), sampling=sampling, max_tokens=14)
        for i, sampling in enumerate((SamplingSpec(), sampled, SamplingSpec(), evolve(sampled, seed=subject.seed)))
    ]
    plain = [plain_decode(subject.model, request, options=options).token_ids for request in requests]
    with _engine(subject, subject.model, options, 4) as loop:
        for i, (result, ids) in enumerate(zip(finish(loop, requests), plain, strict=True)):
            expect_plain(result, ids, f"request {i} of {len(requests)} together")


@rule("D-PARITY-03", look=_LOOP)
def check_statistics(subject: DrafterSubject) -> None:
    """
    Sampled tokens have the target's own distribution, counted over many seeds: drafting must not bend
    probabilities.
    """
    model = ScriptedTarget(_TINY, seed=subject.seed + 1, order=2, spread=1.5)
    options = SessionOptions(context_size=16, max_sequences=4, max_rows=16)
    prompt, count = (0, 1, 0, 1), 1200
    counts: Counter[tuple[TokenId, ...]] = Counter()
    for start in range(0, count, 100):
        requests = [
            GenerationRequest(prompt, sampling=SamplingSpec(temperature=1.0, seed=seed), max_tokens=3)
            for seed in range(start, start + 100)
        ]
        with _engine(subject, model, options, 3) as loop:
            for result in finish(loop, requests):
                if result.error is not None:
                    fail(f"a sampled request ended in an error: {result.error}", "three tokens")
                counts[result.token_ids[:2]] += 1
    for pair, chance in _pair_chances(model, prompt).items():
        spread = math.sqrt(count * chance * (1 - chance))
        if abs(counts[pair] - count * chance) > _LUCK * spread + 1:
            fail(f"tokens {pair} came {counts[pair]} times in {count}", f"about {count * chance:.0f}")


@rule("D-CONTEXT-01", look=_LOOP)
def check_end_of_context(subject: DrafterSubject) -> None:
    """
    Requests that fill the context end as plain decoding does, the last token included, because drafting must not
    need room.
    """
    base = session_options(subject.drafter, subject.options)
    session = subject.model.open_session(base)
    size = session.context_size
    session.shutdown()
    for length in (size - 6, size - 1, size):
        request = GenerationRequest(tuple(subject.text(length)))
        plain = plain_decode(subject.model, request, options=base)
        with _engine(subject, subject.model, base, 6) as loop:
            [result] = finish(loop, [request])
        expect_plain(result, plain.token_ids, f"a prompt of {length} in a context of {size}")


@rule("D-CANCEL-01", look=_LOOP)
def check_cancel(subject: DrafterSubject) -> None:
    """A cancel during any call of the drafter ends one request and leaves the drafter fit for the next."""
    base = session_options(subject.drafter, subject.options)
    request = GenerationRequest(tuple(subject.text(20)), max_tokens=12)
    plain = plain_decode(subject.model, request, options=base).token_ids
    watched = _Watched(subject.drafter)
    with _engine(evolve(subject, drafter=watched), subject.model, base, 4) as loop:
        for calls in range(14):
            number = loop.submit(request)
            watched.countdown, watched.action = calls, partial(loop.cancel, number)
            [result] = [event.result for event in _events(loop) if event.origin is Origin.END]
            if result is None or result.finish_reason is FinishReason.ERROR:
                fail(f"a cancel during call {calls} ended in {result and result.error}", "a cancelled request")
            watched.countdown = -1
            [result] = finish(loop, [request])
            expect_plain(result, plain, f"the same request after a cancel during call {calls}")


class _Watched:
    """A drafter, at whose sessions' calls something happens after a countdown."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.countdown = -1
        self.action: Callable[[], object] = int

    def requirements(self) -> DrafterRequirements:
        return self._drafter.requirements()

    def open(self, model: TargetModel, session: TargetSession) -> DraftSession:
        return cast("DraftSession", _WatchedSession(self, self._drafter.open(model, session)))

    def called(self) -> None:
        if self.countdown == 0:
            self.action()
        self.countdown -= 1


class _WatchedSession:
    def __init__(self, owner: _Watched, session: DraftSession) -> None:
        self._owner = owner
        self._session = session

    def __getattr__(self, name: str) -> Any:
        self._owner.called()
        return getattr(self._session, name)


def _events(loop: StepLoop) -> Iterator[Event]:
    while loop.active:
        yield from loop.step()


@contextmanager
def _engine(subject: DrafterSubject, model: TargetModel, options: SessionOptions, draft_max: int) -> Iterator[StepLoop]:
    """A step loop with the drafter on *model*, or a refusal where it cannot draft for it."""
    wanted = session_options(subject.drafter, options)
    if model is not subject.model:
        _try_open(subject, model, wanted)
    session = model.open_session(wanted)
    try:
        with step_loop(model, session, subject.drafter, draft_max=draft_max) as loop:
            yield loop
    finally:
        session.shutdown()


def _try_open(subject: DrafterSubject, model: TargetModel, options: SessionOptions) -> None:
    session = model.open_session(options)
    try:
        subject.drafter.open(model, session).close()
    except PowerError as exc:
        refuse(f"the drafter cannot draft for a scripted target: {exc}")
    finally:
        session.shutdown()


def _pair_chances(model: ScriptedTarget, prompt: tuple[TokenId, ...]) -> dict[tuple[TokenId, ...], float]:
    """Chance of each pair of tokens after *prompt*, enumerated."""

    def softmax(tokens: tuple[TokenId, ...]) -> list[float]:
        row = model.logits(tokens).astype(np.float64)
        weights = np.exp(row - row.max())
        return [float(weight) for weight in weights / weights.sum()]

    first = softmax(prompt)
    return {(a, b): first[a] * second for a in range(_TINY) for b, second in enumerate(softmax((*prompt, a)))}
