"""Leading a drafter through texts as the engine does, the hidden rows it asks for included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any, cast

from attrs import define, evolve, field

from power_conformance.failures import refuse
from power_conformance.subjects import DrafterSubject
from power_core.drafter import Drafter, DraftRequest, DraftSession, HiddenRows, Proposal
from power_core.target import RowBatch, Rows, SessionOptions, TargetSession
from power_core.types import SeqId, TokenId

__all__ = ["Draft", "DraftRun", "Guard", "drafting", "session_options"]

Draft = tuple[tuple[Any, ...], tuple[Any, ...] | None]
"""A proposal as it was answered: token ids and confidences."""

_CHUNK = 8  # prompt rows of one forward
_STEPS = (1, 3, 1, 2, 4, 1)  # tokens committed a round, over and over


@define
class DraftRun:
    """
    A draft session over a target session.

    Attributes:
        draft: The drafter's session.
        target: The target's; evaluated only where the drafter reads hidden rows.
        tokens: What each open sequence holds, the anchor last.
    """

    draft: DraftSession
    target: TargetSession
    wants_rows: bool
    tokens: dict[SeqId, list[TokenId]] = field(factory=dict)
    wrap_rows: Any = None  # (rows) -> rows, for rules that watch how rows are read

    def begin(self, seq: SeqId, prompt: Sequence[TokenId], first: TokenId) -> None:
        """Start *seq*; the target evaluates the prompt and chooses *first*."""
        if self.wants_rows:
            self.target.open(seq)
        self.draft.begin(seq, prompt)
        self.tokens[seq] = list(prompt)
        self.commit(seq, [first])

    def commit(self, seq: SeqId, committed: Sequence[TokenId]) -> None:
        """The target evaluated the anchor and chose *committed*."""
        tokens = self.tokens[seq]
        tokens += committed
        self.draft.observe(seq, committed, self._evaluate(seq, tokens[:-1]) if self.wants_rows else None)

    def detour(self, seq: SeqId, committed: Sequence[TokenId], mark: object) -> None:
        """Commit, and take everything back: the drafter to *mark*, the target to where it was."""
        if self.wants_rows:
            target_mark = self.target.checkpoint(seq, len(committed))
            if not self.target.can_restore(seq, target_mark):
                refuse("the target cannot take back the rows of a detour")
        held = len(self.tokens[seq])
        self.commit(seq, committed)
        del self.tokens[seq][held:]
        self.draft.restore(seq, mark)
        if self.wants_rows:
            self.target.restore(seq, target_mark)

    def _evaluate(self, seq: SeqId, known: Sequence[TokenId]) -> HiddenRows:
        """Rows of what the target has not evaluated of *known*; long prompts in chunks, each of them observed."""
        profile = self.target.profile
        start = self.target.length(seq)
        is_prompt = start == 0
        size = min(_CHUNK, profile.prefill.max_rows) if is_prompt else len(known) - start
        while len(known) - start > size:
            self.draft.observe(seq, [], self._forward(seq, known[start : start + size], is_prompt=True))
            start += size
        return self._forward(seq, known[start:], is_prompt=is_prompt)

    def _forward(self, seq: SeqId, tokens: Sequence[TokenId], *, is_prompt: bool) -> HiddenRows:
        batch = RowBatch(max(len(tokens), 1))
        batch.add_chain(seq, self.target.length(seq), tokens, 1)
        profile = self.target.profile
        position = self.target.length(seq)
        rows = self.target.forward(batch, profile.prefill if is_prompt else profile.decode)
        return HiddenRows(cast("Rows", self.wrap_rows(rows)) if self.wrap_rows else rows, 0, len(tokens), position)

    def request(self, seq: SeqId, limit: int, stop_below: float = 0.0) -> DraftRequest:
        """Ask for a proposal of at most *limit* tokens."""
        return DraftRequest(seq, self.tokens[seq][-1], limit, stop_below)

    def propose(self, seq: SeqId, limit: int = 4, stop_below: float = 0.0) -> Draft:
        """The proposal for one sequence, without a checkpoint before it."""
        return answer(self.draft.propose([self.request(seq, limit, stop_below)])[0])

    def round(self, seq: SeqId, committed: Sequence[TokenId], limit: int = 4, stop_below: float = 0.0) -> Draft:
        """Checkpoint, propose, commit: one step of the engine."""
        self.draft.checkpoint(seq)
        proposal = self.propose(seq, limit, stop_below)
        self.commit(seq, committed)
        return proposal

    def follow(self, seq: SeqId, text: Sequence[TokenId], *, prompt: int = 10, limit: int = 4) -> list[Draft]:
        """Lead *seq* through *text* from its beginning; every proposal made. The sequence stays open."""
        self.begin(seq, text[:prompt], text[prompt])
        return [self.round(seq, part, limit) for part in parts(text[prompt + 1 :])]

    def end(self, seq: SeqId) -> None:
        """End *seq* in both sessions."""
        del self.tokens[seq]
        self.draft.end(seq)
        if self.wants_rows:
            self.target.close(seq)


@contextmanager
def drafting(subject: DrafterSubject, *, guard: Guard | None = None) -> Iterator[DraftRun]:
    """A `DraftRun` of *subject*, closed in the end; the drafter sees the session through *guard* if there is one."""
    target = subject.model.open_session(session_options(subject.drafter, subject.options))
    try:
        seen = cast("TargetSession", guard.watch(target)) if guard else target
        draft = subject.drafter.open(subject.model, seen)
        try:
            yield DraftRun(draft, target, bool(subject.drafter.requirements().hidden_layers))
        finally:
            draft.close()
    finally:
        target.shutdown()


class Guard:
    """
    Watches what a drafter does with the target session it is given.

    Attributes:
        calls: Methods called that change a session.
    """

    changing = frozenset({"open", "forward", "truncate", "checkpoint", "restore", "close", "shutdown"})

    def __init__(self) -> None:
        self.calls: list[str] = []

    def watch(self, session: TargetSession) -> object:
        """A stand-in for *session* that keeps count, and passes for one of its class."""
        guard = self

        def read(_self: object, name: str) -> Any:
            if name in guard.changing:
                guard.calls.append(name)
            return getattr(session, name)

        # A drafter may ask for its backend's class, so the stand-in answers with it.
        members = {"__class__": property(lambda _self: type(session)), "__getattr__": read}
        return type("WatchedSession", (), members)()


def session_options(drafter: Drafter, options: SessionOptions) -> SessionOptions:
    """*options* with the hidden layers that *drafter* requires."""
    return evolve(options, hidden_layers=drafter.requirements().hidden_layers)


def answer(proposal: Proposal) -> Draft:
    """What *proposal* says, for comparison: whatever its sequences are made of."""
    confidences = proposal.confidences
    return tuple(proposal.token_ids), None if confidences is None else tuple(confidences)


def parts(text: Sequence[TokenId]) -> Iterator[list[TokenId]]:
    """*text* cut into what successive rounds commit."""
    start = 0
    for size in cycle(_STEPS):
        if start >= len(text):
            return
        yield list(text[start : start + size])
        start += size
