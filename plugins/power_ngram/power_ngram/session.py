"""The draft session of every n-gram strategy: token lists, and indexes that lag behind them."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from power_core.drafter import DraftRequest, HiddenRows, Proposal
from power_core.errors import DrafterError
from power_core.types import SeqId, TokenId
from power_ngram.history import HistoryIndex, Strategy

__all__ = ["HistorySession"]


@define
class _Sequence:
    tokens: list[TokenId]
    num_prompt: int
    index: HistoryIndex


class HistorySession:
    """
    State of a sequence is its tokens; the index is derived from them and lags behind.

    New tokens are indexed in `propose`, that is after the step's `checkpoint`, so that an index never
    holds a token that the step in flight committed. A checkpoint is then a length, and a restore cuts
    the list there. Only a restore across an earlier step finds the index ahead and has it built anew.

    Args:
        name: The strategy's name, for messages.
        strategy: Makes the indexes; what requests share lives and dies with the session.
    """

    def __init__(self, name: str, strategy: Strategy) -> None:
        self._name = name
        self._strategy: Strategy | None = strategy
        self._sequences: dict[SeqId, _Sequence] = {}

    def begin(self, seq: SeqId, tokens: Sequence[TokenId]) -> None:
        if self._strategy is None:
            raise self._misuse(f"sequence {seq} begins after close", seq, "open the drafter again")
        if seq in self._sequences:
            raise self._misuse(f"sequence {seq} is already open", seq, "end it before it begins again")
        copied = [int(token) for token in tokens]  # plain ints: numpy scalars are slow to hash
        index = self._strategy.index(copied, len(copied))
        index.advance()
        self._sequences[seq] = _Sequence(copied, len(copied), index)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._propose(request) for request in requests]

    def observe(self, seq: SeqId, committed: Sequence[TokenId], rows: HiddenRows | None) -> None:  # noqa: ARG002 - the protocol's
        self._get(seq).tokens.extend(committed)

    def checkpoint(self, seq: SeqId) -> int:
        return len(self._get(seq).tokens)

    def restore(self, seq: SeqId, checkpoint: object) -> None:
        sequence = self._get(seq)
        if not isinstance(checkpoint, int) or not sequence.num_prompt <= checkpoint <= len(sequence.tokens):
            raise self._misuse(f"{checkpoint!r} is no checkpoint of sequence {seq}", checkpoint, "restore what it gave")
        del sequence.tokens[checkpoint:]
        if sequence.index.indexed > checkpoint and self._strategy is not None:
            sequence.index = self._strategy.index(sequence.tokens, sequence.num_prompt)

    def end(self, seq: SeqId) -> None:
        sequence = self._get(seq)
        del self._sequences[seq]
        if self._strategy is not None:
            self._strategy.retire(sequence.index, sequence.num_prompt)

    def close(self) -> None:
        self._sequences.clear()
        self._strategy = None

    def _propose(self, request: DraftRequest) -> Proposal:
        sequence = self._get(request.seq)
        if not sequence.tokens or sequence.tokens[-1] != request.anchor:
            raise self._misuse(
                f"the anchor {request.anchor} is not the last committed token of sequence {request.seq}",
                request.anchor, "observe every committed token before the next proposal",
            )  # fmt: skip
        sequence.index.advance()
        return sequence.index.draft(request.max_tokens) if request.max_tokens > 0 else Proposal()

    def _get(self, seq: SeqId) -> _Sequence:
        try:
            return self._sequences[seq]
        except KeyError:
            raise self._misuse(f"sequence {seq} is not open", seq, "begin it first") from None

    def _misuse(self, what: str, got: object, fix: str) -> DrafterError:
        return DrafterError(what, who=f"strategy {self._name!r}", got=got, fix=fix, plugin="ngram")
