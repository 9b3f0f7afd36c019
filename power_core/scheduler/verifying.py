"""Verification: the target's own choices, as far as they are those of the proposal."""

from __future__ import annotations

from power_core.scheduler.sequence import Member
from power_core.types import FinishReason

__all__ = ["choose"]


def choose(member: Member, context_size: int) -> None:
    """
    Sample the rows of *member* in order, up to the first mismatch or to where plain decoding would have ended.

    Each token is sampled from the target's row just as plain decoding would have sampled it: a proposal decides
    how many rows there are to sample from, and nothing else.
    """
    sequence, proposal, rows = member.sequence, member.proposal, member.rows
    assert rows is not None
    first = member.start + member.known - 1
    for offset in range(len(proposal) + 1):
        token = sequence.sampler.sample(rows, first + offset)
        text, stopped = sequence.decoder.push(token)
        member.chosen.append(token)
        member.texts.append(text)
        matches = offset < len(proposal) and token == proposal[offset]
        member.accepted += matches
        if stopped or sequence.sampler.is_complete:
            member.finish = FinishReason.STOP
        else:
            member.finish = sequence.limit_reached(context_size)
        if member.finish is not None or not matches:
            return
