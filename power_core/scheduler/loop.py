"""
The step loop: plan -> checkpoint -> propose -> forward -> verify -> commit -> emit.

One forward of the target a step, over the rows of every request that takes part. Plain decoding is
the same step with empty proposals.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import structlog
from attrs import evolve

from power_core.decoding import Decoder
from power_core.drafter import DraftRequest
from power_core.errors import BackendError, ConfigError, PowerError, RequestError
from power_core.request import Event, GenerationRequest, Result, TokenLogprobs, Usage
from power_core.sampling import Sampler, resolve_seed
from power_core.scheduler.drafting import DraftPool, OpenDraft, checked_ids
from power_core.scheduler.plan import Plan, make_plan
from power_core.scheduler.sequence import Member, Sequence
from power_core.target import RowBatch, Rows, TargetSession, Tokenizer
from power_core.transaction import Phase
from power_core.types import FinishReason, Origin

__all__ = ["StepLoop"]

log = structlog.get_logger("power.loop")
OFF = "off"
ReceiptFactory = Callable[[Sequence, Result], Mapping[str, Any]]


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
        self._receipt = receipt
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}
        self._free = list(range(session.max_sequences))[::-1]
        self._batch = RowBatch(max(session.profile.decode.max_rows, session.profile.prefill.max_rows))
        self._outbox: list[Event] = []  # committed but not yet returned: an interrupt must not lose them
        self._next_id = 0
        self._prefilled_last = False
        self.forward_seconds = 0.0  # spent inside the target, for measuring what the loop itself costs

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> int:
        """
        Queue *request*; it joins at the next step with a free sequence.

        Returns:
            Its number.

        Raises:
            RequestError: The request cannot be served.
            CapabilityError: Nobody provides its strategy for this target.
        """
        self._check(request)
        strategy = self.default_strategy if request.spec is None else request.spec
        if strategy != OFF:
            self.drafts.get(strategy)  # a missing strategy is the submitter's error, not a step's
        seed = resolve_seed(request.sampling)
        sequence = Sequence(
            self._next_id,
            request,
            seed=seed,
            sampler=Sampler(request.sampling, prompt=request.prompt, tokenizer=self.tokenizer, seed=seed),
            decoder=Decoder(self.tokenizer, stop=request.stop, stop_ids=request.stop_ids),
            strategy=strategy,
            draft_max=self.draft_max if request.draft_max is None else request.draft_max,
        )
        self._next_id += 1
        self._by_id[sequence.request_id] = sequence
        self._waiting.append(sequence)
        return sequence.request_id

    def cancel(self, request_id: int) -> None:
        """Ask for the end of a request; unknown and finished ones are ignored."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            sequence.cancelled = True

    @property
    def active(self) -> int:
        """Requests whose end has not been returned by `step`."""
        return len(self._by_id) + sum(event.origin is Origin.END for event in self._outbox)

    def progress(self, request_id: int) -> tuple[int, int]:
        """Prompt tokens evaluated and prompt tokens in all."""
        sequence = self._by_id.get(request_id)
        return (sequence.evaluated_prompt, sequence.num_prompt) if sequence else (0, 0)

    def close(self) -> None:
        """End every request without events, and free drafts and sequences."""
        for sequence in list(self._running):
            self._release(sequence)
        self._waiting.clear()
        self._by_id.clear()
        self.drafts.close()

    def _check(self, request: GenerationRequest) -> None:
        who, vocab = "request", self.tokenizer.vocab_size
        if not isinstance(request, GenerationRequest):
            raise RequestError(f"{request!r:.80} was submitted", who=who, got=request, expected="a GenerationRequest")
        if not request.prompt:
            raise RequestError("the prompt is empty", who=who, expected="at least one token")
        bad = next((token for token in request.prompt if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError(f"prompt token {bad} is no token id", who=who, got=bad, expected=f"0 to {vocab - 1}")
        if len(request.prompt) > self.session.context_size:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens",
                who=who,
                got=len(request.prompt),
                expected=f"at most {self.session.context_size}",
                fix="shorten it or raise --ctx",
            )

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
                members = self._propose(members)
                if members:
                    self._forward(members, plan)
                    members = self._verify(members)
                    self._commit(members)
        except BaseException:
            self._settle(members)
            raise
        return self._emit()

    def _admit(self) -> None:
        for sequence in [s for s in (*self._running, *self._waiting) if s.cancelled]:
            self._finish(sequence, FinishReason.CANCELLED)
        while self._waiting and (self._free or self._waiting[0].request.max_tokens == 0):
            sequence = self._waiting[0]
            if sequence.request.max_tokens == 0:
                self._finish(sequence, FinishReason.LENGTH)
                continue
            self._bind(sequence)
        if self._waiting and not self._running and not self._free:
            self._fail(self._waiting[0], _no_sequence_left())

    def _bind(self, sequence: Sequence) -> None:
        draft = None if sequence.strategy == OFF else self.drafts.get(sequence.strategy)
        self._waiting.popleft()
        self._running.append(sequence)
        try:
            sequence.bind(self.session, self._free.pop(), draft)
        except Exception as exc:  # noqa: BLE001 - a backend or plugin may raise anything: the request ends
            self._fail(sequence, exc)
        except BaseException:  # an interrupt: the request waits again
            self._release(sequence)
            self._waiting.appendleft(sequence)
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

    def _propose(self, members: list[Member]) -> list[Member]:
        groups: dict[str, tuple[OpenDraft, list[Member]]] = {}
        for member in members:
            draft = member.sequence.draft
            if draft is not None and member.limit:
                groups.setdefault(draft.name, (draft, []))[1].append(member)
        failed: set[int] = set()
        for draft, group in groups.values():
            requests = [DraftRequest(m.sequence.seq, m.sequence.tokens[-1], m.limit) for m in group]
            answers = draft.propose(requests, [member.rewind_draft for member in group])
            for member, answer in zip(group, answers, strict=True):
                if isinstance(answer, PowerError):
                    self._abandon(member, answer)
                    failed.add(id(member))
                    continue
                member.proposal = checked_ids(answer, member.limit, self.tokenizer.vocab_size)
                member.sequence.counts.dropped += len(answer.token_ids) - len(member.proposal)
        return self._advance((m for m in members if id(m) not in failed), Phase.DRAFTED)

    def _forward(self, members: list[Member], plan: Plan) -> None:
        batch = self._batch
        batch.clear()
        for member in members:
            tokens, base = member.sequence.tokens, member.base
            rows = tokens[base : base + member.known] + member.proposal
            outputs = len(member.proposal) + 1 if member.samples else 0
            member.start = batch.add_chain(member.sequence.seq, base, rows, outputs)
        started = time.perf_counter()
        rows_out = self.session.forward(batch, plan.shape)
        elapsed = time.perf_counter() - started
        self.forward_seconds += elapsed
        for member in members:
            member.rows = rows_out
            self._count_pass(member, rows_out, elapsed)
            member.transaction.advance(Phase.EVALUATED)

    def _count_pass(self, member: Member, rows: Rows, elapsed: float) -> None:
        counts = member.sequence.counts
        if member.base < member.sequence.num_prompt:
            member.sequence.clock.prefill_s += elapsed
        counts.target_passes += 1
        counts.widths[rows.width] = counts.widths.get(rows.width, 0) + 1
        if not member.samples:
            counts.prefill_passes += 1
            return
        counts.rounds += 1
        counts.proposals += bool(member.proposal)
        counts.drafted += len(member.proposal)

    def _verify(self, members: list[Member]) -> list[Member]:
        verified = []
        for member in self._drop_cancelled(members):
            try:
                if member.samples:
                    self._choose(member)
            except Exception as exc:  # noqa: BLE001 - user processors may raise anything: only this request ends
                self._abandon(member, exc)
            else:
                verified.append(member)
        return self._advance(verified, Phase.VERIFIED)

    def _choose(self, member: Member) -> None:
        """Sample rows in order up to the first mismatch, or to where plain decoding would have ended."""
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
                member.finish = sequence.limit_reached(self.session.context_size)
            if member.finish is not None or not matches:
                return

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
        first = len(sequence.origins)
        origins = [_origin(member, offset) for offset in range(len(member.chosen))]
        entries: Seq[TokenLogprobs | None] = sequence.sampler.logprobs()[first:] or [None] * len(origins)
        events = [
            Event(sequence.request_id, text, token, origin, first + offset, entry)
            for offset, (token, text, origin, entry) in enumerate(
                zip(member.chosen, member.texts, origins, entries, strict=True)
            )
        ]
        member.recorded = True
        self._outbox += events
        sequence.origins += origins
        sequence.texts += member.texts
        counts.accepted += member.accepted
        counts.emitted += len(origins)
        counts.guard = sequence.guard
        sequence.evaluated_prompt = min(member.base + member.kept, sequence.num_prompt)
        if origins and sequence.clock.first_token is None:
            sequence.clock.first_token = time.perf_counter()
        if member.finish is not None:
            self._finish(sequence, member.finish)

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
        if not isinstance(error, PowerError):
            error = _wrap(error)
        log.warning("request failed", request=sequence.request_id, error=str(error))
        self._finish(sequence, FinishReason.ERROR, error)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: BaseException | None = None) -> None:
        """Release a request's state and put its closing event in the outbox."""
        if self._by_id.pop(sequence.request_id, None) is None:
            return
        try:
            if sequence in self._running:
                self._release(sequence)
            else:
                self._waiting.remove(sequence)
        finally:  # whoever waits for the end gets it, an interrupt notwithstanding
            self._outbox.append(self._end(sequence, reason, error))

    def _release(self, sequence: Sequence) -> None:
        """Free what *sequence* holds, and its id unless that may still be in use."""
        self._running.remove(sequence)
        try:
            sequence.release(self.session)
        except Exception as exc:  # noqa: BLE001 - a plugin may raise anything: the request ends all the same
            # The answer is right whatever the clean-up met, so the request does not fail for it.
            log.warning("release failed", request=sequence.request_id, error=str(exc))
        finally:
            if not sequence.is_lost:
                self._free.append(sequence.seq)

    def _end(self, sequence: Sequence, reason: FinishReason, error: BaseException | None) -> Event:
        sequence.clock.finished = time.perf_counter()
        rest = sequence.decoder.flush()
        result = self._result(sequence, reason, rest, error)
        return Event(sequence.request_id, rest, None, Origin.END, len(sequence.origins), None, result)

    def _result(self, sequence: Sequence, reason: FinishReason, rest: str, error: BaseException | None) -> Result:
        ids = tuple(sequence.tokens[sequence.num_prompt :])
        wanted = sequence.request.sampling.logprobs is not None
        result = Result(
            request_id=sequence.request_id,
            text="".join(sequence.texts) + rest,
            token_ids=ids,
            prompt_token_ids=tuple(sequence.request.prompt),
            finish_reason=reason,
            usage=Usage(sequence.num_prompt, len(ids)),
            origins=tuple(sequence.origins),
            logprobs=tuple(sequence.sampler.logprobs()) if wanted else None,
            counts=sequence.counts,
            error=error,
            client_id=sequence.request.client_id,
        )
        if self._receipt is None or error is not None:
            return result
        try:
            return result.with_receipt(self._receipt(sequence, result))
        except Exception as exc:  # noqa: BLE001 - the end must come: a result without a receipt is an error
            return evolve(result, finish_reason=FinishReason.ERROR, error=_wrap(exc))


def _origin(member: Member, offset: int) -> Origin:
    if not member.proposal:
        return Origin.PLAIN
    if offset < member.accepted:
        return Origin.ACCEPTED
    return Origin.BONUS if member.accepted == len(member.proposal) else Origin.CORRECTION


def _no_sequence_left() -> BackendError:
    return BackendError(
        "every sequence of the session was lost to a close that failed", who="scheduler",
        fix="close the engine and open the model again",
    )  # fmt: skip


def _wrap(error: BaseException) -> PowerError:
    wrapped = BackendError(f"{type(error).__name__}: {error}", who="request", got=error)
    wrapped.__cause__ = error
    return wrapped
