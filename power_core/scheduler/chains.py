"""
Strategy chains: several drafters for one request, and each round the proposal that promises the most.

A chain is itself a drafter, so nothing around it knows. Members are asked in the order given; a later
one only where it may beat what is already on the table by more than asking it costs. Each member is
judged by a table of its own, which also learns from proposals that were not used. What the chain hands on
are these calibrated chances, since two members' own confidences are not on one scale.

A member that promises too little is asked now and then all the same, as it may have become better: once the
tokens committed since have paid for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from attrs import define, evolve, field, frozen

from power_core.drafter import Drafter, DrafterRequirements, DraftRequest, DraftSession, HiddenRows, Proposal
from power_core.errors import ConfigError, DrafterError
from power_core.scheduler.acceptance import AcceptanceTable
from power_core.scheduler.backlog import backlog_of, catch_up
from power_core.scheduler.costs import CostCurve, CostModel
from power_core.target import TargetModel, TargetSession
from power_core.types import AUTO, OFF, SeqId, TokenId

__all__ = ["SEPARATOR", "ChainDrafter", "chain_names"]

SEPARATOR = ","
_WORTH_STEP = 0.2  # of each proposal in the running mean of what a member's are worth
_PRIOR = (0.6,) * 16  # chance of each token, for what a member is worth before it was asked
_BUDGET = 0.006  # plain steps a committed token puts aside for asking a member that promises too little
_MOST_SAVED = 6.0  # plain steps
_FREE = 0.008  # plain steps: a member that costs no more is always asked


def chain_names(spec: str) -> tuple[str, ...]:
    """
    The strategies of a chain; one name is a chain of one.

    >>> chain_names("suffix, dspark")
    ('suffix', 'dspark')

    Raises:
        ConfigError: A name is missing or comes twice, or stands for no one strategy.
    """
    names = tuple(name.strip() for name in spec.split(SEPARATOR))
    alone = {AUTO, OFF} if len(names) > 1 else set()
    if not all(names) or len(set(names)) != len(names) or alone & set(names):
        raise ConfigError(
            f"{spec!r} is no chain of strategies", who="chain", where="--spec", got=spec,
            expected="names of strategies separated by commas, each once; auto and off stand alone",
        )  # fmt: skip
    return names


class ChainDrafter:
    """
    Drafts with the best of several strategies.

    Args:
        members: Name -> drafter, in the order they are asked; cheap ones first.
        costs: The session's costs; also told what each member takes.
        clock: Seconds, for timing members.
    """

    def __init__(
        self, members: Mapping[str, Drafter], costs: CostModel, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._members = dict(members)
        self._costs = costs
        self._clock = clock

    def requirements(self) -> DrafterRequirements:
        needs = [drafter.requirements() for drafter in self._members.values()]
        return DrafterRequirements(
            capabilities=frozenset().union(*(need.capabilities for need in needs)),
            hidden_layers=tuple(sorted({layer for need in needs for layer in need.hidden_layers})),
            fixed_shape=any(need.fixed_shape for need in needs),
        )

    def open(self, model: TargetModel, session: TargetSession) -> DraftSession:
        opened: list[_Member] = []
        try:
            for name, drafter in self._members.items():
                opened.append(_Member(name, drafter.open(model, session), drafter.requirements()))
        except BaseException:
            for member in opened:
                member.session.close()
            raise
        return _ChainSession(opened, self._costs, self._clock)


@frozen
class _Member:
    name: str
    session: DraftSession
    needs: DrafterRequirements


@define
class _Record:
    """What is known of one member in one request."""

    worth: float  # running mean of what its proposals promise, in plain steps
    saved: float = 0.0  # plain steps put aside for asking it
    reach: float = 2.0  # running mean of the tokens it proposes
    is_fed: bool = False  # whether it was asked, and so told of the prompt
    table: AcceptanceTable = field(factory=AcceptanceTable)
    ids: Sequence[TokenId] = ()
    cells: Sequence[int] = ()


class _ChainSession:
    def __init__(self, members: Sequence[_Member], costs: CostModel, clock: Callable[[], float]) -> None:
        self._members = members
        self._costs = costs
        self._clock = clock
        self._records: dict[SeqId, list[_Record]] = {}

    def begin(self, seq: SeqId, tokens: Sequence[TokenId]) -> None:
        begun: list[_Member] = []
        try:
            for member in self._members:
                member.session.begin(seq, tokens)
                begun.append(member)
        except BaseException:
            for member in begun:
                member.session.end(seq)
            raise
        worth = _promise(_PRIOR, self._costs.curve)
        self._records[seq] = [_Record(worth) for _ in self._members]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        curve = self._costs.curve
        best = [Proposal()] * len(requests)
        gains = [0.0] * len(requests)
        for place, member in enumerate(self._members):
            asked = [i for i, request in enumerate(requests) if self._is_worth_asking(place, request, gains[i], curve)]
            if not asked:
                continue
            answers = self._ask(member, [requests[i] for i in asked], curve)
            for i, answer in zip(asked, answers, strict=True):
                offer, gain = self._judge(self._records[requests[i].seq][place], answer, curve)
                if gain > gains[i] or not best[i].token_ids:
                    best[i], gains[i] = offer, gain
        return best

    def observe(self, seq: SeqId, committed: Sequence[TokenId], rows: HiddenRows | None) -> None:
        for member, record in zip(self._members, self._records[seq], strict=True):
            own = rows if member.needs.hidden_layers else None
            if committed or own is not None:
                member.session.observe(seq, committed, own)
            if committed:
                record.table.learn(record.ids, record.cells, committed)
                record.ids, record.cells = (), ()
                record.saved = min(record.saved + _BUDGET * len(committed), _MOST_SAVED)

    def checkpoint(self, seq: SeqId) -> object:
        return [member.session.checkpoint(seq) for member in self._members]

    def restore(self, seq: SeqId, checkpoint: object) -> None:
        if not isinstance(checkpoint, list):
            raise DrafterError(f"{checkpoint!r:.40} is no checkpoint of a chain", who="chain", got=checkpoint)
        for record in self._records[seq]:
            record.ids, record.cells = (), ()
        self._each(lambda place, member: member.session.restore(seq, checkpoint[place]))

    def end(self, seq: SeqId) -> None:
        self._records.pop(seq, None)
        self._each(lambda _place, member: member.session.end(seq))

    def close(self) -> None:
        self._records.clear()
        self._each(lambda _place, member: member.session.close())

    def _each(self, call: Callable[[int, _Member], None]) -> None:
        """Call for every member, whatever one of them raises; then raise the first failure."""
        failure: Exception | None = None
        for place, member in enumerate(self._members):
            try:
                call(place, member)
            except Exception as exc:  # noqa: BLE001 - a plugin may raise anything; the others must be told too
                failure = failure or exc
        if failure is not None:
            raise failure

    # -- choosing ---------------------------------------------------------------------------------

    def _is_worth_asking(self, place: int, request: DraftRequest, gain: float, curve: CostCurve) -> bool:
        record, member = self._records[request.seq][place], self._members[place]
        tokens = min(max(round(record.reach), 1), request.max_tokens) if member.needs.sequential else request.max_tokens
        cost = curve.draft(member.name, tokens)
        feed = curve.feed(member.name, backlog_of(member.session, request.seq))
        is_worth = place == 0 or cost <= _FREE or record.worth - gain > cost + (feed if record.is_fed else 0.0)
        if not is_worth and record.saved >= cost + feed:
            record.saved -= cost + feed
            is_worth = True
        record.is_fed |= is_worth
        return is_worth

    def _ask(self, member: _Member, requests: Sequence[DraftRequest], curve: CostCurve) -> Sequence[Proposal]:
        for request in requests:
            catch_up(member.session, request.seq, member.name, self._costs, self._clock)
        if member.needs.sequential:
            requests = [evolve(r, stop_below=curve.stop_below(member.name, r.max_tokens)) for r in requests]
        started = self._clock()
        answers = member.session.propose(requests)
        seconds = (self._clock() - started) / len(requests)
        for request, answer in zip(requests, answers, strict=True):
            tokens = member.needs.timed_tokens(request.max_tokens, len(answer.token_ids))
            self._costs.observe_draft(member.name, tokens, seconds)
        return answers

    def _judge(self, record: _Record, answer: Proposal, curve: CostCurve) -> tuple[Proposal, float]:
        """The proposal with calibrated chances, and the plain steps it promises to save."""
        ids = answer.token_ids
        record.reach += _WORTH_STEP * (len(ids) - record.reach)
        record.ids, record.cells = ids, record.table.cells(len(ids), answer.confidences)
        chances = [record.table.chance(cell) for cell in record.cells]
        gain = _promise(chances, curve)
        record.worth += _WORTH_STEP * (gain - record.worth)
        return Proposal(ids, chances if len(ids) else None), gain


def _promise(chances: Sequence[float], curve: CostCurve) -> float:
    """The plain steps that a proposal whose tokens have these *chances* saves, cut where that is most."""
    gain, expected, survives, base = 0.0, 0.0, 1.0, curve.step(1)
    for length, chance in enumerate(chances, 1):
        survives *= chance
        expected += survives
        gain = max(gain, expected - (curve.step(1 + length) - base))
    return gain
