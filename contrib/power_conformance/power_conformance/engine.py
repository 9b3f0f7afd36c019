"""The engine around a target and a drafter, for rules about what comes out in the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from power_conformance.failures import fail
from power_core.drafter import Drafter
from power_core.request import GenerationRequest, Result
from power_core.scheduler.drafting import OpenDraft
from power_core.scheduler.loop import StepLoop
from power_core.target import TargetModel, TargetSession
from power_core.types import Origin

__all__ = ["STRATEGY", "expect_plain", "finish", "step_loop"]

STRATEGY = "under-test"


@contextmanager
def step_loop(
    model: TargetModel, session: TargetSession, drafter: Drafter, *, draft_max: int = 4
) -> Iterator[StepLoop]:
    """A step loop over *session* whose only strategy is *drafter*; closed in the end."""

    def opened(name: str) -> OpenDraft:
        return OpenDraft(name, drafter.open(model, session), drafter.requirements(), owner=name)

    loop = StepLoop(
        session, model.tokenizer, open_strategy=opened, default_strategy=STRATEGY, draft_max=draft_max, prefill_chunk=8
    )
    try:
        yield loop
    finally:
        loop.close()


def finish(loop: StepLoop, requests: Sequence[GenerationRequest]) -> list[Result]:
    """Submit *requests* together and run them to their ends; results in their order."""
    numbers = [loop.submit(request) for request in requests]
    results: dict[int, Result] = {}
    while loop.active:
        for event in loop.step():
            if event.origin is Origin.END and event.result is not None:
                results[event.request_id] = event.result
    return [results[number] for number in numbers]


def expect_plain(result: Result, token_ids: Sequence[int], did: str) -> None:
    """Fail unless *result* holds exactly the ids of plain decoding."""
    if result.error is not None:
        fail(f"{did} ended in an error: {result.error}", f"the ids of plain decoding, {list(token_ids)}")
    if list(result.token_ids) != list(token_ids):
        fail(f"{did} gave {list(result.token_ids)}", f"the ids of plain decoding, {list(token_ids)}")
