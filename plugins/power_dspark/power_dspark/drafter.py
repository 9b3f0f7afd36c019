"""
The strategy `dspark`: when target features go in, how long a proposal is, where it is cut.

DSpark (DeepSpec, "DSpark_paper.pdf" in github.com/deepseek-ai/DeepSpec): a block [anchor, mask, ...] is denoised in
one pass beside the injected target features; row j then chooses x_j = argmax(U h_j + W2 W1[x_(j-1)]), and a
confidence head scores c_j = sigmoid(w [h_j; W1[x_(j-1)]] + b), its estimate that x_j is accepted given that
x_1 .. x_(j-1) were. The proposal ends before the first token that a cut refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, frozen

from power_core.artifacts import TensorFile
from power_core.drafter import DrafterRequirements, DraftRequest, DraftSession, HiddenRows, Proposal
from power_core.errors import DrafterError
from power_core.target import TargetModel, TargetSession
from power_core.types import Capability, SeqId, TokenId
from power_dspark.artifact import KIND, read_header
from power_dspark.choice import open_executor
from power_dspark.config import DsparkConfig
from power_dspark.executor import Drafted, Executor, Round
from power_dspark.header import Header

__all__ = ["DsparkDrafter", "DsparkSession"]


class DsparkDrafter:
    """
    Drafts with one admitted file.

    Args:
        config: Options of the strategy.
        file: A file that the contract `dspark` has passed.
    """

    def __init__(self, config: DsparkConfig, file: TensorFile) -> None:
        self._config = config
        self._file = file
        self._header = read_header(file)

    def requirements(self) -> DrafterRequirements:
        needed = {Capability.HIDDEN_STATES}
        if self._config.executor == "native":
            needed.add(Capability.DRAFT_CONTEXT)
        return DrafterRequirements(frozenset(needed), KIND, self._header.hidden_layers)

    def open(self, model: TargetModel, session: TargetSession) -> DraftSession:
        executor = open_executor(self._config, self._file, self._header, model, session)
        return DsparkSession(self._config, self._header, executor, session.context_size)


@define
class _Sequence:
    """What a sequence is to a drafter that keeps no tokens: its length and its last token."""

    length: int
    last: TokenId


@frozen
class _Checkpoint:
    length: int
    last: TokenId
    end: int | None  # of the injected rows


class DsparkSession:
    """
    Draft state of several sequences.

    Injected rows lie at the positions of the committed tokens but the last, the anchor, which the target has not
    evaluated yet. The block's own rows never outlive `propose`.

    Args:
        config: Options of the strategy.
        header: Of the drafter.
        executor: Evaluates it; the session owns it.
        context_size: Positions a sequence may hold: no block reaches beyond.
    """

    def __init__(self, config: DsparkConfig, header: Header, executor: Executor, context_size: int) -> None:
        self._config = config
        self._context_size = context_size
        self._header = header
        self._executor = executor
        self._sequences: dict[SeqId, _Sequence] = {}
        self._is_closed = False
        # The softmax of a vocabulary row costs more than its argmax by far: only where something reads it.
        self._wants_chances = not header.dims.confidence or config.draft_p_min > 0.0

    def begin(self, seq: SeqId, tokens: Sequence[TokenId]) -> None:
        if self._is_closed:
            raise _misuse(f"sequence {seq} begins after close", seq, "open the drafter again")
        if seq in self._sequences:
            raise _misuse(f"sequence {seq} is already open", seq, "end it before it begins again")
        if len(tokens) == 0:
            raise _misuse(f"sequence {seq} begins without a token", seq, "begin it with its prompt")
        self._executor.open(seq)
        self._sequences[seq] = _Sequence(len(tokens), int(tokens[-1]))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [min(request.max_tokens, self._header.max_drafts) for request in requests]
        # One row count for all that have room: the Markov chain runs through equal blocks.
        wanted = self._header.max_drafts if self._config.full_block else max(drafts, default=0)
        groups: dict[int, dict[int, Round]] = {}  # rows -> index of the request -> its round
        for i, request in enumerate(requests):
            each = self._round(request)
            fitting = (self._header.rows_for(count) for count in (wanted, drafts[i]))
            rows = next((rows for rows in fitting if each.position + rows <= self._context_size), None)
            if rows is not None:
                groups.setdefault(rows, {})[i] = each
        proposals = [Proposal()] * len(requests)
        for rows, rounds in groups.items():
            for i, drafted in zip(rounds, self._draft(list(rounds.values()), rows), strict=True):
                proposals[i] = self._proposal(drafted, drafts[i])
        return proposals

    def _draft(self, rounds: Sequence[Round], rows: int) -> list[Drafted]:
        """Rounds of one row count, as many at a time as the executor takes."""
        most = self._executor.max_sequences
        parts = (rounds[start : start + most] for start in range(0, len(rounds), most))
        return [drafted for part in parts for drafted in self._executor.draft(part, rows, chances=self._wants_chances)]

    def observe(self, seq: SeqId, committed: Sequence[TokenId], rows: HiddenRows | None) -> None:
        sequence = self._get(seq)
        if rows is not None and rows.count:
            self._executor.inject(seq, rows.position, rows.features(self._header.hidden_layers))
        if len(committed):
            sequence.length += len(committed)
            sequence.last = int(committed[-1])

    def checkpoint(self, seq: SeqId) -> object:
        sequence = self._get(seq)
        return _Checkpoint(sequence.length, sequence.last, self._executor.end_position(seq))

    def restore(self, seq: SeqId, checkpoint: object) -> None:
        sequence = self._get(seq)
        if not isinstance(checkpoint, _Checkpoint) or checkpoint.length > sequence.length:
            raise _misuse(f"{checkpoint!r} is no checkpoint of sequence {seq}", checkpoint, "restore what it gave")
        self._executor.truncate(seq, checkpoint.end or 0)
        sequence.length, sequence.last = checkpoint.length, checkpoint.last

    def end(self, seq: SeqId) -> None:
        self._get(seq)
        del self._sequences[seq]
        self._executor.close(seq)

    def close(self) -> None:
        self._sequences.clear()
        if not self._is_closed:
            self._is_closed = True
            self._executor.shutdown()

    def _round(self, request: DraftRequest) -> Round:
        sequence = self._get(request.seq)
        if sequence.last != request.anchor:
            raise _misuse(
                f"the anchor {request.anchor} is not the last committed token of sequence {request.seq}",
                request.anchor, "observe every committed token before the next proposal",
            )  # fmt: skip
        position, end = sequence.length - 1, self._executor.end_position(request.seq)
        if end not in (None, position):
            raise _misuse(
                f"the features of sequence {request.seq} end at {end}, the anchor is at {position}",
                end, "observe every evaluated row before the next proposal",
            )  # fmt: skip
        return Round(request.seq, position, request.anchor)

    def _proposal(self, drafted: Drafted, limit: int) -> Proposal:
        """The chain up to *limit* tokens or the first cut."""
        count, confidences = 0, []
        for confidence, margin, chance in _scores(drafted)[:limit]:
            if margin < self._config.draft_margin or chance < self._config.draft_p_min:
                break
            count += 1
            confidences.append(confidence)
        return Proposal(list(drafted.tokens[:count]), confidences)

    def _get(self, seq: SeqId) -> _Sequence:
        try:
            return self._sequences[seq]
        except KeyError:
            raise _misuse(f"sequence {seq} is not open", seq, "begin it first") from None


def _scores(drafted: Drafted) -> list[tuple[float, float, float]]:
    """Confidence, margin and softmax chance of each token; the head's number is both of the first two."""
    tops = [chance.top for chance in drafted.chances or ()]
    if drafted.confidences is None:
        gaps = [chance.gap for chance in drafted.chances or ()]
        return list(zip(tops, gaps, tops, strict=True))
    heads = list(drafted.confidences)
    return list(zip(heads, heads, tops or [1.0] * len(heads), strict=True))


def _misuse(what: str, got: object, fix: str) -> DrafterError:
    return DrafterError(what, who="strategy 'dspark'", got=got, fix=fix, plugin="dspark")
