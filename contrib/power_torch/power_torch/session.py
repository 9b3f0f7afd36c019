"""
The target session: several sequences over one static cache.

Any suffix can be cut, since a cache row never changes once a later one was computed: a checkpoint is a
length, and the number of the forward that wrote the last row tells whether the rows below are still the same.
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import define, frozen
from numpy.typing import NDArray

from power_core.errors import BackendError
from power_core.shapes import ShapeProfile, WidthClass
from power_core.target import RowBatch
from power_core.types import Capability, SeqId
from power_torch.cache import KvCache
from power_torch.network import Network
from power_torch.plan import read_chains, refusal
from power_torch.prefix import TorchPrefixStore
from power_torch.rows import TorchRows
from power_torch.step import Chain, make_step

__all__ = ["Checkpoint", "TorchSession"]

PLUGIN = "torch"
_OWN_THREADS = torch.get_num_threads()  # before any session sets another number


@frozen
class Checkpoint:
    """
    A state of one sequence.

    Args:
        seq: The sequence.
        length: Positions it held.
        writer: Number of the forward that wrote its last row; 0 for an empty sequence.
    """

    seq: SeqId
    length: int
    writer: int


@define(eq=False)
class _Sequence:
    """
    What the session knows about an open sequence.

    Attributes:
        writers: int64[context]; number of the forward that wrote each position. Rows are written in
            order, so equal writers at one position mean equal rows below it.
        length: Positions held.
    """

    writers: NDArray[np.int64]
    length: int = 0

    def writer_at(self, length: int) -> int:
        return int(self.writers[length - 1]) if length else 0


class TorchSession:
    """
    Mutable state of up to `max_sequences` sequences. Used by one thread at a time.

    Args:
        network: The model.
        cache: Its key/value cache; written by nobody else.
        profile: The measured width classes; forwards stay inside them.
        context_size: Positions each sequence may hold.
        max_sequences: Sequences.
        threads: Compute threads, or None for torch's own setting.
    """

    rollback_capacity: int | None = None

    def __init__(
        self,
        network: Network,
        cache: KvCache,
        *,
        profile: ShapeProfile,
        context_size: int,
        max_sequences: int,
        threads: int | None,
    ) -> None:
        self.profile = profile
        self.context_size = context_size
        self.max_sequences = max_sequences
        self.capabilities = _offered(network)
        self._network: Network | None = network
        self._cache: KvCache | None = cache
        self._threads = threads
        self._sequences: dict[SeqId, _Sequence] = {}
        self._forwards = 0  # number of the newest forward, never reused

    # Copies

    def prefix_store(self) -> TorchPrefixStore:
        """Copies of sequences for the prompt cache; any prefix of one can be loaded."""
        return TorchPrefixStore(self)

    def export_rows(self, seq: SeqId) -> NDArray[np.float32]:
        """float32[layers, 2 * kv_heads, positions, head_dim]: keys and values of *seq*; a private copy."""
        _, cache = self._parts()
        return cache.copy_out(seq, self._state(seq).length)

    def can_import(self, rows: NDArray[np.float32]) -> bool:
        """Whether *rows* have the shape that `export_rows` gives, and no more positions than a sequence holds."""
        _, cache = self._parts()
        return cache.accepts(rows) and rows.shape[2] <= self.context_size

    def import_rows(self, seq: SeqId, rows: NDArray[np.float32]) -> None:
        """
        Give *seq*, which is open and empty, exported rows.

        Raises:
            BackendError: *seq* is not empty, or the rows are another model's; nothing has changed.
        """
        _, cache = self._parts()
        state = self._state(seq)
        if state.length:
            raise refusal(f"sequence {seq} holds {state.length} positions", state.length, "an empty sequence")
        if not self.can_import(rows):
            raise BackendError("these rows do not fit this model and context", plugin=PLUGIN, got=rows.shape)
        cache.copy_in(seq, rows)
        self._forwards += 1  # a number of its own: no checkpoint of other rows fits these
        state.length = rows.shape[2]
        state.writers[: state.length] = self._forwards

    # Sequences

    def open(self, seq: SeqId) -> None:
        """
        Make *seq* usable and empty.

        Raises:
            BackendError: *seq* is outside 0 .. max_sequences-1, or the session is closed.
        """
        self._parts()
        if not 0 <= seq < self.max_sequences:
            raise BackendError(
                f"there is no sequence {seq}", plugin=PLUGIN, got=seq, expected=f"0 to {self.max_sequences - 1}"
            )
        self._sequences[seq] = _Sequence(np.zeros(self.context_size, np.int64))

    def close(self, seq: SeqId) -> None:
        self._sequences.pop(seq, None)

    def length(self, seq: SeqId) -> int:
        return self._state(seq).length

    def _parts(self) -> tuple[Network, KvCache]:
        if self._network is None or self._cache is None:
            raise BackendError("the session is closed", plugin=PLUGIN, fix="open another")
        return self._network, self._cache

    def _state(self, seq: SeqId) -> _Sequence:
        self._parts()
        try:
            return self._sequences[seq]
        except KeyError:
            raise BackendError(
                f"sequence {seq} is not open", plugin=PLUGIN, got=seq, expected=f"one of {sorted(self._sequences)}"
            ) from None

    # Evaluation

    def forward(self, batch: RowBatch, shape: WidthClass) -> TorchRows:
        """
        Evaluate the rows of all sequences in one pass at the smallest width of *shape* that holds them.

        Raises:
            BackendError: The rows do not fit, or torch failed; no sequence has changed.
        """
        network, cache = self._parts()
        chains = read_chains(batch, network.hparams.vocab_size)
        width = self._admit(batch, chains, shape)
        wanted = np.flatnonzero(batch.outputs[: batch.n])
        step = make_step(
            batch.tokens[: batch.n],
            chains,
            wanted,
            width=width,
            tiles=shape,
            spans=cache.spans,
            group=network.group,
            window=network.hparams.sliding_window,
            device=network.device,
        )
        self._forwards += 1  # earlier rows are gone from here on
        use_threads(self._threads)
        try:
            outputs = network.forward(step, cache, has_outputs=bool(wanted.size))
        except RuntimeError as exc:
            raise BackendError(f"torch failed: {exc}", plugin=PLUGIN, where="forward") from exc
        for chain in chains:
            state = self._sequences[chain.seq]
            state.writers[state.length : state.length + chain.rows] = self._forwards
            state.length += chain.rows
        ordinals = np.full(batch.n, -1, np.intp)
        ordinals[wanted] = np.arange(wanted.size) if step.outputs is not None else wanted
        number = self._forwards
        return TorchRows(
            outputs,
            network.hidden_layers,
            ordinals,
            width,
            lambda: self._forwards == number and self._network is not None,
        )

    def _admit(self, batch: RowBatch, chains: list[Chain], shape: WidthClass) -> int:
        """The width to compute at, once the rows continue their sequences and fit."""
        for chain in chains:
            held = self._state(chain.seq).length
            if chain.position != held:
                raise refusal(f"sequence {chain.seq} continues at position {chain.position}", chain.position, held)
            if held + chain.rows > self.context_size:
                raise refusal(
                    f"sequence {chain.seq} would hold {held + chain.rows} positions",
                    held + chain.rows,
                    f"at most {self.context_size}",
                )
        width = shape.cover(batch.n)
        if width is None:
            raise refusal(f"{batch.n} rows do not fit the width class", batch.n, f"at most {shape.max_rows} rows")
        return width

    # Undoing

    def can_truncate(self, seq: SeqId, length: int) -> bool:
        return 0 <= length <= self._state(seq).length

    def truncate(self, seq: SeqId, length: int) -> None:
        state = self._state(seq)
        if not self.can_truncate(seq, length):
            raise BackendError(
                f"sequence {seq} cannot be cut from {state.length} to {length} positions",
                plugin=PLUGIN,
                got=length,
                expected=f"0 to {state.length}",
            )
        state.length = length

    def checkpoint(self, seq: SeqId, rows: int) -> Checkpoint:  # noqa: ARG002 - a length undoes any number of rows
        """Retain the length of *seq*; undoes a forward of any number of rows."""
        state = self._state(seq)
        return Checkpoint(seq, state.length, state.writer_at(state.length))

    def can_restore(self, seq: SeqId, checkpoint: object) -> bool:
        state = self._state(seq)
        if not isinstance(checkpoint, Checkpoint) or checkpoint.seq != seq or checkpoint.length > state.length:
            return False
        return state.writer_at(checkpoint.length) == checkpoint.writer

    def restore(self, seq: SeqId, checkpoint: object) -> None:
        """
        Bring *seq* back to *checkpoint*.

        Raises:
            BackendError: `can_restore` is false.
        """
        if not isinstance(checkpoint, Checkpoint) or not self.can_restore(seq, checkpoint):
            raise BackendError(
                f"sequence {seq} cannot be brought back to this checkpoint",
                plugin=PLUGIN,
                got=checkpoint,
                fix="evaluate its tokens again",
            )
        self._state(seq).length = checkpoint.length

    def shutdown(self) -> None:
        """Free the cache. Idempotent; rows read afterwards are refused."""
        self._sequences.clear()
        self._network = self._cache = None


def use_threads(threads: int | None) -> None:
    """Set torch's number of compute threads, which is the whole process's; None for what it was at the start."""
    wanted = threads or _OWN_THREADS
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


def _offered(network: Network) -> frozenset[str]:
    offered = {Capability.LOGITS, Capability.GREEDY_IDS, Capability.STATE_SNAPSHOT, Capability.PREFIX_REUSE}
    if network.hidden_layers:
        offered.add(Capability.HIDDEN_STATES)
    return frozenset(offered)
