"""Rules of drafters: what a proposal is, and what it may depend on."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from operator import index
from typing import Any

from power_conformance.drafting import Draft, Guard, drafting, parts
from power_conformance.failures import fail, refuse
from power_conformance.registry import rule
from power_conformance.subjects import DrafterSubject
from power_core.draft_context import NEXTN_STATE
from power_core.drafter import DraftRequest
from power_core.types import Capability, TokenId

_PROPOSAL = "Proposal in power_core/drafter.py"
_PROPOSE = "DraftSession.propose in power_core/drafter.py"
_LIMITS = (1, 2, 3, 8, 64)
_TEXT = 44  # tokens of the texts drafters are led through


@rule("D-REQUIREMENTS-01", look="DrafterRequirements in power_core/drafter.py")
def check_requirements(subject: DrafterSubject) -> None:
    """
    Requirements name capabilities of the core and blocks of the target, always the same ones, because they are
    checked before opening.
    """
    needs = subject.drafter.requirements()
    if needs != subject.drafter.requirements():
        fail("answered requirements() differently the second time", "the same requirements every time")
    unknown = sorted(needs.capabilities - {str(name) for name in Capability})
    if unknown:
        fail(f"requires the capability {unknown[0]!r}", "one of " + ", ".join(Capability))
    layers = subject.model.identity.num_layers
    outside = [layer for layer in needs.hidden_layers if not 0 <= layer < layers and layer != NEXTN_STATE]
    if outside:
        fail(f"requires the output of block {outside[0]} of {layers}", f"blocks 0 to {layers - 1}")
    if needs.hidden_layers and Capability.HIDDEN_STATES not in needs.capabilities:
        fail(f"requires blocks {needs.hidden_layers} without the capability `hidden-states`", "both")
    if NEXTN_STATE in needs.hidden_layers and Capability.NEXTN not in needs.capabilities:
        fail("requires the state of prediction layers without the capability `nextn`", "both")


@rule("D-BOUNDS-01", look=_PROPOSE)
def check_bounds(subject: DrafterSubject) -> None:
    """A proposal has at most `max_tokens` tokens, because what is beyond has no room in the step."""
    for limit in _LIMITS:
        with drafting(subject) as run:
            for ids, _ in run.follow(0, subject.text(_TEXT), limit=limit):
                if len(ids) > limit:
                    fail(f"proposed {len(ids)} tokens where {limit} were asked for", f"at most {limit}")


@rule("D-VOCABULARY-01", look=_PROPOSAL)
def check_vocabulary(subject: DrafterSubject) -> None:
    """Proposed ids are integers of the target's vocabulary, because anything else is dropped and wastes the step."""
    size = subject.model.tokenizer.vocab_size
    with drafting(subject) as run:
        for ids, _ in run.follow(0, subject.text(_TEXT)):
            for token in ids:
                if not _is_id(token, size):
                    fail(f"proposed {token!r}", f"integers from 0 to {size - 1}")


@rule("D-CONFIDENCE-01", look=_PROPOSAL)
def check_confidences(subject: DrafterSubject) -> None:
    """
    Confidences are chances in [0, 1], one a token, so that their running product, which cost models use, never
    rises.
    """
    offered = False
    with drafting(subject) as run:
        for ids, confidences in run.follow(0, subject.text(_TEXT)):
            if confidences is None:
                continue
            offered = True
            if len(confidences) != len(ids):
                fail(f"gave {len(confidences)} confidences for {len(ids)} tokens", "one a token")
            for value in confidences:
                if not math.isfinite(value) or not 0 <= value <= 1:
                    fail(f"gave the confidence {value!r}", "a number from 0 to 1")
    if not offered:
        refuse("the drafter gives no confidences")


@rule("D-DETERMINISM-01", look=_PROPOSE)
def check_determinism(subject: DrafterSubject) -> None:
    """The same text gives the same proposals in every session, because a receipt's counts must be reproducible."""
    text = subject.text(_TEXT)
    _expect_drafts(_alone(subject, text), _alone(subject, text), "a second session proposed")


@rule("D-FUTURE-01", look="DraftSession.begin and observe in power_core/drafter.py")
def check_no_future(subject: DrafterSubject) -> None:
    """
    Proposals depend on what was observed and nothing else, not even on lists the caller goes on filling: a draft of
    the future is a leak.
    """
    past = subject.text(24)
    expected = _alone(subject, past)
    for stream in (5, 6):
        got = _with_future(subject, past, subject.text(12, stream=stream))
        _expect_drafts(got, expected, "while its caller's lists grew, it proposed")


