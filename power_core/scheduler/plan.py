"""Which rows a step computes: pending tokens of each member, room for proposals, one width class."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from attrs import frozen

from power_core.scheduler.sequence import Member, Sequence
from power_core.shapes import WidthClass
from power_core.target import TargetSession

__all__ = ["Plan", "make_plan"]


@frozen
class Plan:
    """
    Members of a step and the class it is computed in.

    Args:
        room: Rows that all proposals together may have. Each member may ask for all of them, and what comes
            out too long is cut where it is least likely to be used.
    """

    members: tuple[Member, ...]
    shape: WidthClass
    room: int = 0


def make_plan(
    sequences: Seq[Sequence], session: TargetSession, *, prefill_chunk: int, prefer_prefill: bool
) -> Plan | None:
    """
    Share out one forward over *sequences*, first come first served.

    Generated rows go in the decode class and prompt rows in the prefill class; where these are one
    class they share a step, else *prefer_prefill* says which kind goes now.

    Returns:
        The plan, or None where no sequence has a pending token.
    """
    decode, prefill = session.profile.decode, session.profile.prefill
    prefilling, decoding = _split(sequences, session)
    mixes = session.profile.mixable and prefill.max_rows > len(decoding)
    if not prefilling or (decoding and not mixes and not prefer_prefill):
        members, room = _decode_members(decoding, session, decode.max_rows)
        return Plan(tuple(members), decode, room) if members else None
    if not mixes:
        return Plan(tuple(_prefill_members(prefilling, session, min(prefill_chunk, prefill.max_rows))), prefill)
    # Generated rows go first, but leave the prompts half of a narrow forward.
    most = min(decode.max_rows, max(len(decoding), prefill.max_rows // 2))
    members, room = _decode_members(decoding, session, most)
    taken = sum(member.known for member in members) + min(sum(member.limit for member in members), room)
    rest = min(prefill_chunk, prefill.max_rows - taken)
    return Plan((*members, *_prefill_members(prefilling, session, rest)), prefill, room)


def _split(sequences: Iterable[Sequence], session: TargetSession) -> tuple[list[Sequence], list[Sequence]]:
    prefilling: list[Sequence] = []
    decoding: list[Sequence] = []
    for sequence in sequences:
        in_prompt = session.length(sequence.seq) < sequence.num_prompt
        (prefilling if in_prompt else decoding).append(sequence)
    return prefilling, decoding


def _prefill_members(sequences: Iterable[Sequence], session: TargetSession, room: int) -> list[Member]:
    members = []
    for sequence in sequences:
        base = session.length(sequence.seq)
        known = sequence.chunk(base, room)
        if known < 1:
            break
        room -= known
        members.append(Member(sequence, base, known, samples=base + known == len(sequence.tokens)))
    return members


def _decode_members(sequences: Seq[Sequence], session: TargetSession, room: int) -> tuple[list[Member], int]:
    """Members with the pending tokens of this step, and the rows that are left for proposals."""
    members = []
    for index, sequence in enumerate(sequences):
        base = session.length(sequence.seq)
        share = room // (len(sequences) - index)  # what is left over goes to those that come later
        if share < 1:
            continue
        known = min(len(sequence.tokens) - base, share)
        room -= known
        members.append(Member(sequence, base, known, samples=base + known == len(sequence.tokens)))
    beside = sum(member.known for member in members) - 1
    for member in members:
        if member.samples:
            limit = _proposal_limit(member.sequence, session.context_size, room)
            member.limit = member.sequence.width.limit(limit, beside, member.sequence.backlog)
    return members, room


def _proposal_limit(sequence: Sequence, context_size: int, room: int) -> int:
    """min(K, remaining tokens - 1, remaining context, room in the class, guard), never negative."""
    limit = min(sequence.draft_max, context_size - len(sequence.tokens), room)
    if sequence.request.max_tokens is not None:
        limit = min(limit, sequence.request.max_tokens - sequence.num_emitted - 1)
    if sequence.guard is not None:
        limit = min(limit, sequence.guard)
    return max(limit, 0)
