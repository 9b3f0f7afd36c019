"""The draft session under every scripted drafter: it checks the protocol before it proposes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from attrs import define, frozen

from power_core.drafter import DraftRequest, HiddenRows, Proposal, stop_length
from power_core.testing.faults import Faults, Strict, guarded
from power_core.testing.rows import ScriptedRows
from power_core.types import SeqId, TokenId

__all__ = ["DraftRecord", "EndedSequence", "Propose", "ScriptedDraftSession"]

Propose = Callable[[Sequence[TokenId], int, int], Proposal]
"""(tokens so far, most tokens wanted, round of this sequence) -> proposal."""


@frozen
class DraftRecord:
    """One proposal: what was asked and what was answered."""

    seq: SeqId
    length: int  # tokens of the sequence, the anchor included
    max_tokens: int
    proposal: Proposal


@frozen
class EndedSequence:
    """A sequence that has ended: its prompt, what the target was seen to commit, and how many hidden rows came."""

    seq: SeqId
    prompt: tuple[TokenId, ...]
    committed: tuple[TokenId, ...]
    num_hidden: int


@define
class _Draft:
    """Draft state of one sequence."""

    tokens: list[TokenId]
    num_prompt: int
    epoch: int  # which `begin` this is
    rounds: int = 0
    evaluated: int = 0  # target rows that were observed
    is_checkpointed: bool = False  # since the last change
    has_proposed: bool = False  # and neither observed nor been restored since


@frozen
class _Checkpoint:
    seq: SeqId
    epoch: int
    length: int
    rounds: int
    evaluated: int


class ScriptedDraftSession(Strict):
    """
    A `power_core.drafter.DraftSession` that asks a function for its proposals.

    Args:
        propose: The function.
        layers: Target blocks whose states `observe` must bring; read as soon as they arrive.
        sequential: Whether to heed `DraftRequest.stop_below`.
        faults: Where to fail on purpose. A failed `begin`, `propose` or `checkpoint` has no effect.

    Attributes:
        history: Every proposal made, in order.
        ended: Every sequence that has ended, in order.
        is_closed: Whether `close` was called.
    """

    def __init__(
        self,
        propose: Propose,
        *,
        layers: Collection[int] = (),
        sequential: bool = False,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(faults)
        self.history: list[DraftRecord] = []
        self.ended: list[EndedSequence] = []
        self.is_closed = False
        self._propose = propose
        self._layers = tuple(layers)
        self._is_sequential = sequential
        self._drafts: dict[SeqId, _Draft] = {}
        self._begun = 0

    def begin(self, seq: SeqId, tokens: Sequence[TokenId]) -> None:
        with self.exclusive("begin"):
            self.require(not self.is_closed, "begin was called after close")
            self.require(seq not in self._drafts, f"sequence {seq} was begun twice")
            self.require(len(tokens) > 0, f"sequence {seq} was begun without a token")
            self.faults.leave("begin")
            self._begun += 1
            self._drafts[seq] = _Draft(list(tokens), len(tokens), self._begun)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        with self.exclusive("propose"):
            self.require(len(requests) > 0, "propose was called without a request")
            seqs = [request.seq for request in requests]
            self.require(len(set(seqs)) == len(seqs), f"propose was asked twice for one sequence: {seqs}")
            proposals = [self._answer(request) for request in requests]
            self.faults.leave("propose")
            for request, proposal in zip(requests, proposals, strict=True):
                draft = self._drafts[request.seq]
                draft.rounds += 1
                draft.has_proposed = True
                draft.is_checkpointed = False
                self.history.append(DraftRecord(request.seq, len(draft.tokens), request.max_tokens, proposal))
            return proposals

    def _answer(self, request: DraftRequest) -> Proposal:
        draft = self._draft(request.seq)
        where = f"propose for sequence {request.seq}"
        self.require(draft.is_checkpointed, f"{where} without a checkpoint")
        self.require(not draft.has_proposed, f"{where} although the last proposal was neither observed nor restored")
        last = draft.tokens[-1]
        self.require(request.anchor == last, f"{where} with anchor {request.anchor}, the last committed is {last}")
        self.require(request.max_tokens >= 1, f"{where} for {request.max_tokens} tokens")
        proposal = self._propose(draft.tokens, request.max_tokens, draft.rounds)
        return _stopped(proposal, request.stop_below) if self._is_sequential else proposal

    @guarded
    def observe(self, seq: SeqId, committed: Sequence[TokenId], rows: HiddenRows | None) -> None:
        draft = self._draft(seq)
        self.require(len(committed) > 0 or rows is not None, f"observe for sequence {seq} brings nothing")
        if self._layers:
            self._read(seq, draft, rows)
        else:
            self.require(rows is None, "observe brought hidden rows that the requirements do not name")
        draft.tokens.extend(committed)
        draft.has_proposed = draft.is_checkpointed = False

    def _read(self, seq: SeqId, draft: _Draft, rows: HiddenRows | None) -> None:
        """
        Read every row that was brought: the positions of a sequence must come once each, in order.

        The first of all may be above 0: rows before it came out of a prompt cache.
        """
        if rows is None:
            return
        self.require(rows.count >= 1, f"observe for sequence {seq} brought {rows.count} hidden rows")
        if draft.evaluated == 0:
            draft.evaluated = rows.position
        for i in range(rows.start, rows.start + rows.count):
            for layer in self._layers:
                rows.rows.hidden(i, layer)
            if isinstance(rows.rows, ScriptedRows):
                at = rows.rows.position(i)
                self.require(at == draft.evaluated, f"sequence {seq}: row {at} came, row {draft.evaluated} was due")
            draft.evaluated += 1

    def checkpoint(self, seq: SeqId) -> object:
        with self.exclusive("checkpoint"):
            draft = self._draft(seq)
            self.require(not draft.has_proposed, f"checkpoint of sequence {seq} between propose and observe")
            self.faults.leave("checkpoint")
            draft.is_checkpointed = True
            return _Checkpoint(seq, draft.epoch, len(draft.tokens), draft.rounds, draft.evaluated)

    @guarded
    def restore(self, seq: SeqId, checkpoint: object) -> None:
        draft = self._draft(seq)
        if not isinstance(checkpoint, _Checkpoint) or (checkpoint.seq, checkpoint.epoch) != (seq, draft.epoch):
            self.require(False, f"sequence {seq} was restored to a checkpoint that is not its own")
            return
        self.require(checkpoint.length <= len(draft.tokens), f"sequence {seq} was restored to its future")
        del draft.tokens[checkpoint.length :]
        draft.rounds, draft.evaluated = checkpoint.rounds, checkpoint.evaluated
        draft.has_proposed = False
        draft.is_checkpointed = True  # the checkpoint can be restored again

    @guarded
    def end(self, seq: SeqId) -> None:
        draft = self._draft(seq)
        prompt, committed = draft.tokens[: draft.num_prompt], draft.tokens[draft.num_prompt :]
        self.ended.append(EndedSequence(seq, tuple(prompt), tuple(committed), draft.evaluated))
        del self._drafts[seq]

    @guarded
    def close(self) -> None:
        self.is_closed = True
        self._drafts.clear()

    def assert_all_ended(self) -> None:
        """Raise `ProtocolViolation` if a sequence was not ended, or a rule was broken earlier."""
        self.assert_clean()
        self.require(not self._drafts, f"sequences {sorted(self._drafts)} were begun and never ended")

    def _draft(self, seq: SeqId) -> _Draft:
        self.require(not self.is_closed, "the draft session was used after close")
        self.require(seq in self._drafts, f"sequence {seq} has not begun")
        return self._drafts[seq]


def _stopped(proposal: Proposal, stop_below: float) -> Proposal:
    """*proposal* up to the first token at which the product of its confidences is below *stop_below*."""
    if not proposal.confidences:
        return proposal
    count = stop_length(proposal.confidences, stop_below)
    if count == len(proposal.confidences):
        return proposal
    return Proposal(proposal.token_ids[:count], proposal.confidences[:count])
