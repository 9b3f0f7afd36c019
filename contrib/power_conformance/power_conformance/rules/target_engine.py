"""Rules of targets: what the engine makes of them, with drafters that are right, wrong and silent."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from power_conformance.engine import expect_plain, finish, step_loop
from power_conformance.failures import fail, refuse
from power_conformance.registry import rule
from power_conformance.subjects import TargetSubject
from power_core.drafter import Drafter
from power_core.request import GenerationRequest
from power_core.shapes import ExactnessLevel
from power_core.target import SessionOptions
from power_core.testing import OracleDrafter, PatternDrafter, RandomDrafter, plain_decode, recorded
from power_core.types import FinishReason, Origin, TokenId

_LOOP = "docs/exactness.md; compare with power_core.testing.plain_decode"


@rule("T-PARITY-01", look=_LOOP)
def check_parity(subject: TargetSubject) -> None:
    """
    Greedy ids are those of plain decoding whatever a drafter proposes, for long texts too: the promise Power is
    made for.
    """
    for options in _exact(subject):
        request = GenerationRequest(tuple(subject.text(9)), max_tokens=40)
        plain = list(plain_decode(subject.model, request, options=options).token_ids)
        for name, drafter in _drafters(subject, request, plain):
            with subject.session(options) as session, step_loop(subject.model, session, drafter) as loop:
                [result] = finish(loop, [request])
            expect_plain(result, plain, f"{name} proposals")


@rule("T-PARITY-02", look=_LOOP)
def check_stops_inside_a_proposal(subject: TargetSubject) -> None:
    """
    A stop id inside an accepted proposal ends the answer there, and the next request is not touched by what was
    behind it.
    """
    for options in _exact(subject):
        request = GenerationRequest(tuple(subject.text(9, stream=1)), max_tokens=10)
        plain = list(plain_decode(subject.model, request, options=options).token_ids)
        drafter = OracleDrafter(recorded([*request.prompt, *plain]), subject.model.tokenizer.vocab_size)
        with subject.session(options) as session, step_loop(subject.model, session, drafter) as loop:
            for token in dict.fromkeys(plain):
                [result] = finish(loop, [evolve(request, stop_ids=frozenset({token}))])
                expect_plain(result, plain[: plain.index(token) + 1], f"stop id {token} inside a proposal")
            [result] = finish(loop, [request])
            expect_plain(result, plain, "a request after stopped ones")


@rule("T-PARITY-03", look=_LOOP)
def check_parallel_requests(subject: TargetSubject) -> None:
    """
    Requests decoded together have the ids each would have had alone, because users do not choose their neighbours.
    """
    for options in _exact(subject):
        if options.max_sequences < 2:
            continue
        requests = [
            GenerationRequest(tuple(subject.text(3 + 4 * i, stream=i)), max_tokens=12 + i)
            for i in range(options.max_sequences + 1)
        ]
        plain = [list(plain_decode(subject.model, r, options=options).token_ids) for r in requests]
        texts = recorded(*([*r.prompt, *ids] for r, ids in zip(requests, plain, strict=True)))
        drafter = PatternDrafter(texts, subject.model.tokenizer.vocab_size, ["RW", "RR", "", "W"])
        with subject.session(options) as session, step_loop(subject.model, session, drafter) as loop:
            for i, (result, ids) in enumerate(zip(finish(loop, requests), plain, strict=True)):
                expect_plain(result, ids, f"request {i} of {len(requests)} together")


@rule("T-CONTEXT-03", look=_LOOP)
def check_requests_to_the_end_of_context(subject: TargetSubject) -> None:
    """
    A request without a limit uses the whole context, the last token included, however near its end proposals come.
    """
    for options in _exact(subject):
        with subject.session(options) as session:
            size = session.context_size
        for length in (size - 5, size - 2, size - 1, size):
            request = GenerationRequest(tuple(subject.text(length)))
            plain = plain_decode(subject.model, request, options=options)
            drafter = OracleDrafter(recorded([*request.prompt, *plain.token_ids]), subject.model.tokenizer.vocab_size)
            with subject.session(options) as session, step_loop(subject.model, session, drafter) as loop:
                [result] = finish(loop, [request])
            expect_plain(result, plain.token_ids, f"a prompt of {length} in a context of {size}")
            if result.finish_reason is not plain.finish_reason:
                fail(f"ended by {result.finish_reason}", f"{plain.finish_reason}, as plain decoding does")


@rule("T-CANCEL-01", look="docs/exactness.md")
def check_cancel(subject: TargetSubject) -> None:
    """
    A cancel at any step ends one request and leaves nothing behind: its neighbour and its successor decode as
    alone.
    """
    for options in _exact(subject):
        if options.max_sequences < 2:
            refuse("the session has one sequence")
        victim = GenerationRequest(tuple(subject.text(20, stream=1)), max_tokens=10)
        other = GenerationRequest(tuple(subject.text(6, stream=2)), max_tokens=14)
        plain = {id(r): list(plain_decode(subject.model, r, options=options).token_ids) for r in (victim, other)}
        drafter = RandomDrafter(subject.model.tokenizer.vocab_size, seed=subject.seed)
        with subject.session(options) as session, step_loop(subject.model, session, drafter) as loop:
            for steps in range(6):
                number, neighbour = loop.submit(victim), loop.submit(other)
                results = {}
                for step in range(200):
                    if step == steps:
                        loop.cancel(number)
                    for event in loop.step():
                        if event.origin is Origin.END and event.result is not None:
                            results[event.request_id] = event.result
                    if not loop.active:
                        break
                if results[number].finish_reason is not FinishReason.CANCELLED:
                    fail(f"a request cancelled at step {steps} ended by {results[number].finish_reason}", "cancelled")
                expect_plain(results[neighbour], plain[id(other)], f"the neighbour of a request cancelled at {steps}")
                [result] = finish(loop, [victim])
                expect_plain(result, plain[id(victim)], f"the same request after a cancel at step {steps}")


def _exact(subject: TargetSubject) -> Iterator[SessionOptions]:
    """The subject's options, where something is promised."""
    for options in subject.options:
        with subject.session(options) as session:
            if session.profile.level is ExactnessLevel.UNVERIFIED:
                refuse("the session promises nothing: its level is unverified")
        yield options


def _drafters(
    subject: TargetSubject, request: GenerationRequest, plain: list[TokenId]
) -> Iterator[tuple[str, Drafter]]:
    reference, size = recorded([*request.prompt, *plain]), subject.model.tokenizer.vocab_size
    yield "right", OracleDrafter(reference, size)
    yield "mixed", PatternDrafter(reference, size, ["RRRW", "", "R", "RW", "W", "RRRR"])
    yield "random", RandomDrafter(size, seed=subject.seed)
