"""
Draft contexts: a drafter evaluated by llama.cpp beside the target's context.

What llama.cpp asserts about a call, or misreads in silence, is checked before it: rows against the batch, widths,
positions, ids, numbers. A block drafter's graph takes the rows of a decode for blocks of one size, of neighbouring
sequences: blocks that are not like that are decoded one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import numpy as np
from attrs import define
from numpy.typing import NDArray

from power_core.draft_context import DraftBlock
from power_core.errors import BackendError
from power_core.types import SeqId
from power_llamacpp.context import ContextSettings, NativeContext, NativeModel
from power_llamacpp.draft_facts import DraftFacts, DraftKind
from power_llamacpp.draft_native import DraftNative
from power_llamacpp.draft_rows import LlamaCppDraftRows

__all__ = ["LlamaCppDraftContext"]


@define
class _Held:
    """Positions a sequence holds: start .. end-1; none where both are equal."""

    start: int = 0
    end: int = 0


class _Piece(NamedTuple):
    """Rows first .. last-1 of a block."""

    block: DraftBlock
    first: int
    last: int


class LlamaCppDraftContext:
    """
    Draft state of a session's sequences: see `power_core.draft_context.DraftContext`.

    Args:
        weights: The drafter's weights.
        target: The target's context. It frees this one first.
        settings: The target's settings; rows and positions are the drafter's own.
        facts: What `check_draft` returned.
        owns_weights: Whether *weights* are freed with the context.

    Raises:
        BackendError: llama.cpp cannot make the context.
        CapabilityError: This build lacks a function that is needed.
    """

    def __init__(
        self,
        weights: NativeModel,
        target: NativeContext,
        settings: ContextSettings,
        facts: DraftFacts,
        *,
        owns_weights: bool,
    ) -> None:
        self.facts = facts
        self._weights = weights if owns_weights else None
        try:
            self._native = DraftNative(weights, settings, target, facts)
        except BaseException:
            self._free_weights()
            raise
        self._cells = settings.context_size
        self._max_sequences = settings.max_sequences
        self._iota: NDArray[np.int32] = np.arange(self._native.batch_rows, dtype=np.int32)
        self._held: dict[SeqId, _Held] = {}
        self._calls = 0
        target.before_close(self.shutdown)

    @property
    def max_rows(self) -> int:
        return self._native.batch_rows

    # Sequences

    def open(self, seq: SeqId) -> None:
        """
        Make *seq* usable and empty.

        Raises:
            BackendError: The session has no such sequence.
        """
        if not 0 <= seq < self._max_sequences:
            _refuse(f"there is no sequence {seq}", seq, f"0 to {self._max_sequences - 1}")
        self._native.remove(seq, 0)
        self._held[seq] = _Held()

    def close(self, seq: SeqId) -> None:
        if self._held.pop(seq, None) is not None:
            self._native.remove(seq, 0)

    def end_position(self, seq: SeqId) -> int | None:
        held = self._state(seq)
        return held.end if held.end > held.start else None

    def truncate(self, seq: SeqId, length: int) -> None:
        """
        Drop every row of *seq* from absolute position *length* on.

        Raises:
            BackendError: *length* is negative, or llama.cpp refused.
        """
        held = self._state(seq)
        if length < 0:
            _refuse(f"sequence {seq} cannot be cut to {length} positions", length, "0 or more")
        if length >= held.end:
            return
        if not self._native.remove(seq, length):
            raise BackendError(f"llama.cpp would not cut the draft of sequence {seq}", plugin="llamacpp", got=length)
        held.end = max(length, held.start)

    def _state(self, seq: SeqId) -> _Held:
        self._native.handle  # noqa: B018 - says so where the context is closed
        if seq not in self._held:
            _refuse(f"sequence {seq} is not open", seq, f"one of {sorted(self._held)}")
        return self._held[seq]

    # Evaluation

    def inject(self, seq: SeqId, position: int, features: NDArray[np.float32]) -> None:
        """
        Add target features float32[rows, width] from *position* on; see `power_core.draft_context.DraftContext`.

        Raises:
            BackendError: They do not fit (nothing was evaluated), or llama.cpp failed (*seq* is as before).
        """
        if self.facts.kind is DraftKind.MTP:
            _refuse("a prediction layer takes no features", str(self.facts.kind), "tokens with states, in a forward")
        features = self._floats(features, (None, self.facts.feature_size), "features")
        rows = len(features)
        if not rows:
            return
        self._admit(seq, position, rows)
        native, step = self._native, self._native.batch_rows
        with self._undone_on_failure([seq]):
            for first in range(0, rows, step):
                count = min(step, rows - first)
                native.batch.positions[:count] = self._iota[:count] + (position + first)
                native.batch.seqs[:count] = seq
                native.decode_features(features[first : first + count])
        self._grow(seq, position, rows)

    def forward(self, blocks: Sequence[DraftBlock], *, logits: bool = True) -> LlamaCppDraftRows:
        """
        Evaluate *blocks*; see `power_core.draft_context.DraftContext`.

        Raises:
            BackendError: They do not fit (nothing was evaluated), or llama.cpp failed (sequences are as before).
        """
        if not blocks:
            _refuse("there are no blocks", 0, "at least one")
        seqs = [block.seq for block in blocks]
        if len(set(seqs)) < len(seqs):
            _refuse("a sequence has two blocks", seqs, "at most one block a sequence")
        states = [self._check_block(block) for block in blocks]
        with self._undone_on_failure(seqs):
            rows = self._evaluate(self._decodes(blocks), dict(zip(seqs, states, strict=True)), logits)
        for block in blocks:
            self._grow(block.seq, block.position, len(block.tokens))
        return rows

    def _check_block(self, block: DraftBlock) -> NDArray[np.float32] | None:
        """Refuse what llama.cpp would abort on or misread; returns the block's states as they can be handed over."""
        facts, rows = self.facts, len(block.tokens)
        most = facts.block_size or self._cells
        if not 1 <= rows <= most:
            _refuse(f"the block of sequence {block.seq} has {rows} rows", rows, f"1 to {most}")
        self._admit(block.seq, block.position, rows)
        bad = next((token for token in block.tokens if not 0 <= token < facts.vocab_size), None)
        if bad is not None:
            _refuse(f"token id {bad} is not in the vocabulary", bad, f"0 to {facts.vocab_size - 1}")
        outputs = rows if block.outputs is None else block.outputs
        if not 0 <= outputs <= rows or (facts.kind is not DraftKind.MTP and outputs != rows):
            _refuse(f"{outputs} outputs of {rows} rows are asked for", outputs, "all rows of a block, or logits=False")
        if facts.kind is DraftKind.MTP:
            if block.hidden is None:
                _refuse("a prediction layer's rows come without states", None, "DraftBlock.hidden")
            return self._floats(block.hidden, (rows, facts.hidden_size), "states")
        if block.hidden is not None:
            _refuse(f"a {facts.kind} block has states", block.hidden.shape, "None: features are injected")
        return None

    def _admit(self, seq: SeqId, position: int, rows: int) -> None:
        """Rows continue where the last one ended, and fit."""
        held = self._state(seq)
        if position < 0 or (held.end > held.start and position != held.end):
            _refuse(f"rows of sequence {seq} begin at position {position}", position, held.end)
        if position + rows > self._cells:
            _refuse(f"sequence {seq} would reach position {position + rows}", position + rows, f"{self._cells} or less")

    def _floats(self, values: NDArray[np.float32], shape: tuple[int | None, int], what: str) -> NDArray[np.float32]:
        """*values* as C-contiguous float32 of *shape*: a narrower row would be read past its end."""
        fits = values.ndim == 2 and values.shape[1] == shape[1] and shape[0] in (None, len(values))
        if not fits or values.dtype != np.float32:
            _refuse(
                f"{what} are {values.dtype}{list(values.shape)}",
                values.shape,
                f"float32[{shape[0] or 'rows'}, {shape[1]}]",
            )
        if not np.isfinite(values).all():
            _refuse(f"{what} hold a number that is not finite", "nan or inf", "finite numbers")
        return np.ascontiguousarray(values)

    def _evaluate(
        self,
        decodes: list[list[_Piece]],
        states: dict[SeqId, NDArray[np.float32] | None],
        logits: bool,
    ) -> LlamaCppDraftRows:
        """Each decode overwrites what the one before it gave: where there are several, their results are copied."""
        flags: list[NDArray[np.int8]] = []
        found: list[NDArray[np.float32]] = []
        beside: list[NDArray[np.float32]] = []
        alone = len(decodes) == 1
        for pieces in decodes:
            rows = self._fill(pieces, logits)
            flags.append(self._native.batch.outputs[:rows].copy())
            if self.facts.kind is DraftKind.MTP:
                parts = [np.asarray(states[piece.block.seq])[piece.first : piece.last] for piece in pieces]
                values = self._native.decode_pairs(rows, parts[0] if len(parts) == 1 else np.concatenate(parts))
            else:
                values = self._native.decode(rows)
            found.append(values if alone else values.copy())
            if self.facts.kind is not DraftKind.DFLASH:
                given = self._native.states(rows)
                beside.append(given if alone else given.copy())
        flagged = np.concatenate(flags) != 0
        ordinals = np.where(flagged, np.cumsum(flagged) - 1, -1)
        call = self._calls
        return LlamaCppDraftRows(
            self.facts,
            found[0] if alone else np.concatenate(found),
            ordinals,
            (beside[0] if alone else np.concatenate(beside)) if beside else None,
            lambda: self._calls == call and self._native.is_open,
        )

    def _fill(self, pieces: list[_Piece], logits: bool) -> int:
        """Put *pieces* into the native batch; returns their rows."""
        batch, at = self._native.batch, 0
        for piece in pieces:
            block, end = piece.block, at + piece.last - piece.first
            batch.tokens[at:end] = block.tokens[piece.first : piece.last]
            batch.positions[at:end] = self._iota[: end - at] + (block.position + piece.first)
            batch.seqs[at:end] = block.seq
            rows = len(block.tokens)
            first = rows - (rows if block.outputs is None else block.outputs)
            if self.facts.kind is DraftKind.DSPARK:
                batch.outputs[at:end] = 1  # its confidences are made for outputs only, and for all rows or none
            else:
                batch.outputs[at:end] = logits & (np.arange(piece.first, piece.last) >= first)
            at = end
        return at

    def _decodes(self, blocks: Sequence[DraftBlock]) -> list[list[_Piece]]:
        """The pieces of each native decode: whole blocks for a block drafter, whatever fits for a prediction layer."""
        most = self._native.batch_rows
        decodes: list[list[_Piece]] = []
        room = 0
        for block in blocks:
            rows, first = len(block.tokens), 0
            if self.facts.kind is not DraftKind.MTP and not (
                decodes and rows <= room and _is_next(decodes[-1][-1], block)
            ):
                room = 0
            while first < rows:
                if not room:
                    decodes.append([])
                    room = most
                count = min(room, rows - first)
                decodes[-1].append(_Piece(block, first, first + count))
                first, room = first + count, room - count
        return decodes

    def _grow(self, seq: SeqId, position: int, rows: int) -> None:
        held = self._held[seq]
        if held.end <= held.start:
            held.start = position
        held.end = position + rows

    @contextmanager
    def _undone_on_failure(self, seqs: Sequence[SeqId]) -> Iterator[None]:
        """Cut the rows of a call that fails, an interrupt included."""
        self._calls += 1
        try:
            yield
        except BaseException:
            if self._native.is_open:
                for seq in seqs:
                    self._native.remove(seq, self._held[seq].end)
            raise

    def shutdown(self) -> None:
        """Free the context, and the weights that are its own. Idempotent."""
        self._calls += 1
        self._held.clear()
        self._native.close()
        self._free_weights()

    def _free_weights(self) -> None:
        weights, self._weights = self._weights, None
        if weights is not None:
            weights.close()


def _is_next(piece: _Piece, block: DraftBlock) -> bool:
    """Whether llama.cpp takes the rows of both for two blocks of one graph: equal sizes, neighbouring sequences."""
    return block.seq == piece.block.seq + 1 and len(block.tokens) == len(piece.block.tokens)


def _refuse(what: str, got: object, expected: object) -> NoReturn:
    """For calls that would end the process; nothing has been evaluated when it is raised."""
    raise BackendError(what, plugin="llamacpp", where="draft context", got=got, expected=expected)
