"""Drafters that break one rule each: a drafter that copies, which misbehaves in one way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import mul
from typing import Any

from power_core.drafter import DrafterRequirements, DraftRequest, HiddenRows, Proposal
from power_core.errors import DrafterError
from power_core.target import TargetModel, TargetSession

BROKEN: dict[str, Callable[[], Drafter]] = {}


class Session:
    """Copies what followed the last occurrence of the anchor; keeps every rule."""

    def __init__(self, drafter: Drafter, model: TargetModel, target: TargetSession) -> None:
        self.drafter = drafter
        self.model = model
        self.target = target
        self.texts: dict[int, list[int]] = {}

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        self.texts[seq] = list(tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self.draft(request) for request in requests]

    def draft(self, request: DraftRequest) -> Proposal:
        text = self.texts[request.seq]
        before = [i for i in range(len(text) - 1) if text[i] == text[-1]]
        ids = text[before[-1] + 1 :][: request.max_tokens] if before else []
        return Proposal(ids, [0.5] * len(ids))

    def observe(self, seq: int, committed: Sequence[int], rows: HiddenRows | None) -> None:
        self.texts[seq].extend(committed)

    def checkpoint(self, seq: int) -> Any:
        return len(self.texts[seq])

    def restore(self, seq: int, checkpoint: Any) -> None:
        del self.texts[seq][checkpoint:]

    def end(self, seq: int) -> None:
        del self.texts[seq]

    def close(self) -> None:
        self.texts.clear()


class Drafter:
    """Opens sessions of `session_class`."""

    session_class: type[Session] = Session
    needs = DrafterRequirements()

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.begun = 0

    def requirements(self) -> DrafterRequirements:
        return self.needs

    def open(self, model: TargetModel, session: TargetSession) -> Session:
        self.sessions.append(self.session_class(self, model, session))
        return self.sessions[-1]


def breaks(rule_id: str) -> Callable[[type], type]:
    """Register a session class, or a drafter class, as what breaks *rule_id*."""

    def register(cls: type) -> type:
        drafter = cls if issubclass(cls, Drafter) else type("Broken", (Drafter,), {"session_class": cls})
        BROKEN[rule_id] = drafter
        return cls

    return register


@breaks("D-REQUIREMENTS-01")
class LayersUnsaid(Drafter):
    """Reads a block's output without asking for the capability."""

    needs = DrafterRequirements(hidden_layers=(1,))


@breaks("D-BOUNDS-01")
class OneTooMany(Session):
    """Ignores a small bound."""

    def draft(self, request: DraftRequest) -> Proposal:
        wider = DraftRequest(request.seq, request.anchor, 4) if request.max_tokens == 3 else request
        return super().draft(wider)


@breaks("D-VOCABULARY-01")
class ProposesTheTail(Session):
    """Proposes the id just beyond the vocabulary, as drafters with padded tables do."""

    def draft(self, request: DraftRequest) -> Proposal:
        proposal = super().draft(request)
        return proposal if proposal.token_ids else Proposal([self.model.identity.vocab_size])


@breaks("D-CONFIDENCE-01")
class SureOfItself(Session):
    """Gives percentages for chances."""

    def draft(self, request: DraftRequest) -> Proposal:
        ids = super().draft(request).token_ids
        return Proposal(ids, [50.0] * len(ids))


@breaks("D-DETERMINISM-01")
class SessionsDiffer(Drafter):
    """The second session is silent in long texts, as with a random seed."""

    class session_class(Session):  # noqa: N801 - fills the base's slot
        def draft(self, request: DraftRequest) -> Proposal:
            is_second = len(self.drafter.sessions) == 2 and len(self.texts[request.seq]) > 40
            return Proposal() if is_second else super().draft(request)


@breaks("D-FUTURE-01")
class KeepsTheList(Session):
    """Keeps the caller's list instead of a copy, and looks at what was appended."""

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        super().begin(seq, tokens)
        self.given = tokens

    def draft(self, request: DraftRequest) -> Proposal:
        own = super().draft(request)
        ahead = list(self.given[len(self.texts[request.seq]) :][:1])
        return Proposal(ahead) if ahead else own


@breaks("D-ARGS-01")
class SortsRequests(Session):
    """Consumes the list of what was committed."""

    def observe(self, seq: int, committed: Any, rows: HiddenRows | None) -> None:
        super().observe(seq, committed, rows)
        if isinstance(committed, list) and len(self.texts[seq]) == 44:
            committed.clear()


