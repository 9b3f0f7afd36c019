"""
A failure or cancel at every call of every participant: the others, and the next step, are as they would have been.

One scene is played again and again: two requests of a drafter that may fail, one of another drafter, one
undrafted with a sampler, a processor and stops, on three sequences, so that one waits for a free one.
"""

import pytest

from power_core.errors import PowerError
from power_core.request import GenerationRequest, SamplingSpec
from power_core.testing import Faults, PatternDrafter, ScriptedTarget, ScriptedTokenizer, small_vocabulary
from power_core.types import FinishReason

VOCAB = 24
PATTERNS = ["RRWW", "", "RRRR", "W"]
MEMORIES = {"free": (None, True), "window": (1, True), "no-snapshots": (1, False)}
TARGET_CALLS = [
    "open", "close", "length", "forward", "can_truncate", "truncate", "checkpoint", "can_restore", "restore",
    "rows.greedy", "rows.logits", "rows.hidden",
]  # fmt: skip
DRAFT_CALLS = ["begin", "propose", "observe", "checkpoint", "restore", "end"]


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
        sampling = SamplingSpec(temperature=0.9, seed=4, repeat_penalty=1.2)
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
        from power_core.testing import plain_decode

        if request.sampling.processors:
            request = request.with_(sampling=SamplingSpec(processors=(Processor(Faults()),)))
        return plain_decode(self.clean, request)


class Interruption(BaseException):
    """What a signal handler raises: no `Exception`."""


def calls_of(make_lab, memory, part, name):
    """How often the undisturbed scene calls *name*."""
    scene = Scene(make_lab, memory)
    scene.check(scene.play())
    return scene.faults[part].calls[name]


PARTS = (
    [("target", name) for name in TARGET_CALLS]
    + [("draft", name) for name in DRAFT_CALLS]
    + [("tokenizer", "token_bytes"), ("processor", "process"), ("processor", "checkpoint"), ("processor", "restore")]
)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("part", "name"), PARTS)
def test_an_error_ends_one_request_at_most(make_lab, part, name, memory, after):
    """An exception at any call ends the request it belongs to, or no request at all."""
    for number in range(1, calls_of(make_lab, memory, part, name) + 1):
        scene = Scene(make_lab, memory, part, Faults({name: number}, after=after))
        scene.check(scene.play(), failures=1)
        assert len(scene.faults[part].fired) == 1
        assert len(scene.raised) <= 1
