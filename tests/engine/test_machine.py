"""Random interleavings of submit, step, cancel and failure against plain decoding, thousands of steps."""

import logging

import structlog
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from power_core.errors import BackendError, PowerError
from power_core.request import GenerationRequest, SamplingSpec
from power_core.testing import (
    AdversarialDrafter,
    Faults,
    LiarDrafter,
    OracleDrafter,
    PatternDrafter,
    RandomDrafter,
    ScriptedTarget,
    one_class,
    padded_class,
    plain_decode,
    two_classes,
)
from power_core.types import FinishReason

VOCAB = 8
PROFILES = [one_class(), padded_class(), two_classes(6), one_class(3)]
FAILING = ["forward", "truncate", "restore", "rows.greedy", "rows.logits", "propose", "observe", "checkpoint"]
STRATEGIES = ["off", "oracle", "wrong-at-1", "mixed", "random", "liar", "reader"]

REQUESTS = st.builds(
    GenerationRequest,
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12).map(tuple),
    max_tokens=st.one_of(st.none(), st.integers(0, 24)),
    stop=st.sampled_from([(), ("ab",), ("c", "dd")]),
    stop_ids=st.sampled_from([frozenset(), frozenset({7})]),
    spec=st.sampled_from(STRATEGIES),
    draft_max=st.sampled_from([None, 0, 1, 3, 8]),
    sampling=st.sampled_from(
        [
            SamplingSpec(),
            SamplingSpec(temperature=1.0, seed=3, top_k=4),
            SamplingSpec(repeat_penalty=1.4, penalty_window=5, logprobs=1),
        ]
    ),
)


class Interleavings(RuleBasedStateMachine):
    """One engine; the model is the table of requests and what plain decoding makes of each."""

    make_lab = None  # set by the test
    forwards = 0  # of all machines

    @initialize(
        capacity=st.sampled_from([None, 0, 1, 3]),
        snapshots=st.booleans(),
        profile=st.sampled_from(PROFILES),
        parallel=st.integers(1, 4),
        tells_late=st.booleans(),
    )
    def start(self, capacity, snapshots, profile, parallel, tells_late):
        self.faults = Faults()
        target = ScriptedTarget(
            VOCAB, context_size=32, rollback_capacity=capacity, snapshots=snapshots, profile=profile, faults=self.faults
        )
        right = target.greedy
        drafters = {
            "oracle": OracleDrafter(right, VOCAB),
            "wrong-at-1": AdversarialDrafter(right, VOCAB, wrong_at=1),
            "mixed": PatternDrafter(right, VOCAB, ["RRW", "", "RRRR", "WW"], faults=self.faults),
            "random": RandomDrafter(VOCAB),
            "liar": LiarDrafter(VOCAB),
            "reader": PatternDrafter(right, VOCAB, ["RR", "W", ""], hidden_layers=(0,), faults=self.faults),
        }
        self.lab = type(self).make_lab(
            target, drafters, parallel=parallel, prefill_chunk=5, max_rows=12, tells_late=tells_late
        )
        self.clean = ScriptedTarget(VOCAB, context_size=32, profile=profile)
        self.requests, self.cancelled, self.failures = {}, set(), 0

    @rule(request=REQUESTS)
    def submit(self, request):
        self.requests[self.lab.submit(request)] = request

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        number = data.draw(st.sampled_from(sorted(self.requests)))
        self.cancelled.add(number)
        self.lab.loop.cancel(number)

    @rule(name=st.sampled_from(FAILING), later=st.integers(1, 6), after=st.booleans())
    def fail(self, name, later, after):
        """One of the next calls of a method fails; then a step is taken."""
        self.faults.after = after
        self.faults.at = {name: self.faults.calls[name] + later}
        self.faults.fired.clear()
        self._step()
        self.failures += len(self.faults.fired)
        self.faults.at = {}

    def _step(self):
        if not self.lab.loop.active:
            return
        try:
            self.lab.step()
        except PowerError:
            assert self.faults.fired, "a step failed although nothing was told to"

    def teardown(self):
        if not hasattr(self, "lab"):
            return
        self.lab.drain()
        failed = sum(self._check(number) for number in self.requests)
        assert failed <= self.failures
        type(self).forwards += len(self.lab.session.history)
        self.lab.close()

    def _check(self, number):
        """Whether the request failed; whatever it emitted must be plain decoding's."""
        request, result = self.requests[number], self.lab.results[number]
        self.lab.check_events(number)
        plain = plain_decode(self.clean, request)
        if result.finish_reason in {FinishReason.ERROR, FinishReason.CANCELLED}:
            assert plain.token_ids[: len(result.token_ids)] == result.token_ids
            assert result.finish_reason is FinishReason.ERROR or number in self.cancelled
            assert result.error is None or isinstance(result.error, BackendError)
            return result.finish_reason is FinishReason.ERROR
        assert (result.token_ids, result.text, result.finish_reason) == (
            plain.token_ids,
            plain.text,
            plain.finish_reason,
        )
        return False


def test_random_interleavings(make_lab):
    """However submits, steps, cancels and failures interleave, every request is plain decoding's or a prefix of it."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    Interleavings.make_lab, Interleavings.forwards = make_lab, 0
    run_state_machine_as_test(
        Interleavings,
        settings=settings(
            max_examples=360, stateful_step_count=60, derandomize=True, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    assert Interleavings.forwards >= 20_000