@breaks("D-BATCH-01")
class AnswersTheFirst(Session):
    """Answers three requests with the first one's proposal."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = super().propose(requests)
        return proposals[:1] * 3 if len(requests) == 3 else proposals


@breaks("D-TARGET-01")
class TouchesTheTarget(Session):
    """Takes a checkpoint of the target behind the engine's back."""

    def end(self, seq: int) -> None:
        super().end(seq)
        with suppress(AssertionError):
            self.target.checkpoint(seq, 1)


class LateReaderSession(Session):
    def observe(self, seq: int, committed: Sequence[int], rows: HiddenRows | None) -> None:
        late = getattr(self, "rows", None)
        if late is not None and 44 < len(self.texts[seq]) < 52:
            late.rows.hidden(late.start, 1)
        self.rows = rows
        super().observe(seq, committed, rows)


@breaks("D-ROWS-01")
class LateReader(Drafter):
    """Reads the rows of the step before."""

    session_class = LateReaderSession
    needs = DrafterRequirements(capabilities=frozenset({"hidden-states"}), hidden_layers=(1,))


@breaks("D-PROMPT-01")
class NeedsTwoTokens(Session):
    """Has no answer to a prompt of one token repeated."""

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        if len(tokens) == 20 and len(set(tokens)) == 1:
            raise DrafterError("division by zero", who="broken")
        super().begin(seq, tokens)


@breaks("D-STOP-01")
class Skips(Session):
    """Begins with the second token where it is to stop."""

    def draft(self, request: DraftRequest) -> Proposal:
        proposal = super().draft(request)
        return Proposal(proposal.token_ids[1:], [0.5] * len(proposal.token_ids[1:])) if request.stop_below else proposal


class StoppingSession(Session):
    """Copies token by token, and stops where it is told to."""

    def draft(self, request: DraftRequest) -> Proposal:
        whole = super().draft(request)
        count = self.stop(list(whole.confidences or ()), request.stop_below)
        return Proposal(whole.token_ids[:count], [0.5] * len(whole.token_ids[:count]))

    def stop(self, confidences: list[float], stop_below: float) -> int:
        """How many tokens are proposed."""
        chances = accumulate(confidences, mul)
        return next((i for i, chance in enumerate(chances, 1) if chance < stop_below), len(confidences))


class StoppingDrafter(Drafter):
    """Declares that it does; keeps every rule."""

    session_class = StoppingSession
    needs = DrafterRequirements(sequential=True)


@breaks("D-STOP-02")
class ForgetsToMultiply(StoppingDrafter):
    """Compares each confidence with the bound, not their product."""

    class session_class(StoppingSession):  # noqa: N801 - fills the base's slot
        def stop(self, confidences: list[float], stop_below: float) -> int:
            return next((i for i, chance in enumerate(confidences, 1) if chance < stop_below), len(confidences))


class RestSession(StoppingSession):
    rest: Sequence[int] = ()

    def draft(self, request: DraftRequest) -> Proposal:
        whole, stopped = Session.draft(self, request), super().draft(request)
        rest, self.rest = self.rest, whole.token_ids[len(stopped.token_ids) :]
        return Proposal(rest, [0.5] * len(rest)) if rest and not request.stop_below else stopped

    def restore(self, seq: int, checkpoint: Any) -> None:
        self.rest = ()
        super().restore(seq, checkpoint)


@breaks("D-STOP-03")
class OffersTheRest(StoppingDrafter):
    """Goes on where the draft before was stopped, as if all of it had been accepted."""

    session_class = RestSession


@breaks("D-RESTORE-01")
class RestoreTiresIt(Session):
    """Says nothing after a step that failed before anything was observed."""

    tired = False

    def restore(self, seq: int, checkpoint: Any) -> None:
        self.tired = checkpoint == len(self.texts[seq]) == 15
        super().restore(seq, checkpoint)

    def draft(self, request: DraftRequest) -> Proposal:
        tired, self.tired = self.tired, False
        return Proposal() if tired else super().draft(request)


