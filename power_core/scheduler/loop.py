"""
The step loop: plan -> checkpoint -> propose -> forward -> verify -> commit -> emit.

One forward of the target a step, over the rows of every request that takes part. Plain decoding is
the same step with empty proposals.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

import structlog

from power_core.decoding import Decoder
from power_core.errors import CapabilityError, ConfigError, RequestError
from power_core.request import Event, GenerationRequest
from power_core.sampling import Sampler, resolve_seed
from power_core.scheduler.admission import AdmissionController
from power_core.scheduler.checks import check_request
from power_core.scheduler.costs import CostModel
from power_core.scheduler.drafting import DraftPool, OpenDraft
from power_core.scheduler.outcome import ReceiptFactory, closing_event, token_events, wrapped
from power_core.scheduler.plan import Plan, make_plan
from power_core.scheduler.policy import DraftShape, FixedPolicy, RequestWidth, Round, WidthPolicy
from power_core.scheduler.proposing import propose
from power_core.scheduler.queue import MAX_WAITING, RequestQueue, late
from power_core.scheduler.reuse import PromptReuse
from power_core.scheduler.sequence import Member, Sequence
from power_core.scheduler.verifying import choose
from power_core.shapes import ExactnessLevel
from power_core.target import RowBatch, TargetSession, Tokenizer
from power_core.transaction import Phase
from power_core.types import OFF, Capability, FinishReason, Origin

__all__ = ["StepLoop"]

log = structlog.get_logger("power.loop")
PolicyFactory = Callable[[CostModel], WidthPolicy]


class StepLoop:
    """
    Drives any number of requests through one target session.

    `step` belongs to one thread at a time; `submit` and `cancel` may be called from any.

    Args:
        session: The target's state; the loop opens and closes its sequences.
        tokenizer: The target's tokenizer.
        open_strategy: Opens a strategy by name for this session; asked once for each name.
        default_strategy: For requests that name none.
        draft_max: K for requests that name none.
        prefill_chunk: Most prompt rows of one step; a cancel waits for at most one chunk.
        receipt: Makes the receipt document of a finished request.
        make_policy: Makes the width policy for what steps and drafters cost; by default proposals are of K tokens.
        queue: Where requests wait, shared with other loops; None for one of its own.
        reuse: Keeps and finds the state of prompts; without it a request that asks for that is refused.
        costs: Shared with loops over other sessions of the same kind; None for its own.

    Attributes:
        lost: Sequence ids that may still be in use after a close that failed.
        costs: What steps and drafters cost, learned from every step.
        policy: Decides the widths of requests that are submitted from now on.
    """

    def __init__(
        self,
        session: TargetSession,
        tokenizer: Tokenizer,
        *,
        open_strategy: Callable[[str], OpenDraft],
        default_strategy: str = OFF,
        draft_max: int = 8,
        prefill_chunk: int = 256,
        receipt: ReceiptFactory | None = None,
        make_policy: PolicyFactory = lambda _costs: FixedPolicy(),
        queue: RequestQueue | None = None,
        reuse: PromptReuse | None = None,
        costs: CostModel | None = None,
    ) -> None:
        if session.max_sequences > session.profile.decode.max_rows:
            raise ConfigError(
                f"{session.max_sequences} parallel requests",
                who="scheduler",
                got=session.max_sequences,
                expected=f"at most {session.profile.decode.max_rows}, the rows of one exact step",
                fix="lower parallel",
            )
        self.session = session
        self.tokenizer = tokenizer
        self.drafts = DraftPool(open_strategy)
        self.default_strategy = default_strategy
        self.draft_max = draft_max
        self.prefill_chunk = prefill_chunk
        self.costs = CostModel(session.profile.decode, draft_max) if costs is None else costs
        self.policy = make_policy(self.costs)
        self._owns_queue = queue is None
        self.queue = queue or RequestQueue(
            AdmissionController(max_active=session.max_sequences, max_waiting=MAX_WAITING)
        )
        self.lost = 0
        self.reuse = reuse
        self._receipt = receipt
        self._running: list[Sequence] = []
        self._free = list(range(session.max_sequences))  # a heap: ids in use stay close together
        self._batch = RowBatch(max(session.profile.decode.max_rows, session.profile.prefill.max_rows))
        self._outbox: list[Event] = []  # committed but not yet returned: an interrupt must not lose them
        self._prefilled_last = False
        self.forward_seconds = 0.0  # spent inside the target, for measuring what the loop itself costs

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> int:
        """
        Queue *request*; it joins at the next step with a free sequence.

        Returns:
            Its number.

        Raises:
            RequestError: The request cannot be served: also a full queue or a deadline that has passed.
            CapabilityError: Nobody provides its strategy for this target, or its prompt cannot be kept.
            ConfigError: The width policy cannot drive its strategy.
        """
        check_request(request, self.tokenizer.vocab_size, self.session.context_size)
        if request.prompt_cache_key is not None and self.reuse is None:
            raise _no_reuse(self.session)
        strategy = self.default_strategy if request.spec is None else request.spec
        draft_max = self.draft_max if request.draft_max is None else request.draft_max
        width = self.prepare(strategy, draft_max)  # a missing strategy is the submitter's error, not a step's
        seed = resolve_seed(request.sampling)
        sequence = Sequence(
            self.queue.number(),
            request,
            seed=seed,
            sampler=Sampler(request.sampling, prompt=request.prompt, tokenizer=self.tokenizer, seed=seed),
            decoder=Decoder(self.tokenizer, stop=request.stop, stop_ids=request.stop_ids),
            strategy=strategy,
            draft_max=draft_max,
            width=width,
            deadline=self.queue.deadline(request),
        )
        self.queue.put(sequence)
        return sequence.request_id

    def prepare(self, strategy: str, draft_max: int) -> RequestWidth:
        """
        Open *strategy* where no request has asked for it yet.

        Returns:
            The policy's state for a request of up to *draft_max* proposal tokens a round.

        Raises:
            CapabilityError: Nobody provides the strategy for this target.
            ConfigError: The width policy cannot drive it.
        """
        if strategy == OFF:
            return FixedPolicy().begin(DraftShape(0))
        draft = self.drafts.get(strategy)
        needs = draft.needs
        longest = min(draft_max, self.session.profile.decode.max_rows - 1)  # no step has room for more
        return self.policy.begin(
            DraftShape(
                longest, self.session.rollback_capacity, draft.name, fixed=needs.fixed_shape,
                sequential=needs.sequential,
            )
        )  # fmt: skip

    def cancel(self, request_id: int) -> None:
        """Ask for the end of a request; unknown and finished ones are ignored."""
        self.queue.cancel(request_id)

    @property
    def active(self) -> int:
        """Requests whose end has not been returned by `step`."""
        return len(self.queue) + sum(event.origin is Origin.END for event in self._outbox)

    @property
    def is_idle(self) -> bool:
        """Whether no request has a sequence."""
        return not self._running

    @property
    def has_room(self) -> bool:
        """Whether another request could have a sequence."""
        return bool(self._free)

    def progress(self, request_id: int) -> tuple[int, int]:
        """Prompt tokens evaluated and prompt tokens in all."""
        return self.queue.progress(request_id)

    def close(self) -> None:
        """End every request of this loop without events, and free drafts and sequences."""
        for sequence in list(self._running):
            self.queue.leave(sequence)
            self._release(sequence)
            sequence.ticket.cancel()
        if self._owns_queue:
            self.queue.clear()
        self.drafts.close()

    def end_waiting(self) -> list[Event]:
        """
        End the requests that need no sequence for that: cancelled, too late, empty, or with none left to be had.

        Returns:
            Their events, and those that a step which raised left behind.
        """
        for sequence, reason, error in self.queue.ended():
            self._finish(sequence, reason, error)
        return self._emit()

    # -- one step ---------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """
        Advance every request that can be advanced by one forward of the target.

        Returns:
            Events of what was committed, requests in order of their numbers, tokens in order.

        Raises:
            Exception: Whatever the target raised; every request is as it was before the step, and may be
                stepped again.
        """
        members: list[Member] = []
        try:
            self._admit()
            plan = self._plan()
            if plan is not None:
                members = self._checkpoint(plan.members)
                members = self._propose(members, plan.room)
                if members:
                    self._forward(members, plan)
                    members = self._verify(members)
                    self._commit(members)
        except BaseException:
            self._settle(members)
            raise
        return self._emit()

    def _admit(self) -> None:
        for sequence in [s for s in self._running if s.cancelled or s.deadline.is_past]:
            if sequence.cancelled:
                self._finish(sequence, FinishReason.CANCELLED)
            else:
                self._fail(sequence, late("decoding"))
        for sequence, reason, error in self.queue.ended():
            self._finish(sequence, reason, error)
        while self._free and (waiting := self.queue.take()) is not None:
            self._bind(waiting)

    def _bind(self, sequence: Sequence) -> None:
        self._running.append(sequence)
        sequence.seq = heappop(self._free)
        try:
            draft = None if sequence.strategy == OFF else self.drafts.get(sequence.strategy)
            sequence.bind(self.session, draft)
            if self.reuse is not None:
                self.reuse.begin(sequence)
        except Exception as exc:  # noqa: BLE001 - a backend or plugin may raise anything: the request ends
            self._fail(sequence, exc)
        except BaseException:  # an interrupt: the request waits again
            self._release(sequence)
            self.queue.put_back(sequence)
            raise

    def _plan(self) -> Plan | None:
        plan = make_plan(
            self._running, self.session, prefill_chunk=self.prefill_chunk, prefer_prefill=not self._prefilled_last
        )
        if plan is not None:
            self._prefilled_last = plan.shape is self.session.profile.prefill
        return plan

    def _checkpoint(self, members: Iterable[Member]) -> list[Member]:
        opened = []
        for member in members:
            try:
                member.sequence.begin_step(member)
            except Exception as exc:  # noqa: BLE001 - nothing has changed yet: only this request ends
                self._fail(member.sequence, exc)
            else:
                opened.append(member)
        return opened

    def _propose(self, members: list[Member], room: int) -> list[Member]:
        failures = propose(members, room=room, costs=self.costs, vocab_size=self.tokenizer.vocab_size)
        for member, error in failures:
            self._abandon(member, error)
        failed = {id(member) for member, _ in failures}
        return self._advance((m for m in members if id(m) not in failed), Phase.DRAFTED)

    def _forward(self, members: list[Member], plan: Plan) -> None:
        batch, outputs = self._batch, 0
        batch.clear()
        # Backends compute neighbours together: llama.cpp reads all weights again where an id does not follow the last.
        for member in sorted(members, key=lambda member: member.sequence.seq):
            outputs += member.add_rows(batch)
        started = time.perf_counter()
        rows_out = self.session.forward(batch, plan.shape)
        elapsed = time.perf_counter() - started
        self.forward_seconds += elapsed
        self._count_step(members, rows_out.width)
        is_one_pass = not plan.shape.apart or len(members) == 1 or outputs == len(members)
        # Rows not read back cost less.
        if is_one_pass and outputs == batch.n and plan.shape == self.session.profile.decode:
            self.costs.observe_forward(rows_out.width, elapsed)
        for member in members:
            member.rows = rows_out
            member.count_pass(rows_out.width, elapsed)
            member.transaction.advance(Phase.EVALUATED)

    def _count_step(self, members: Iterable[Member], width: int) -> None:
        totals = self.queue.totals
        totals.steps += 1
        totals.widths[width] = totals.widths.get(width, 0) + 1
        in_prompt = [member.base < member.sequence.num_prompt for member in members]
        totals.prefill_steps += all(in_prompt)
        totals.mixed_steps += any(in_prompt) and not all(in_prompt)

    def _verify(self, members: list[Member]) -> list[Member]:
        verified = []
        for member in self._drop_cancelled(members):
            try:
                if member.samples:
                    choose(member, self.session.context_size)
            except Exception as exc:  # noqa: BLE001 - user processors may raise anything: only this request ends
                self._abandon(member, exc)
            else:
                verified.append(member)
        return self._advance(verified, Phase.VERIFIED)

    def _commit(self, members: list[Member]) -> None:
        for member in self._drop_cancelled(members):
            sequence = member.sequence
            try:
                member.transaction.commit(member.kept)
            except Exception as exc:  # noqa: BLE001 - the participants are restored: only this request ends
                self._fail(sequence, exc)
            else:
                self._record(member)

    def _record(self, member: Member) -> None:
        """Put the chosen tokens of a committed member in the outbox, and end its request where it ends."""
        sequence, counts = member.sequence, member.sequence.counts
        if member.samples:  # first: what an interrupt breaks off here is done again
            self._feed_back(member)
        events = token_events(member)
        member.recorded = True
        self._outbox += events
        sequence.origins += [event.origin for event in events]
        sequence.texts += member.texts
        counts.accepted += member.accepted
        counts.emitted += len(events)
        counts.guard = sequence.guard
        sequence.held = member.base + member.kept
        sequence.evaluated_prompt = min(sequence.held, sequence.num_prompt)
        if events and sequence.clock.first_token is None:
            sequence.clock.first_token = time.perf_counter()
        if self.reuse is not None:
            self.reuse.advance(sequence)
        if member.finish is not None:
            self._finish(sequence, member.finish)

    def _feed_back(self, member: Member) -> None:
        """Tell the width policy what became of its decisions; only now, so that a step undone teaches nothing."""
        width = member.sequence.width
        before = width.mode
        width.feedback(Round(len(member.proposal), member.accepted, member.chosen, member.replayed))
        if width.mode != before:
            log.debug(
                "width policy switched", request=member.sequence.request_id, policy=self.policy.name,
                before=before, after=width.mode,
            )  # fmt: skip

    def _emit(self) -> list[Event]:
        events, self._outbox = self._outbox, []
        return events

    # -- ends -------------------------------------------------------------------------------------

    def _advance(self, members: Iterable[Member], phase: Phase) -> list[Member]:
        advanced = []
        for member in self._drop_cancelled(members):
            member.transaction.advance(phase)
            advanced.append(member)
        return advanced

    def _drop_cancelled(self, members: Iterable[Member]) -> list[Member]:
        kept = []
        for member in members:
            if member.sequence.cancelled:
                self._abandon(member, None)
            else:
                kept.append(member)
        return kept

    def _abandon(self, member: Member, error: BaseException | None) -> None:
        """Undo a member's part of the step, then end its request: with *error*, or as cancelled."""
        try:
            member.transaction.restore()
        except Exception as exc:  # noqa: BLE001 - what could not be restored is released below
            error = error or exc
        if error is None:
            self._finish(member.sequence, FinishReason.CANCELLED)
        else:
            self._fail(member.sequence, error)

    def _settle(self, members: Iterable[Member]) -> None:
        """The step broke off: what is committed is recorded, every other member goes back."""
        for member in members:
            phase = member.transaction.phase
            try:
                if phase == Phase.COMMITTED and not member.recorded:
                    self._record(member)
                elif phase != Phase.COMMITTED:
                    member.transaction.restore()
            except Exception as exc:  # noqa: BLE001 - the others must be settled whatever one of them raises
                self._fail(member.sequence, exc)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        error = wrapped(error)
        # What a request asked for, its caller is told; what failed it, whoever looks after the engine wants to know.
        level = logging.INFO if isinstance(error, RequestError) else logging.WARNING
        log.log(level, "request failed", request=sequence.request_id, error=str(error))
        self._finish(sequence, FinishReason.ERROR, error)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> None:
        """Release a request's state and put its closing event in the outbox."""
        if not self.queue.leave(sequence):
            return
        try:
            if sequence in self._running:
                if self.reuse is not None and error is None:
                    self.reuse.end(sequence)
                self._release(sequence)
        finally:  # whoever waits for the end gets it, an interrupt notwithstanding
            sequence.ticket.cancel()
            self.queue.totals.add(sequence, reason, error)
            self._outbox.append(closing_event(sequence, reason, error, self._receipt))

    def _release(self, sequence: Sequence) -> None:
        """Free what *sequence* holds, and its id unless that may still be in use."""
        self._running.remove(sequence)
        try:
            sequence.release(self.session)
        except Exception as exc:  # noqa: BLE001 - a plugin may raise anything: the request ends all the same
            # The answer is right whatever the clean-up met, so the request does not fail for it.
            log.warning("release failed", request=sequence.request_id, error=str(exc))
        finally:
            if sequence.is_lost:
                self.queue.admission.add_places(-1)
                self.lost += 1
            else:
                heappush(self._free, sequence.seq)


def _no_reuse(session: TargetSession) -> CapabilityError:
    if Capability.PREFIX_REUSE in session.capabilities and session.profile.level is not ExactnessLevel.UNVERIFIED:
        return CapabilityError(
            "no prompt is kept", who="prompt cache", where="prompt_cache_bytes", got=0, expected="more than 0",
            fix="raise it, or leave prompt_cache_key out",
        )  # fmt: skip
    return CapabilityError(
        "this target's state cannot be kept exactly", who="prompt cache", expected="a target with `prefix-reuse`",
        fix="leave prompt_cache_key out",
    )  # fmt: skip
