"""
A failure or cancel at every call of every participant: the others, and the next step, are as they would have been.

One scene is played again and again: two requests of a drafter that may fail, one of another drafter, one
undrafted with a sampler, a processor and stops, on three sequences, so that one waits for a free one.
"""

import logging

import pytest
import structlog

from power_core.errors import BackendError, PowerError
from power_core.request import GenerationRequest, SamplingSpec
from power_core.testing import Faults, PatternDrafter, ScriptedTarget, ScriptedTokenizer, plain_decode, small_vocabulary
from power_core.types import FinishReason

VOCAB = 24
PATTERNS = ["RRWW", "", "RRRR", "W"]
MEMORIES = {"free": (None, True), "window": (1, True), "no-snapshots": (1, False)}
TARGET_CALLS = [
    "open", "close", "length", "forward", "can_truncate", "truncate", "checkpoint", "can_restore", "restore",
    "rows.greedy", "rows.logits", "rows.hidden",
]  # fmt: skip
MOST_CALLS = 6  # of one method that are disturbed, a play each
DRAFT_CALLS = ["begin", "propose", "observe", "checkpoint", "end"]

# The undisturbed scene, worked out once: the answers by prompt, and the calls by memory, part and method.
PLAIN = {}
CALLS = {}


class Processor:
    """A processor with state that fails where it is told to."""

    def __init__(self, faults):
        self.faults = faults
        self.seen = 0

    def __call__(self, tokens, logits):
        self.faults.enter("process")
        self.seen += 1
        logits[self.seen % VOCAB] += 1
        self.faults.leave("process")

    def checkpoint(self):
        self.faults.enter("checkpoint")
        self.faults.leave("checkpoint")
        return self.seen

    def restore(self, checkpoint):
        self.faults.enter("restore")
        self.seen = checkpoint
        self.faults.leave("restore")


class Scene:
    """The scene, with faults in one of its parts: `target`, `draft`, `tokenizer` or `processor`."""

    def __init__(self, make_lab, memory, part=None, faults=None):
        parts = {name: Faults() for name in ("target", "draft", "tokenizer", "processor")}
        if part is not None:
            parts[part] = faults
        self.faults = parts
        capacity, snapshots = MEMORIES[memory]
        tokenizer = ScriptedTokenizer(small_vocabulary(VOCAB), faults=parts["tokenizer"])
        self.target = ScriptedTarget(
            tokenizer=tokenizer, rollback_capacity=capacity, snapshots=snapshots, faults=parts["target"]
        )
        # The reference of plain decoding must not meet the faults.
        self.clean = ScriptedTarget(VOCAB)
        right = self.clean.greedy
        self.drafters = {
            "fragile": PatternDrafter(right, VOCAB, PATTERNS, hidden_layers=[1], faults=parts["draft"]),
            "healthy": PatternDrafter(right, VOCAB, PATTERNS[::-1]),
        }
        self.lab = make_lab(self.target, self.drafters, parallel=3, draft_max=4, prefill_chunk=4)
        self.raised = []

    def requests(self):
        sampling = SamplingSpec(temperature=0.9, seed=4, repeat_penalty=1.2, logprobs=1)
        processed = SamplingSpec(processors=(Processor(self.faults["processor"]),))
        return [
            GenerationRequest((1, 2, 3), max_tokens=12, spec="fragile"),
            GenerationRequest((4, 5), max_tokens=10, spec="healthy", stop=("ab",), sampling=processed),
            GenerationRequest((6, 7, 8, 9, 10, 11), max_tokens=9, spec="fragile", sampling=sampling),
            GenerationRequest((12, 13), max_tokens=8, spec="off", stop_ids=frozenset({3})),
        ]

    def play(self):
        """Play to the end, stepping again where a step raises; then a request more."""
        requests = self.requests()
        numbers = [self.lab.submit(request) for request in requests]
        self._drain()
        requests.append(GenerationRequest((14, 15), max_tokens=6, spec="fragile"))
        numbers.append(self.lab.submit(requests[-1]))
        self._drain()
        return dict(zip(numbers, requests, strict=True))

    def _drain(self):
        for _ in range(200):
            if not self.lab.loop.active:
                return
            try:
                self.lab.step()
            except (PowerError, Interruption) as error:
                self.raised.append(error)
        pytest.fail("the requests do not end")

    def check(self, requests, *, failures=0, reason=FinishReason.ERROR):
        """Every result is plain decoding's, but for at most *failures* that end early, on the same path."""
        ended_early = 0
        for number, request in requests.items():
            self.lab.check_events(number)
            result = self.lab.results[number]
            if result.finish_reason is reason:
                ended_early += 1
                assert self._plain(request).token_ids[: len(result.token_ids)] == result.token_ids
                assert (result.error is not None) == (reason is FinishReason.ERROR)
                continue
            plain = self._plain(request)
            got = (result.token_ids, result.text, result.finish_reason)
            assert got == (plain.token_ids, plain.text, plain.finish_reason)
        assert ended_early <= failures

    def _plain(self, request):
        if request.prompt not in PLAIN:
            if request.sampling.processors:
                request = request.with_(sampling=SamplingSpec(processors=(Processor(Faults()),)))
            PLAIN[request.prompt] = plain_decode(self.clean, request)
        return PLAIN[request.prompt]


