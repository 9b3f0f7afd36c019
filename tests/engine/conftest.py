"""The harness of the engine tests: a scripted target, scripted drafters, and the answer of plain decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from power_core.drafter import Drafter
from power_core.errors import CapabilityError
from power_core.request import Event, GenerationRequest, Result
from power_core.scheduler.backlog import BacklogDrafter
from power_core.scheduler.drafting import OpenDraft
from power_core.scheduler.loop import StepLoop
from power_core.target import SessionOptions
from power_core.testing import ScriptedTarget, plain_decode
from power_core.types import Origin

MOST_STEPS = 5_000  # far more than any request here needs: a test that hangs fails instead


class Lab:
    """
    A step loop over a scripted target, run to the end and checked.

    Args:
        target: The model.
        strategies: Drafters by name.
        parallel: Sequences decoded together.
        max_rows: Rows of one decode step.
        tells_late: Whether drafters are told of hidden states when they are asked, as the engine has it.
        loop: Further arguments of `StepLoop`.
    """

    def __init__(
        self,
        target: ScriptedTarget,
        strategies: Mapping[str, Drafter] | None = None,
        *,
        parallel: int = 1,
        max_rows: int = 16,
        tells_late: bool = False,
        **loop: Any,
    ) -> None:
        self.target = target
        self.tells_late = tells_late
        self.strategies = dict(strategies or {})
        layers = {layer for drafter in self.strategies.values() for layer in drafter.requirements().hidden_layers}
        self.options = SessionOptions(max_sequences=parallel, max_rows=max_rows, hidden_layers=tuple(sorted(layers)))
        self.session = target.open_session(self.options)
        self.loop = StepLoop(self.session, target.tokenizer, open_strategy=self._open, **loop)
        self.events: list[Event] = []
        self.by_request: dict[int, list[Event]] = defaultdict(list)
        self.results: dict[int, Result] = {}

    def _open(self, name: str) -> OpenDraft:
        if name not in self.strategies:
            raise CapabilityError(f"nobody provides {name!r}")
        drafter = BacklogDrafter(self.strategies[name]) if self.tells_late else self.strategies[name]
        return OpenDraft(name, drafter.open(self.target, self.session), drafter.requirements())

    def submit(self, request: GenerationRequest) -> int:
        return self.loop.submit(request)

    def step(self) -> list[Event]:
        events = self.loop.step()
        self.events += events
        for event in events:
            self.by_request[event.request_id].append(event)
        self.results.update({event.request_id: event.result for event in events if event.result is not None})
        return events

    def drain(self) -> None:
        """Step until every request has ended."""
        for _ in range(MOST_STEPS):
            if not self.loop.active:
                return
            self.step()
        pytest.fail(f"{self.loop.active} requests have not ended after {MOST_STEPS} steps")

    def run(self, *requests: GenerationRequest) -> list[Result]:
        """Submit *requests*, run them to the end and check that their events add up."""
        ids = [self.submit(request) for request in requests]
        self.drain()
        for request_id in ids:
            self.check_events(request_id)
        return [self.results[request_id] for request_id in ids]

    def persist(self, request_id: int) -> None:
        """Step until a request has ended, through whatever the target raises: the step is repeated."""
        for _ in range(200):
            if request_id in self.results:
                return
            try:
                self.step()
            except Exception:  # noqa: BLE001 - what the target raises goes through
                continue

    def check_events(self, request_id: int) -> None:
        """The events of a request are its result, token by token, and nothing comes after the end."""
        events = self.by_request[request_id]
        result = self.results[request_id]
        assert [event.origin is Origin.END for event in events] == [False] * (len(events) - 1) + [True]
        assert tuple(event.token_id for event in events[:-1]) == result.token_ids
        assert [event.index for event in events] == list(range(len(events)))
        assert "".join(event.text for event in events) == result.text
        assert tuple(event.origin for event in events[:-1]) == result.origins
        if result.logprobs is not None:
            assert result.logprobs == tuple(event.logprobs for event in events[:-1])
            assert tuple(entry.token_id for entry in result.logprobs) == result.token_ids
        assert result.usage.completion_tokens == len(result.token_ids) == result.counts.emitted
        assert result.counts.accepted == result.origins.count(Origin.ACCEPTED) <= result.counts.drafted

    def plain(self, request: GenerationRequest) -> tuple[Any, ...]:
        """The fields of plain decoding that no strategy may change."""
        answer = plain_decode(self.target, request, options=self.options)
        return answer.token_ids, answer.text, answer.finish_reason, len(answer.token_ids)

    def check_same(self, request: GenerationRequest, result: Result) -> None:
        """*result* is what plain decoding gives, field by field."""
        got = (result.token_ids, result.text, result.finish_reason, result.usage.completion_tokens)
        assert result.error is None
        assert got == self.plain(request)

    def close(self) -> None:
        """Close the loop; nothing may have leaked and no rule may have been broken."""
        self.loop.close()
        if not any(call.name == "close" for call in self.session.faults.fired):  # that one stays open, of course
            self.session.assert_all_closed()
        self.session.assert_clean()
        for drafter in self.strategies.values():
            drafter.assert_all_ended()


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    """Makes labs, and checks each for leaks at the end of the test."""
    labs: list[Lab] = []

    def make(*args: Any, **kwargs: Any) -> Lab:
        labs.append(Lab(*args, **kwargs))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()
