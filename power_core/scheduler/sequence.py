"""One admitted request: its state, and the participants its steps commit."""

from __future__ import annotations

import time
from typing import cast

from attrs import frozen

from power_core.decoding import Decoder
from power_core.drafter import HiddenRows
from power_core.errors import BackendError
from power_core.evidence import Timings
from power_core.request import Counts, GenerationRequest
from power_core.sampling import Sampler
from power_core.scheduler.admission import Deadline, Ticket
from power_core.scheduler.drafting import OpenDraft
from power_core.scheduler.kept_rows import RowHistory
from power_core.scheduler.policy import RequestWidth
from power_core.target import RowBatch, Rows, TargetSession
from power_core.transaction import Participant, Transaction
from power_core.types import FinishReason, Origin, SeqId, TokenId

__all__ = ["Clock", "Sequence"]


class Clock:
    """When a request passed its marks, in seconds of `time.perf_counter`."""

    __slots__ = ("finished", "first_token", "prefill_s", "submitted")

    def __init__(self) -> None:
        self.submitted = time.perf_counter()
        self.prefill_s = 0.0  # spent in forwards with rows of its prompt
        self.first_token: float | None = None
        self.finished: float | None = None

    def timings(self) -> Timings:
        """What a receipt says of a finished request."""
        finished = time.perf_counter() if self.finished is None else self.finished
        first = self.first_token
        return Timings(
            ttft_s=None if first is None else first - self.submitted,
            prefill_s=self.prefill_s,
            decode_s=0.0 if first is None else finished - first,
            request_s=finished - self.submitted,
        )