class Interruption(BaseException):
    """What a signal handler raises: no `Exception`."""


def chosen_calls(make_lab, memory, part, name):
    """Numbers of the calls of *name* to disturb: all, or some spread over the undisturbed scene."""
    if memory not in CALLS:
        scene = Scene(make_lab, memory)
        scene.check(scene.play())
        CALLS[memory] = {key: dict(faults.calls) for key, faults in scene.faults.items()}
    count = CALLS[memory][part][name]
    return sorted({1 + i * (count - 1) // (MOST_CALLS - 1) for i in range(MOST_CALLS)})


PARTS = (
    [("target", name) for name in TARGET_CALLS]
    + [("draft", name) for name in DRAFT_CALLS]
    + [("tokenizer", "token_bytes"), ("processor", "process"), ("processor", "checkpoint")]
)
# A memory that can always be cut is never restored, and one without snapshots never beyond its window.
NEVER_CALLED = {("free", "can_restore"), ("free", "restore"), ("no-snapshots", "restore")}
SCENES = [
    pytest.param(memory, part, name, id=f"{part}-{name}-{memory}")
    for part, name in PARTS
    for memory in MEMORIES
    if (memory, name) not in NEVER_CALLED
]


@pytest.fixture(autouse=True)
def _quiet_log(_log_of_its_own):
    """The failures here are meant; their warnings would drown the report."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("memory", "part", "name"), SCENES)
def test_an_error_ends_one_request_at_most(make_lab, part, name, memory, after):
    """An exception at a call ends the request it belongs to, or no request at all."""
    for number in chosen_calls(make_lab, memory, part, name):
        scene = Scene(make_lab, memory, part, Faults({name: number}, after=after))
        scene.check(scene.play(), failures=1)
        assert len(scene.faults[part].fired) == 1
        assert len(scene.raised) <= 1


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("memory", "part", "name"), SCENES)
def test_an_interrupt_ends_no_request(make_lab, part, name, memory, after):
    """What is no `Exception` leaves `step`; stepped again, every request ends as if nothing had happened."""
    for number in chosen_calls(make_lab, memory, part, name):
        faults = Faults({name: number}, after=after, error=lambda call: Interruption(str(call)))
        scene = Scene(make_lab, memory, part, faults)
        # In mid-rebuild nobody knows whether an interrupted close took place: that request cannot go on.
        scene.check(scene.play(), failures=int((memory, name) == ("no-snapshots", "close")))
        assert [type(error) for error in scene.raised] == [Interruption]


@pytest.mark.parametrize(("memory", "part", "name"), SCENES)
def test_a_cancel_ends_one_request(make_lab, part, name, memory):
    """A cancel from another thread during any call ends that request alone, before the next step at the latest."""
    for number in chosen_calls(make_lab, memory, part, name):
        for victim in range(number % 2, 4, 2):
            faults = Faults()
            scene = Scene(make_lab, memory, part, faults)
            faults.hook = cancel_at(scene, name, number, victim)
            scene.check(scene.play(), failures=1, reason=FinishReason.CANCELLED)
            assert scene.raised == []


def cancel_at(scene, name, number, victim):
    """A fault hook that cancels request *victim* at a call instead of failing it."""

    def hook(call):
        if (call.name, call.number, call.done) == (name, number, False):
            scene.lab.loop.cancel(victim)

    return hook


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("part", ["target", "draft", "processor"])
def test_a_restore_that_fails_ends_its_request_alone(make_lab, part, memory):
    """After a failed forward each participant is restored; where one refuses, only that request ends."""
    for forward in range(1, 9):
        scene = Scene(make_lab, memory)
        scene.faults["target"].at = {"forward": forward}
        # A failed forward leaves the target as it was: only a look at its length is needed to restore it.
        scene.faults[part].hook = fail_once_after(scene, part)
        scene.check(scene.play(), failures=1)
        assert len(scene.raised) == 1


def fail_once_after(scene, part):
    """A hook that fails the first restoring call of *part* once the chosen forward has failed."""
    name, done = ("length" if part == "target" else "restore"), []

    def hook(call):
        if call.name == name and scene.faults["target"].fired and not done:
            done.append(call)
            raise BackendError("cannot go back")

    return hook


def test_a_forward_that_fails_again_and_again(make_lab):
    """A step whose forward fails can be repeated any number of times; nothing moves until it succeeds."""
    failing = {"on": False}

    def hook(call):
        if failing["on"] and call.name == "forward" and not call.done:
            raise BackendError("out of memory")

    scene = Scene(make_lab, "window", "target", Faults(hook=hook))
    requests = dict(enumerate(scene.requests()))
    for request in requests.values():
        scene.lab.submit(request)
    while scene.lab.loop.active:
        failing["on"] = True
        for _ in range(3):
            with pytest.raises(BackendError):
                scene.lab.step()
        failing["on"] = False
        scene.lab.step()
    scene.check(requests)


def test_a_receipt_that_cannot_be_made_is_an_error_of_its_request(make_lab):
    """The end of the request comes all the same, with the tokens and the cause."""

    def receipt(sequence, result):
        raise OSError("no entropy")

    lab = make_lab(ScriptedTarget(VOCAB), receipt=receipt)
    [result] = lab.run(GenerationRequest((1, 2), max_tokens=3))
    assert (result.finish_reason, len(result.token_ids)) == (FinishReason.ERROR, 3)
    assert "no entropy" in str(result.error)


def test_when_every_sequence_is_lost_requests_fail_clearly(make_lab):
    """A sequence that could not be closed is not used again; with none left a request ends with that error."""
    target = ScriptedTarget(VOCAB, faults=Faults({"close": 1}))
    lab = make_lab(target)
    first, second = lab.run(GenerationRequest((1, 2), max_tokens=3), GenerationRequest((1, 2), max_tokens=3))
    assert first.token_ids == lab.plain(GenerationRequest((1, 2), max_tokens=3))[0]
    assert second.finish_reason is FinishReason.ERROR
    assert "lost to a close that failed" in str(second.error)


def test_closing_the_loop_in_mid_request_frees_everything(make_lab):
    """`close` ends running and waiting requests and draft sessions, though one of them refuses to end."""
    scene = Scene(make_lab, "free", "draft", Faults({"end": 1}))
    for request in scene.requests():
        scene.lab.submit(request)
    for _ in range(3):
        scene.lab.step()
    scene.lab.loop.close()
    scene.lab.session.assert_all_closed()
    assert all(session.is_closed for drafter in scene.drafters.values() for session in drafter.sessions)
