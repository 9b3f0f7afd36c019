"""A target session in plain Python, with a real one's limits and none of its patience."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from attrs import define, frozen

from power_core.errors import BackendError
from power_core.prefix import Snapshot
from power_core.shapes import ShapeProfile, WidthClass
from power_core.target import RowBatch, SessionOptions
from power_core.testing.faults import Faults, Strict, guarded
from power_core.testing.numerics import State
from power_core.testing.rows import Chain, ForwardRecord, RowState, ScriptedRows
from power_core.types import SeqId, TokenId

if TYPE_CHECKING:
    from power_core.testing.targets import ScriptedTarget

__all__ = ["ScriptedPrefixStore", "ScriptedSession"]


@define
class _Sequence:
    """The cached state of one sequence; `states[i]` stands after `tokens[:i]`."""

    tokens: list[TokenId]
    states: list[State]
    epoch: int  # which `open` this is
    window: int = 0  # rows that can still be dropped where the memory is bounded


@frozen
class _Checkpoint:
    """A remembered position and the rows it was asked to cover."""

    seq: SeqId
    epoch: int
    length: int
    rows: int
    state: State


class ScriptedSession(Strict):
    """
    A `power_core.target.TargetSession`; made by `ScriptedTarget.open_session`.

    Attributes:
        history: Every forward that took place, in order.
        violations: Every broken rule, raised as `ProtocolViolation` when it happened.
        is_shut_down: Whether `shutdown` was called.
    """

    def __init__(self, target: ScriptedTarget, options: SessionOptions, faults: Faults) -> None:
        super().__init__(faults)
        self.profile: ShapeProfile = target.profile(options)
        self.context_size = options.context_size or target.trained_context
        self.max_sequences = options.max_sequences
        self.rollback_capacity = target.rollback_capacity
        self.capabilities = target.capabilities(options)
        self.history: list[ForwardRecord] = []
        self.is_shut_down = False
        self._numerics = target.numerics
        self._snapshots = target.snapshots
        self._layers = options.hidden_layers
        self._sequences: dict[SeqId, _Sequence] = {}
        self._opened = 0
        self._last_rows: ScriptedRows | None = None

    def open(self, seq: SeqId) -> None:
        with self.exclusive("open"):
            self.require(not self.is_shut_down, "open was called after shutdown")
            self.require(0 <= seq < self.max_sequences, f"sequence {seq} of {self.max_sequences} was opened")
            self.require(seq not in self._sequences, f"sequence {seq} was opened twice")
            self.faults.leave("open")  # before the effect: a failed open has none
            self._opened += 1
            self._sequences[seq] = _Sequence([], [self._numerics.start], self._opened)

    @guarded
    def close(self, seq: SeqId) -> None:
        self._sequence(seq)
        del self._sequences[seq]

    @guarded
    def length(self, seq: SeqId) -> int:
        return len(self._sequence(seq).tokens)

    @guarded
    def shutdown(self) -> None:
        self._sequences.clear()
        self.is_shut_down = True

    def tokens(self, seq: SeqId) -> tuple[TokenId, ...]:
        """The tokens evaluated and held for *seq*."""
        return tuple(self._sequence(seq).tokens)

    def assert_all_closed(self) -> None:
        """Raise `ProtocolViolation` if a sequence is still open, or a rule was broken earlier."""
        self.assert_clean()
        self.require(not self._sequences, f"sequences {sorted(self._sequences)} were never closed")

    # Forward

    def forward(self, batch: RowBatch, shape: WidthClass) -> ScriptedRows:
        with self.exclusive("forward"):
            if self._last_rows is not None:
                self._last_rows.expire()
            chains = self._chains(batch)
            width = self._width(batch, shape)
            drifts = shape.identity != self.profile.decode.identity
            grown = [self._grow(chain, drifts=drifts) for chain in chains]
            self.faults.leave("forward")  # before the effect: a failed forward has none
            for chain, (tokens, states) in zip(chains, grown, strict=True):
                self._keep(chain, tokens, states)
            rows = [row for chain, parts in zip(chains, grown, strict=True) for row in _row_states(chain, *parts)]
            self._last_rows = ScriptedRows(self, self._numerics, rows, width, self._layers)
            self.history.append(ForwardRecord(chains, width, shape.identity))
            return self._last_rows

    def _chains(self, batch: RowBatch) -> tuple[Chain, ...]:
        """The batch, cut where a row continues what the session holds."""
        n, parents = batch.n, batch.parents[: batch.n].tolist()
        self.require(0 < n <= batch.capacity, f"a forward of {n} rows")
        starts = [i for i in range(n) if parents[i] == -1]
        self.require(bool(starts) and starts[0] == 0, "the first row continues no sequence")
        chains = tuple(
            self._chain(batch, parents, start, end) for start, end in zip(starts, [*starts[1:], n], strict=True)
        )
        seqs = [chain.seq for chain in chains]
        self.require(len(set(seqs)) == len(seqs), f"sequences {seqs} in one forward: a sequence has two chains")
        return chains

    def _chain(self, batch: RowBatch, parents: list[int], start: int, end: int) -> Chain:
        """Rows start..end as one chain, every rule of `RowBatch` checked."""
        seq = int(batch.seqs[start])
        tokens = tuple(batch.tokens[start:end].tolist())
        first = len(self._sequence(seq).tokens)
        outputs = batch.outputs[start:end].tolist()
        count = sum(outputs)
        where = f"rows {start}..{end - 1} of sequence {seq}"
        self.require(bool((batch.seqs[start:end] == seq).all()), f"{where} name another sequence")
        self.require(parents[start + 1 : end] == list(range(start, end - 1)), f"{where} are not a chain")
        expected = list(range(first, first + end - start))
        positions = batch.positions[start:end].tolist()
        self.require(positions == expected, f"{where} are at {positions}, the session holds {first} positions")
        self.require(first + len(tokens) <= self.context_size, f"{where} end beyond the context of {self.context_size}")
        vocab = self._numerics.vocab_size
        self.require(all(0 <= token < vocab for token in tokens), f"{where} hold {tokens}, the vocabulary is {vocab}")
        self.require(not any(outputs[: end - start - count]), f"{where}: outputs are not the last rows")
        return Chain(seq, first, tokens, count)

    def _width(self, batch: RowBatch, shape: WidthClass) -> int:
        declared = (self.profile.decode, self.profile.prefill)
        self.require(shape in declared, "a forward ran in a width class the profile does not declare")
        width = shape.cover(batch.n)
        self.require(width is not None, f"{batch.n} rows do not fit the widths {shape.widths}")
        return width or batch.n

    def _grow(self, chain: Chain, *, drifts: bool) -> tuple[list[TokenId], list[State]]:
        """All tokens after *chain*, and the new states."""
        held = self._sequence(chain.seq)
        states = []
        state = held.states[-1]
        for token in chain.tokens:
            state = self._numerics.extend(state, token, drifts=drifts)
            states.append(state)
        return held.tokens + list(chain.tokens), states

    def _keep(self, chain: Chain, tokens: list[TokenId], states: list[State]) -> None:
        held = self._sequence(chain.seq)
        held.tokens = tokens
        held.states = held.states + states
        # A snapshot is kept before each row but the first of the last forward, at most `rollback_capacity`.
        held.window = min(self.rollback_capacity or 0, len(chain.tokens) - 1)

    # Rollback

    @guarded
    def can_truncate(self, seq: SeqId, length: int) -> bool:
        return self._can_truncate(seq, length)

    def _can_truncate(self, seq: SeqId, length: int) -> bool:
        held = self._sequence(seq)
        self.require(0 <= length <= len(held.tokens), f"sequence {seq} of {len(held.tokens)} cut to {length}")
        dropped = len(held.tokens) - length
        return self.rollback_capacity is None or length == 0 or dropped <= held.window

    @guarded
    def truncate(self, seq: SeqId, length: int) -> None:
        if not self._can_truncate(seq, length):
            raise BackendError(f"cannot cut sequence {seq} to {length}", who="scripted target", where="truncate")
        self._cut(seq, length)

    def _cut(self, seq: SeqId, length: int) -> None:
        held = self._sequence(seq)
        if length < len(held.tokens):
            # New lists: rows and checkpoints may still refer to the old ones.
            held.tokens, held.states = held.tokens[:length], held.states[: length + 1]
            held.window = 0  # llama.cpp: a second removal before the next forward is refused

    @guarded
    def checkpoint(self, seq: SeqId, rows: int) -> object:
        held = self._sequence(seq)
        self.require(rows >= 0, f"a checkpoint for {rows} rows")
        return _Checkpoint(seq, held.epoch, len(held.tokens), rows, held.states[-1])

    @guarded
    def can_restore(self, seq: SeqId, checkpoint: object) -> bool:
        return self._can_restore(seq, checkpoint)

    def _can_restore(self, seq: SeqId, checkpoint: object) -> bool:
        held = self._sequence(seq)
        if not isinstance(checkpoint, _Checkpoint) or checkpoint.seq != seq:
            self.require(False, f"sequence {seq} was asked about a checkpoint that is not its own")
            return False
        length = checkpoint.length
        if checkpoint.epoch != held.epoch or len(held.tokens) < length or held.states[length] != checkpoint.state:
            return False
        within = self._snapshots and len(held.tokens) - length <= checkpoint.rows
        return within or self._can_truncate(seq, length)

    @guarded
    def restore(self, seq: SeqId, checkpoint: object) -> None:
        if not self._can_restore(seq, checkpoint) or not isinstance(checkpoint, _Checkpoint):
            raise BackendError(f"cannot restore sequence {seq}", who="scripted target", where="restore")
        self._cut(seq, checkpoint.length)

    # Copies for the prompt cache

    def prefix_store(self) -> ScriptedPrefixStore:
        """Copies of this session's sequences; bounded memory can only be loaded whole."""
        return ScriptedPrefixStore(self, can_cut=self.rollback_capacity is None)

    def copy_out(self, seq: SeqId) -> tuple[list[TokenId], list[State]]:
        """Tokens and states of *seq*."""
        with self.exclusive("copy_out"):
            held = self._sequence(seq)
            self.faults.leave("copy_out")
            return held.tokens, held.states

    def copy_in(self, seq: SeqId, tokens: list[TokenId], states: list[State]) -> None:
        """Give the empty *seq* what `copy_out` returned, or a beginning of it."""
        with self.exclusive("copy_in"):
            held = self._sequence(seq)
            self.require(not held.tokens, f"a state is loaded into sequence {seq}, which holds tokens")
            held.tokens, held.states, held.window = tokens, states, 0
            self.faults.leave("copy_in")

    def _sequence(self, seq: SeqId) -> _Sequence:
        self.require(seq in self._sequences, f"sequence {seq} is not open")
        return self._sequences[seq]


