"""Requests in flight without a loop, a target or a drafter around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from power_core.request import GenerationRequest
from power_core.scheduler.admission import Deadline
from power_core.scheduler.policy import DraftShape, FixedPolicy
from power_core.scheduler.sequence import Member, Sequence


class ScriptedSampler:
    """Chooses what it is told to, and remembers the rows it read."""

    def __init__(self, prompt: tuple[int, ...], choices: tuple[int, ...] = (), complete_at: int | None = None) -> None:
        self.history = list(prompt)
        self.read: list[int] = []
        self.entries: list[Any] = []
        self._choices = iter(choices)
        self._complete_at = complete_at

    def sample(self, rows: object, i: int) -> int:
        self.read.append(i)
        self.history.append(next(self._choices))
        return self.history[-1]

    def logprobs(self) -> list[Any]:
        return self.entries

    @property
    def is_complete(self) -> bool:
        return len(self.read) == self._complete_at


class ScriptedDecoder:
    """Writes each token as its number; one of them stops the text."""

    def __init__(self, stop: int | None = None) -> None:
        self._stop = stop

    def push(self, token: int) -> tuple[str, bool]:
        return str(token), token == self._stop

    def flush(self) -> str:
        return "!"


def make_sequence(
    prompt: tuple[int, ...] = (1, 2, 3),
    *,
    choices: tuple[int, ...] = (),
    stop: int | None = None,
    complete_at: int | None = None,
    draft_max: int = 4,
    request_id: int = 7,
    deadline: Deadline | None = None,
    **request: Any,
) -> Sequence:
    """A request with *prompt* that chooses *choices*."""
    sampler: Any = ScriptedSampler(prompt, choices, complete_at)
    decoder: Any = ScriptedDecoder(stop)
    return Sequence(
        request_id, GenerationRequest(prompt, **request), seed=0, sampler=sampler, decoder=decoder, strategy="s",
        draft_max=draft_max, width=FixedPolicy().begin(DraftShape(draft_max)), deadline=deadline or Deadline(),
    )  # fmt: skip


def make_member(sequence: Sequence, *, base: int = 2, known: int = 1, proposal: tuple[int, ...] = ()) -> Member:
    """*sequence* in a step that chooses tokens, its rows computed."""
    member = Member(sequence, base, known, samples=True)
    member.proposal = list(proposal)
    rows: Any = SimpleNamespace()
    member.rows = rows
    return member
