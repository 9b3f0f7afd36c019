"""The proposals of a step: drafters are asked, policies trim, and rows go where they are likeliest to be used."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from power_core.drafter import DraftRequest, Proposal
from power_core.errors import PowerError
from power_core.scheduler.costs import CostModel
from power_core.scheduler.drafting import OpenDraft, checked_confidences, checked_ids
from power_core.scheduler.sequence import Member
from power_core.scheduler.sharing import share_rows

__all__ = ["propose"]


def propose(members: Seq[Member], *, room: int, costs: CostModel, vocab_size: int) -> list[tuple[Member, PowerError]]:
    """
    Give *members* their proposals.

    Args:
        members: Of one step; each is asked for up to its `limit`.
        room: Rows that all proposals together may have.
        costs: Told how long each drafter took.
        vocab_size: Ids at or above it are none.

    Returns:
        The members whose drafter failed, with the error.
    """
    beside = sum(member.known for member in members) - 1
    answered: list[tuple[Member, Proposal]] = []
    failures: list[tuple[Member, PowerError]] = []
    for draft, wanting in _by_draft(members):
        late = [(member, draft.catch_up(member.sequence.seq, costs)) for member in wanting]
        failures += [(member, error) for member, error in late if error is not None]
        group = [member for member, error in late if error is None]
        for member, answer in zip(group, _ask(draft, group, costs) if group else [], strict=True):
            if isinstance(answer, PowerError):
                failures.append((member, answer))
                continue
            ids = checked_ids(answer, member.limit, vocab_size)
            kept = member.sequence.width.trim(ids, checked_confidences(answer, len(ids)), beside)
            member.proposal = ids[:kept]
            answered.append((member, answer))
    _share([member for member, _ in answered], room)
    for member, answer in answered:
        member.sequence.counts.dropped += len(answer.token_ids) - len(member.proposal)
    return failures


def _by_draft(members: Iterable[Member]) -> Iterator[tuple[OpenDraft, list[Member]]]:
    """Each draft with those that want a proposal of it."""
    groups: dict[str, tuple[OpenDraft, list[Member]]] = {}
    for member in members:
        draft = member.sequence.draft
        if draft is not None and member.limit:
            groups.setdefault(draft.name, (draft, []))[1].append(member)
    return iter(groups.values())


def _ask(draft: OpenDraft, group: Seq[Member], costs: CostModel) -> list[Proposal | PowerError]:
    requests = [DraftRequest(s.seq, s.tokens[-1], m.limit, s.width.stop_below) for m in group for s in [m.sequence]]
    started = time.perf_counter()
    answers = draft.propose(requests, [member.rewind_draft for member in group])
    each = (time.perf_counter() - started) / len(group)
    given = [answer for answer in answers if isinstance(answer, Proposal)]
    if len(given) == len(group):  # what a failure takes says nothing
        for member, answer in zip(group, given, strict=True):
            tokens = draft.needs.timed_tokens(member.limit, len(answer.token_ids))
            costs.observe_draft(draft.name, tokens, each)
    return answers


def _share(members: Seq[Member], room: int) -> None:
    """Cut proposals to *room* rows in all."""
    wanted = [len(member.proposal) for member in members]
    given = share_rows(wanted, [member.sequence.width.chances for member in members], room)
    for member, rows in zip(members, given, strict=True):
        del member.proposal[rows:]