@rule("D-ARGS-01", look="DraftSession in power_core/drafter.py")
def check_arguments(subject: DrafterSubject) -> None:
    """Arguments are left as they were, because the engine uses the same lists afterwards."""
    text = subject.text(_TEXT)
    with drafting(subject) as run:
        prompt = text[:10]
        _unchanged("begin", prompt, lambda: run.begin(0, prompt, text[10]))
        for part in parts(text[11:]):
            run.draft.checkpoint(0)
            requests = [run.request(0, 4)]
            _unchanged("propose", requests, lambda requests=requests: run.draft.propose(requests))
            _unchanged("observe", part, lambda part=part: run.commit(0, part))


@rule("D-BATCH-01", look=_PROPOSE)
def check_batches(subject: DrafterSubject) -> None:
    """`propose` answers each request in order, as it would alone, because requests are drafted for together."""
    texts = [subject.text(26, stream=stream) for stream in range(min(3, subject.options.max_sequences))]
    alone = [_alone(subject, text) for text in texts]
    with drafting(subject) as run:
        rounds = [list(parts(text[11:])) for text in texts]
        for seq, text in enumerate(texts):
            run.begin(seq, text[:10], text[10])
        for number in range(len(rounds[0])):
            for seq in range(len(texts)):
                run.draft.checkpoint(seq)
            requests: list[DraftRequest] = [run.request(seq, 4) for seq in range(len(texts))]
            proposals = run.draft.propose(requests)
            if len(proposals) != len(requests):
                fail(f"answered {len(requests)} requests with {len(proposals)} proposals", "one a request")
            for seq, proposal in enumerate(proposals):
                got = tuple(proposal.token_ids)
                if got != alone[seq][number][0]:
                    fail(f"proposed {got} for request {seq} of {len(texts)}", f"{alone[seq][number][0]}, as alone")
                run.commit(seq, rounds[seq][number])


@rule("D-TARGET-01", look="Drafter.open in power_core/drafter.py")
def check_target_is_left_alone(subject: DrafterSubject) -> None:
    """A drafter calls nothing that changes the target session, because it only advises."""
    guard = Guard()
    with drafting(subject, guard=guard) as run:
        run.follow(0, subject.text(_TEXT))
        run.end(0)
    if guard.calls:
        fail(f"called {guard.calls[0]} of the target session", "no call of " + ", ".join(sorted(Guard.changing)))


@rule("D-ROWS-01", look="HiddenRows and Rows in power_core/target.py")
def check_rows_are_read_in_time(subject: DrafterSubject) -> None:
    """Hidden rows are read before the target's next forward, because their memory is overwritten then."""
    if not subject.drafter.requirements().hidden_layers:
        refuse("the drafter reads no hidden rows")
    late: list[str] = []
    with drafting(subject) as run:
        current: list[object] = [None]

        class Watched:
            """Rows that know whether they are the newest."""

            def __init__(self, rows: Any) -> None:
                self._rows = rows
                current[0] = self

            def __getattr__(self, name: str) -> Any:
                if current[0] is not self:
                    late.append(name)
                return getattr(self._rows, name)

        run.wrap_rows = Watched
        try:
            run.follow(0, subject.text(_TEXT + 8))
        except Exception:
            if not late:
                raise
    if late:
        fail(f"read `{late[0]}` of rows after the next forward", "a copy made while the rows were valid")


@rule("D-PROMPT-01", look="DraftSession.begin in power_core/drafter.py")
def check_short_prompts(subject: DrafterSubject) -> None:
    """Prompts of one token and of repeated tokens are drafted for like any other, because users send them."""
    one, two = subject.text(2)
    for prompt in ([one], [one] * 3, [one, two], [one] * 20):
        with drafting(subject) as run:
            run.begin(0, prompt, one)
            for token in (one, two, one, one):
                run.round(0, [token], limit=1)
            run.end(0)


def _is_id(token: object, size: int) -> bool:
    try:
        return not isinstance(token, bool) and 0 <= index(token) < size  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False


def _alone(subject: DrafterSubject, text: Sequence[TokenId]) -> list[Draft]:
    with drafting(subject) as run:
        return run.follow(0, text)


def _with_future(subject: DrafterSubject, past: list[TokenId], future: list[TokenId]) -> list[Draft]:
    """Proposals along *past*, while the lists the drafter was given grow into the future."""
    with drafting(subject) as run:
        prompt = past[:10]
        run.begin(0, prompt, past[10])
        prompt += past[10:] + future
        drafts = []
        for part in parts(past[11:]):
            given = list(part)
            drafts.append(run.round(0, given))
            given += future
        return drafts


def _unchanged(name: str, argument: list[Any], call: Any) -> None:
    before = copy.copy(argument)
    call()
    if argument != before:
        fail(f"{name} changed its argument from {before} to {argument}", "an argument that is only read")


def _expect_drafts(got: list[Draft], expected: list[Draft], did: str) -> None:
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a != b:
            fail(f"{did} {a} in round {number}", f"{b}, as before")
