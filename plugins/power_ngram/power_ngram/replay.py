"""Replay of recorded tokens: what a drafter would have been worth on a text, without a model."""

from __future__ import annotations

import time
from collections.abc import Sequence

from attrs import define

from power_core.drafter import DraftRequest, DraftSession
from power_core.types import SeqId, TokenId

__all__ = ["ReplayCounts", "replay"]


@define
class ReplayCounts:
    """
    What a replay counted.

    Attributes:
        steps: Verification steps; each emits its accepted tokens and one more.
        rounds: Steps in which something was proposed.
        drafted: Tokens proposed.
        accepted: Tokens proposed that the recorded text holds.
        seconds: CPU time of this thread inside the draft session, `begin` and `end` left out.
    """

    steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    @property
    def accepted_per_step(self) -> float:
        return self.accepted / self.steps if self.steps else 0.0

    @property
    def accepted_per_round(self) -> float:
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def precision(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def add(self, other: ReplayCounts) -> None:
        """Count *other* in."""
        self.steps += other.steps
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.seconds += other.seconds


def replay(
    session: DraftSession, prompt: Sequence[TokenId], answer: Sequence[TokenId], max_tokens: int, *, seq: SeqId = 0
) -> ReplayCounts:
    """
    Decode *answer* after *prompt* as a target would that always chooses the recorded token.

    Args:
        session: A draft session in which *seq* is not open; it is not open afterwards either.
        prompt: At least one token.
        answer: The recorded tokens.
        max_tokens: Most tokens proposed a step.
    """
    counts = ReplayCounts()
    session.begin(seq, prompt)
    anchor, position = prompt[-1], 0
    while position < len(answer):
        room = min(max_tokens, len(answer) - position - 1)
        started = time.thread_time()
        session.checkpoint(seq)
        drafted = session.propose([DraftRequest(seq, anchor, room)])[0].token_ids if room else ()
        counts.seconds += time.thread_time() - started
        accepted = _agreeing(drafted, answer, position)
        committed = answer[position : position + accepted + 1]
        started = time.thread_time()
        session.observe(seq, committed, None)
        counts.seconds += time.thread_time() - started
        counts.steps += 1
        counts.rounds += bool(drafted)
        counts.drafted += len(drafted)
        counts.accepted += accepted
        anchor, position = committed[-1], position + len(committed)
    session.end(seq)
    return counts


def _agreeing(drafted: Sequence[TokenId], answer: Sequence[TokenId], position: int) -> int:
    for offset, token in enumerate(drafted):
        if token != answer[position + offset]:
            return offset
    return len(drafted)