class Sequence:
    """
    A request in flight.

    Tokens known but not yet evaluated by the target are *pending*: the prompt at first, one token (the
    anchor) between steps, an accepted prefix again after a rollback deeper than the window.

    Attributes:
        request_id: Number the loop gave it.
        seq: Sequence id in the target session.
        width: The width policy's state of the request.
        guard: Proposal cap after a replay, or None.
        deadline: When it must be done.
        ticket: Its place in the queue, later its sequence.
        held: Tokens, of prompt and output, whose rows the target holds for good.
        cache_key: What its prompt is filed under in the prompt cache, or None.
        keep_at: Prompt lengths, ascending, at which its state is to be kept.
        cancelled: Set from any thread; honoured at the next phase boundary.
        is_open: Whether the target holds the sequence.
        is_lost: A close or a draft's end failed, so that nobody knows what is still held under the sequence id.
    """

    def __init__(
        self,
        request_id: int,
        request: GenerationRequest,
        *,
        seed: int,
        sampler: Sampler,
        decoder: Decoder,
        strategy: str,
        draft_max: int,
        width: RequestWidth,
        deadline: Deadline,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.seed = seed
        self.sampler = sampler
        self.decoder = decoder
        self.strategy = strategy
        self.draft_max = draft_max
        self.width = width
        self.deadline = deadline
        self.ticket: Ticket
        self.held = 0
        self.cache_key: str | None = None
        self.keep_at: list[int] = []
        self.seq: SeqId = -1
        self.draft: OpenDraft | None = None
        self.num_prompt = len(request.prompt)
        self.guard: int | None = None
        self.counts = Counts()
        self.clock = Clock()
        self.origins: list[Origin] = []
        self.texts: list[str] = []
        self.cancelled = False
        self.evaluated_prompt = 0
        self.is_lost = False
        self.is_open = False

    def bind(self, session: TargetSession, draft: OpenDraft | None) -> None:
        """Take the sequence `seq` of *session*; the prompt is handed to the draft."""
        self.open(session)
        self.target = TargetParticipant(self, session)
        self._participants: list[Participant] = [self.target, self.sampler, self.decoder]
        if draft is not None:
            draft.call(draft.session.begin, self.seq, self.request.prompt)
            self.draft = draft
            self.drafting = DraftParticipant(self, draft)
            self._participants.insert(1, self.drafting)

    def release(self, session: TargetSession) -> None:
        """Give back the sequence and the draft state; both are tried whatever the first raises."""
        try:
            if self.draft is not None:
                draft, self.draft = self.draft, None
                draft.call(draft.session.end, self.seq)
        except BaseException:
            self.is_lost = True
            raise
        finally:
            self.close(session)

    def open(self, session: TargetSession) -> None:
        """
        Make the target's sequence usable and empty.

        Raises:
            BackendError: An earlier close failed, or this did.
        """
        if self.is_lost:
            raise BackendError(f"sequence {self.seq} may still be in use", who="scheduler", where="open")
        session.open(self.seq)
        self.is_open = True

    def close(self, session: TargetSession) -> None:
        """Close the sequence if it is open; never twice, for a close that failed may have had its effect."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            session.close(self.seq)
        except BaseException:
            self.is_lost = True
            raise

    @property
    def backlog(self) -> int:
        """Rows whose states the draft must be told of before it can propose."""
        return 0 if self.draft is None else self.draft.backlog(self.seq)

    @property
    def tokens(self) -> list[TokenId]:
        """Prompt and emitted tokens."""
        return self.sampler.history

    @property
    def num_emitted(self) -> int:
        return len(self.sampler.history) - self.num_prompt

    def limit_reached(self, context_size: int) -> FinishReason | None:
        """Whether the token just chosen is the last one that may be."""
        limit = self.request.max_tokens
        if limit is not None and self.num_emitted >= limit:
            return FinishReason.LENGTH
        # The last token of a full context is emitted without ever being evaluated.
        return FinishReason.LENGTH if len(self.tokens) > context_size else None

    def chunk(self, base: int, room: int) -> int:
        """Prompt rows of a chunk from *base* on, at most *room*: no further than where state is to be kept."""
        end = next((place for place in self.keep_at if place > base), self.num_prompt)
        return min(end - base, room)

    def begin_step(self, member: Member) -> None:
        """Open the step's transaction: every participant is checkpointed."""
        self.target.planned = member
        member.transaction = Transaction(self._participants)


class Member:
    """
    A sequence's part in one step.

    Rows of the step, in order: `known` pending tokens, then the proposal. Tokens are chosen from the
    last pending row on, if `samples`.
    """

    __slots__ = (
        "accepted", "base", "chosen", "finish", "known", "limit", "proposal", "recorded", "replayed", "rows", "samples",
        "sequence", "start", "texts", "transaction",
    )  # fmt: skip

    def __init__(self, sequence: Sequence, base: int, known: int, *, samples: bool) -> None:
        self.sequence = sequence
        self.base = base  # positions the target held before the step
        self.known = known
        self.samples = samples
        self.limit = 0  # most proposal rows
        self.proposal: list[TokenId] = []
        self.start = 0  # index of the first row in the step's batch
        self.rows: Rows | None = None
        self.accepted = 0
        self.chosen: list[TokenId] = []
        self.texts: list[str] = []
        self.finish: FinishReason | None = None
        self.replayed = False  # whether the commit went back further than the resident window
        self.recorded = False  # whether its tokens are in the outbox
        self.transaction: Transaction

    def rewind_draft(self) -> None:
        """Bring the draft back to where the step opened; the step goes on."""
        drafting = self.sequence.drafting
        drafting.restore(self.transaction.checkpoint_of(drafting))

    def add_rows(self, batch: RowBatch) -> int:
        """Append the member's rows to *batch*; returns how many of them are read back."""
        first, sequence = self.base, self.sequence
        rows = sequence.tokens[first : first + self.known] + self.proposal
        outputs = len(self.proposal) + 1 if self.samples else 0
        self.start = batch.add_chain(sequence.seq, first, rows, outputs)
        return outputs

    def count_pass(self, width: int, elapsed: float) -> None:
        """Count a forward of *width* rows that the member took part in; *elapsed* in seconds."""
        counts = self.sequence.counts
        if self.base < self.sequence.num_prompt:
            self.sequence.clock.prefill_s += elapsed
        counts.target_passes += 1
        counts.widths[width] = counts.widths.get(width, 0) + 1
        if not self.samples:
            counts.prefill_passes += 1
            return
        counts.rounds += 1
        counts.proposals += bool(self.proposal)
        counts.drafted += len(self.proposal)

    @property
    def kept(self) -> int:
        """Rows of the step that stay in the target."""
        return self.known + self.accepted


@frozen
class _Mark:
    """A participant's checkpoint: how far it had got, and what the plugin retained."""

    position: int
    retained: object


class TargetParticipant:
    """The target's rows of one sequence."""

    def __init__(self, sequence: Sequence, session: TargetSession) -> None:
        self._sequence = sequence
        self._session = session
        self.planned: Member

    def checkpoint(self) -> object:
        member = self.planned
        return _Mark(member.base, self._session.checkpoint(self._sequence.seq, member.known + member.limit))

    def commit(self, n: int) -> None:
        """Cut the rejected rows off; deeper than the window, go back and leave the kept rows pending."""
        seq, member, session = self._sequence.seq, self.planned, self._session
        rejected = len(member.proposal) - member.accepted
        if member.finish is not None or rejected == 0:
            return  # nothing to cut, or the sequence is about to be closed
        if session.can_truncate(seq, member.base + n):
            session.truncate(seq, member.base + n)
            return
        self._rewind(member.transaction.checkpoint_of(self))
        self._sequence.counts.replays += 1
        member.replayed = True
        # R5: after one exact replay the request proposes no more than the window holds.
        self._sequence.guard = session.rollback_capacity or 0

    def restore(self, checkpoint: object) -> None:
        if not self._sequence.is_open:  # the commit broke off between closing it and opening it again
            self._sequence.open(self._session)
        elif self._session.length(self._sequence.seq) != cast("_Mark", checkpoint).position:
            self._rewind(checkpoint)

    def _rewind(self, checkpoint: object) -> None:
        seq, session = self._sequence.seq, self._session
        retained = cast("_Mark", checkpoint).retained
        if session.can_restore(seq, retained):
            session.restore(seq, retained)
            return
        # No exact way back: start over. The tokens are all known, so they become pending again.
        self._sequence.close(session)
        self._sequence.open(session)
        self._sequence.counts.rebuilds += 1


class DraftParticipant:
    """
    The draft's state of one sequence.

    Attributes:
        history: What it was told of, where that may be kept with the prompt; else None.
    """

    def __init__(self, sequence: Sequence, draft: OpenDraft) -> None:
        self._sequence = sequence
        self._draft = draft
        self._observed = 0  # target rows the draft has seen
        self.history: RowHistory | None = None

    def tell_reused(self, rows: HiddenRows) -> None:
        """Tell the draft, which has begun and knows of no row yet, of the last rows that a hit brought."""
        self._observed = rows.position + rows.count
        self._draft.call(self._draft.session.observe, self._sequence.seq, (), rows)

    def checkpoint(self) -> object:
        return _Mark(self._observed, self._draft.call(self._draft.session.checkpoint, self._sequence.seq))

    def commit(self, n: int) -> None:
        """Tell the draft what was committed; rows evaluated again after a replay are not told twice."""
        member = self._sequence.target.planned
        rows: HiddenRows | None = None
        end = member.base + n
        if self._draft.needs.hidden_layers and member.rows is not None and end > self._observed:
            skip = max(self._observed - member.base, 0)
            rows = HiddenRows(member.rows, member.start + skip, n - skip, member.base + skip)
            if self.history is not None:
                rows = self.history.add(rows)
        self._observed = max(end, self._observed)
        if member.chosen or rows is not None:
            self._draft.call(self._draft.session.observe, self._sequence.seq, member.chosen, rows)

    def restore(self, checkpoint: object) -> None:
        mark = cast("_Mark", checkpoint)
        self._observed = mark.position
        if self.history is not None:
            self.history.cut(mark.position)
        self._draft.call(self._draft.session.restore, self._sequence.seq, mark.retained)