@breaks("D-RESTORE-02")
class DetoursLeak(Session):
    """Learns from tokens that were taken back, and uses it much later."""

    learned: tuple[int, ...] = ()

    def restore(self, seq: int, checkpoint: Any) -> None:
        self.learned = tuple(self.texts[seq][checkpoint:]) or self.learned
        super().restore(seq, checkpoint)

    def draft(self, request: DraftRequest) -> Proposal:
        is_late = len(self.texts[request.seq]) > 30 and len(self.learned) == 5
        return Proposal(self.learned[: request.max_tokens]) if is_late else super().draft(request)


@breaks("D-RESTORE-03")
class RestoresOnce(Session):
    """Uses a checkpoint up."""

    used: Any = None

    def checkpoint(self, seq: int) -> Any:
        return [super().checkpoint(seq)]

    def restore(self, seq: int, checkpoint: Any) -> None:
        super().restore(seq, checkpoint.pop())


@breaks("D-ISOLATION-01")
class Remembers(Session):
    """Copies from requests that have ended."""

    def end(self, seq: int) -> None:
        self.drafter.remembered = self.texts[seq]
        super().end(seq)

    def draft(self, request: DraftRequest) -> Proposal:
        own = super().draft(request)
        old = getattr(self.drafter, "remembered", [])
        return own if own.token_ids or len(old) != 40 else Proposal(old[: request.max_tokens])


@breaks("D-ISOLATION-02")
class OneIndex(Session):
    """Copies from the sequence beside where it has nothing itself."""

    def draft(self, request: DraftRequest) -> Proposal:
        own = super().draft(request)
        beside = [text for seq, text in self.texts.items() if seq != request.seq and len(text) > 26]
        return own if own.token_ids or not beside else Proposal(beside[0][: request.max_tokens])


@breaks("D-END-01")
class EndsInOrder(Session):
    """Cannot end a sequence whose proposal was not observed."""

    pending = False

    def draft(self, request: DraftRequest) -> Proposal:
        self.pending = len(self.texts[request.seq]) == 11
        return super().draft(request)

    def observe(self, seq: int, committed: Sequence[int], rows: HiddenRows | None) -> None:
        super().observe(seq, committed, rows)
        self.pending = False

    def end(self, seq: int) -> None:
        if self.pending:
            raise DrafterError("a proposal is pending", who="broken")
        super().end(seq)


@breaks("D-END-02")
class RunsOut(Session):
    """Has a slot for two hundred sequences and gives none back."""

    begun = 0

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        self.begun += 1
        if self.begun > 200:
            raise DrafterError("no slot left", who="broken")
        super().begin(seq, tokens)


@breaks("D-CLOSE-01")
class ClosesTheOthers(Session):
    """Closing a session with a text open empties every session of the drafter."""

    def close(self) -> None:
        if len(self.drafter.sessions) == 3:
            for session in self.drafter.sessions:
                session.texts.clear()
        super().close()


@breaks("D-PARITY-01")
class NoTinyVocabulary(Session):
    """Fails where everything repeats."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if self.model.identity.vocab_size == 4 and self.target.context_size == 24:
            raise DrafterError("no hash for so few ids", who="broken")
        return super().propose(requests)


@breaks("D-PARITY-02")
class ThreeAtMost(Session):
    """Has room for three sequences of long prompts."""

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        if len(self.texts) > 2 and len(tokens) > 4:
            raise DrafterError("no room", who="broken")
        super().begin(seq, tokens)


@breaks("D-PARITY-03")
class WearsOut(Session):
    """Fails after five hundred requests over all sessions."""

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        self.drafter.begun += 1
        if self.drafter.begun > 500:
            raise DrafterError("worn out", who="broken")
        super().begin(seq, tokens)


@breaks("D-CONTEXT-01")
class NeedsRoom(Session):
    """Has a buffer as long as the context, and writes one token more."""

    def observe(self, seq: int, committed: Sequence[int], rows: HiddenRows | None) -> None:
        super().observe(seq, committed, rows)
        if len(self.texts[seq]) > self.target.context_size:
            raise DrafterError("buffer full", who="broken")


@breaks("D-CANCEL-01")
class EndsOnlyWhatItDrafted(Session):
    """Leaks a sequence that ends before anything was committed."""

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        if seq in self.texts:
            raise DrafterError("the sequence is open", who="broken")
        super().begin(seq, tokens)
        self.num_prompt = len(tokens)

    def end(self, seq: int) -> None:
        if len(self.texts[seq]) > self.num_prompt:
            super().end(seq)
