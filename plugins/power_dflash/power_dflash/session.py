"""The draft session of both strategies: which block is denoised where, and what of it is proposed."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, frozen

from power_core.drafter import DraftRequest, HiddenRows, Proposal
from power_core.errors import DrafterError
from power_core.types import SeqId, TokenId
from power_dflash.chains import proposed
from power_dflash.config import DFlash2Config, DFlashConfig
from power_dflash.executor import Executor, Round
from power_dflash.header import Header

__all__ = ["BlockSession"]


@define
class _Sequence:
    """Tokens that the target has committed, the prompt included; their features end one before the last."""

    length: int


@frozen
class _Mark:
    """Checkpoint: tokens, and where the features ended."""

    length: int
    end: int | None


class BlockSession:
    """
    A session over one executor.

    State of a sequence is its length and the features the executor has taken in. Rows of masked tokens are gone
    when `propose` returns, so that a checkpoint is two numbers and a restore drops features that came after.

    Args:
        config: Of the strategy.
        header: Of the drafter's file.
        executor: With that file's weights; shut down by `close`.
        context_size: Positions a sequence may hold: no block reaches beyond.
    """

    def __init__(
        self, config: DFlashConfig | DFlash2Config, header: Header, executor: Executor, context_size: int
    ) -> None:
        self._config = config
        self._header = header
        self._executor = executor
        self._context_size = context_size
        self._sequences: dict[SeqId, _Sequence] = {}
        self._is_closed = False
        self._is_full = not isinstance(config, DFlashConfig) or config.full_block

    def begin(self, seq: SeqId, tokens: Sequence[TokenId]) -> None:
        if self._is_closed or seq in self._sequences:
            raise self._misuse(f"sequence {seq} cannot begin", seq, "end it first, in an open session")
        self._executor.open(seq)
        self._sequences[seq] = _Sequence(len(tokens))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        rounds = {i: each for i, request in enumerate(requests) if (each := self._round(request)) is not None}
        chains = dict(zip(rounds, self._executor.draft(list(rounds.values())), strict=True)) if rounds else {}
        margin, p_min = self._config.draft_margin, self._config.draft_p_min
        return [
            proposed(chains[i], rounds[i].wanted, margin=margin, p_min=p_min) if i in chains else Proposal()
            for i in range(len(requests))
        ]

    def observe(self, seq: SeqId, committed: Sequence[TokenId], rows: HiddenRows | None) -> None:
        sequence = self._get(seq)
        if rows is not None and rows.count:
            self._executor.extend(seq, rows.position, rows.features(self._header.target_blocks))
        sequence.length += len(committed)

    def checkpoint(self, seq: SeqId) -> object:
        return _Mark(self._get(seq).length, self._executor.end(seq))

    def restore(self, seq: SeqId, checkpoint: object) -> None:
        sequence = self._get(seq)
        if not isinstance(checkpoint, _Mark) or checkpoint.length > sequence.length:
            raise self._misuse(f"{checkpoint!r:.60} is no checkpoint of sequence {seq}", checkpoint, "restore its own")
        sequence.length = checkpoint.length
        self._executor.rollback(seq, checkpoint.end)

    def end(self, seq: SeqId) -> None:
        self._get(seq)
        del self._sequences[seq]
        self._executor.close(seq)

    def close(self) -> None:
        self._sequences.clear()
        if not self._is_closed:
            self._is_closed = True
            self._executor.shutdown()

    def _round(self, request: DraftRequest) -> Round | None:
        """The block to denoise, or None where there is nothing to ask or no room for it."""
        sequence = self._get(request.seq)
        position = sequence.length - 1
        if (end := self._executor.end(request.seq)) not in (None, position):
            raise self._misuse(
                f"the features of sequence {request.seq} end at {end}, the anchor is at {position}", end,
                "observe every evaluated row before the next proposal",
            )  # fmt: skip
        wanted = min(request.max_tokens, self._header.drafts)
        masks = self._header.block_size - 1
        if not self._is_full:
            masks = wanted - 1 if self._header.anchor_drafts else wanted
        if wanted < 1 or position < 0 or position + masks >= self._context_size:
            return None
        return Round(request.seq, position, [request.anchor, *[self._header.mask_id] * masks], wanted)

    def _get(self, seq: SeqId) -> _Sequence:
        try:
            return self._sequences[seq]
        except KeyError:
            raise self._misuse(f"sequence {seq} is not open", seq, "begin it first") from None

    def _misuse(self, what: str, got: object, fix: str) -> DrafterError:
        return DrafterError(what, who=f"strategy {self._config.strategy!r}", got=got, fix=fix, plugin="dflash")