@frozen
class ScriptedPrefixStore:
    """
    The `power_core.prefix.PrefixStore` of a scripted session; copies do not leave the process.

    Args:
        session: Whose sequences are copied.
        can_cut: Whether a copy can be loaded in part.
        longest: Positions up to which a sequence can be copied.
    """

    session: ScriptedSession
    can_cut: bool
    longest: int | None = None

    def save(self, seq: SeqId) -> Snapshot | None:
        tokens, states = self.session.copy_out(seq)
        return Snapshot((tokens, states), 8 * len(tokens), len(tokens), self.can_cut)

    def load(self, seq: SeqId, snapshot: Snapshot, length: int) -> None:
        tokens, states = cast("tuple[list[TokenId], list[State]]", snapshot.payload)
        self.session.require(
            length == snapshot.length or self.can_cut, f"{length} of {snapshot.length} tokens of a whole state"
        )
        self.session.copy_in(seq, tokens[:length], states[: length + 1])

    def free(self, snapshot: Snapshot) -> None:
        """Nothing to do: the copy goes with the snapshot."""

    def to_bytes(self, snapshot: Snapshot) -> bytes | None:  # noqa: ARG002 - none can
        return None

    def from_bytes(self, data: bytes) -> Snapshot:
        raise BackendError("a scripted state is never on the disk", who="scripted target", got=len(data))


def _row_states(chain: Chain, tokens: list[TokenId], states: list[State]) -> list[RowState]:
    first_output = len(chain.tokens) - chain.outputs
    return [RowState(tokens, chain.start + i + 1, state, output=i >= first_output) for i, state in enumerate(states)]
