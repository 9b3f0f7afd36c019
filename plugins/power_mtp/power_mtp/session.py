"""The draft session of MTP heads: which rows a head has seen, and the recurrent draft."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from power_core.drafter import DraftRequest, HiddenRows, Proposal
from power_core.errors import DrafterError
from power_core.types import SeqId, TokenId
from power_mtp.choice import Choice, choose
from power_mtp.config import MtpConfig
from power_mtp.executor import HeadBlock, HeadExecutor

__all__ = ["MtpSession"]

_FOLD_ROWS = 64  # pending rows from which prompt rows are evaluated at once, so that no proposal waits for them all


@define
class _Sequence:
    """
    One sequence. A head row at position p needs token p and the target's features at p - 1.

    `pending` are features that are in no head row yet, the first of them at position `due`; the executor holds
    the head rows up to and including position `due`, from the one after the first feature on.
    """

    tokens: list[TokenId]
    epoch: int  # which `begin` this is
    due: int = -1  # -1: no feature has come
    pending: tuple[NDArray[np.float32], ...] = ()

    @property
    def known(self) -> int:
        """Position after the last feature."""
        return self.due + sum(map(len, self.pending))


@frozen(eq=False)
class _Checkpoint:
    epoch: int
    length: int
    due: int
    pending: tuple[NDArray[np.float32], ...]


@define
class _Draft:
    """A proposal in the making; at most *limit* tokens."""

    request: DraftRequest
    limit: int
    chance: float = 1.0  # that all tokens so far are accepted, by the head's own account
    token_ids: list[TokenId] = field(factory=list)
    confidences: list[float] = field(factory=list)


class MtpSession:
    """
    Drafts with one head for several sequences.

    Args:
        executor: Computes the head; it is shut down with the session.
        layers: What `HiddenRows.features` is asked for.
        config: Cuts and the reduced projection.
        context_size: Positions a sequence has; no row is put beyond them.
    """

    def __init__(self, executor: HeadExecutor, layers: Sequence[int], config: MtpConfig, context_size: int) -> None:
        self._executor = executor
        self._layers = tuple(layers)
        self._config = config
        self._context_size = context_size
        self._sequences: dict[SeqId, _Sequence] = {}
        self._begun = 0
        self._is_closed = False

    def begin(self, seq: SeqId, tokens: Sequence[TokenId]) -> None:
        if self._is_closed or seq in self._sequences:
            raise _misuse(f"sequence {seq} begins twice or after close", seq, "end it before it begins again")
        self._executor.open(seq)
        self._begun += 1
        self._sequences[seq] = _Sequence([int(token) for token in tokens], self._begun)

    def observe(self, seq: SeqId, committed: Sequence[TokenId], rows: HiddenRows | None) -> None:
        sequence = self._get(seq)
        if rows is not None and rows.count:
            if sequence.due < 0:
                sequence.due = rows.position
            elif rows.position != sequence.known:
                expected = f"rows from position {sequence.known} on"
                raise _misuse(f"hidden rows of position {rows.position} came", rows.position, expected)
            sequence.pending = (*sequence.pending, rows.features(self._layers))
        sequence.tokens.extend(committed)
        if sequence.known - sequence.due >= _FOLD_ROWS:
            self._fold(seq, sequence)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [_Draft(request, self._limit(request)) for request in requests]
        ready = [draft for draft in drafts if draft.limit > 0 and self._is_ready(draft.request.seq)]
        if ready:
            logits = self._executor.start([self._take(draft.request.seq) for draft in ready])
            self._draft(ready, logits)
            for draft in ready:
                self._executor.truncate(draft.request.seq, self._get(draft.request.seq).due + 1)
        return [Proposal(draft.token_ids, draft.confidences) for draft in drafts]

    def checkpoint(self, seq: SeqId) -> object:
        sequence = self._get(seq)
        return _Checkpoint(sequence.epoch, len(sequence.tokens), sequence.due, sequence.pending)

    def restore(self, seq: SeqId, checkpoint: object) -> None:
        sequence = self._get(seq)
        if not isinstance(checkpoint, _Checkpoint) or checkpoint.epoch != sequence.epoch:
            raise _misuse(f"{checkpoint!r:.60} is no checkpoint of sequence {seq}", checkpoint, "restore what it gave")
        del sequence.tokens[checkpoint.length :]
        sequence.due, sequence.pending = checkpoint.due, checkpoint.pending
        self._executor.truncate(seq, sequence.due + 1)

    def end(self, seq: SeqId) -> None:
        self._get(seq)
        del self._sequences[seq]
        self._executor.close(seq)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._sequences.clear()
            self._executor.shutdown()

    def _limit(self, request: DraftRequest) -> int:
        """Most tokens of a draft: the first comes of the anchor's row, each further one of a row behind it."""
        tokens = self._get(request.seq).tokens
        if tokens[-1] != request.anchor:
            raise _misuse(f"the anchor {request.anchor} is not the last token", request.anchor, "observe it first")
        return min(request.max_tokens, self._context_size - len(tokens) + 1)

    def _is_ready(self, seq: SeqId) -> bool:
        """Whether the target's row before the anchor is known and in no head row yet."""
        sequence = self._get(seq)
        return bool(sequence.pending) and sequence.known == len(sequence.tokens) - 1

    def _fold(self, seq: SeqId, sequence: _Sequence) -> None:
        """Evaluate the pending rows whose token is known; not the anchor's, which starts the next draft."""
        anchor = len(sequence.tokens) - 1
        while sequence.pending and sequence.due + 1 < anchor:
            features = sequence.pending[0]
            count = min(len(features), anchor - 1 - sequence.due)
            first = sequence.due + 1
            self._executor.extend(HeadBlock(seq, first, sequence.tokens[first : first + count], features[:count]))
            rest = (features[count:],) if count < len(features) else ()
            sequence.pending = (*rest, *sequence.pending[1:])
            sequence.due += count

    def _take(self, seq: SeqId) -> HeadBlock:
        """Every pending row of a sequence, the anchor's the last."""
        sequence = self._get(seq)
        features = np.concatenate(sequence.pending) if len(sequence.pending) > 1 else sequence.pending[0]
        first = sequence.due + 1
        sequence.due, sequence.pending = sequence.due + len(features), ()
        return HeadBlock(seq, first, sequence.tokens[first:], features)

    def _draft(self, drafts: list[_Draft], logits: NDArray[np.float32]) -> None:
        """The recurrent draft: every step's token is the next step's input, until a cut or the limit."""
        going = drafts
        while True:
            going = [draft for draft, row in zip(going, logits, strict=True) if self._add(draft, row)]
            if not going:
                return
            seqs = [draft.request.seq for draft in going]
            logits = self._executor.step(seqs, [draft.token_ids[-1] for draft in going])

    def _add(self, draft: _Draft, logits: NDArray[np.float32]) -> bool:
        """Take the likeliest token of a row; returns whether the draft goes on."""
        rows = self._config.fr_vocab_size
        choice: Choice | None = choose(logits[:rows] if rows else logits)
        if choice is None or choice.is_cut(self._config):
            return False
        ids = self._executor.ids
        draft.token_ids.append(choice.row if ids is None else int(ids[choice.row]))
        draft.confidences.append(choice.p0)
        draft.chance *= choice.p0
        return len(draft.token_ids) < draft.limit and draft.chance >= draft.request.stop_below

    def _get(self, seq: SeqId) -> _Sequence:
        if seq not in self._sequences:
            raise _misuse(f"sequence {seq} is not open", seq, "begin it first")
        return self._sequences[seq]


def _misuse(what: str, got: object, fix: str) -> DrafterError:
    return DrafterError(what, who="strategy 'mtp'", got=got, fix=fix, plugin="mtp")
