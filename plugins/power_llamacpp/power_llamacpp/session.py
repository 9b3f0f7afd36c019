"""
The target session: several sequences over one llama.cpp context, every step exact or refused.

What can be undone, and how, depends on the model's memory:

* **attention** (sliding windows with `swa_full` included): any suffix can be cut, so a checkpoint is a
  position.
* **sliding window, `swa_full` off**: a cut is exact while every position the new end can see is still
  held. llama.cpp evicts only what the next position of a decode's start cannot see, so the rows of the
  last forward can always be cut, as long as that forward was one physical batch: sequences are therefore
  evaluated one after the other.
* **recurrent and hybrid**: a state holds no earlier states. `n_rs_seq` resident states allow one cut after
  a forward, of at most min(n_rs_seq, rows of that forward - 1) rows; llama.cpp accepts more and is then
  wrong, so the session counts. Undoing a whole forward is deeper than that by one row: checkpoints are
  copies of the state. The resident states of a sequence are lost with the next forward of any sequence,
  because llama.cpp then moves the newest state alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from power_core.draft_context import NEXTN_STATE
from power_core.errors import BackendError, ConfigError
from power_core.shapes import ShapeProfile, WidthClass
from power_core.target import RowBatch, SessionOptions
from power_core.types import Capability, SeqId
from power_llamacpp import extension
from power_llamacpp.config import LlamaCppConfig
from power_llamacpp.context import ContextSettings, NativeContext, NativeModel
from power_llamacpp.draft_context import LlamaCppDraftContext
from power_llamacpp.draft_open import open_draft
from power_llamacpp.evaluate import Computed, Evaluator
from power_llamacpp.gguf_file import GgufInfo
from power_llamacpp.plan import Chain, is_dense, read_chains, refusal, scratch_sequences, widest_gap
from power_llamacpp.prefix import LlamaCppPrefixStore
from power_llamacpp.rows import LlamaCppRows
from power_llamacpp.taps import check_hidden_layers

__all__ = ["Checkpoint", "LlamaCppSession"]

PLUGIN = "llamacpp"


@frozen(eq=False)
class Checkpoint:
    """
    A state of one sequence.

    Args:
        seq: The sequence.
        length: Positions it held.
        stamp: Number of the forward that wrote its last row: tells whether its rows are still the same.
        state: A copy of what cannot be cut, or None where a position is enough.
    """

    seq: SeqId
    length: int
    stamp: int
    state: NDArray[np.uint8] | None = field(default=None, repr=False)


@define(eq=False)
class _Sequence:
    """
    What the session knows about an open sequence.

    Attributes:
        writers: int64[context]; number of the forward that wrote each position. Rows are written in
            order, so equal writers at one position mean equal rows below it.
        length: Positions held.
        depth: Rows that a recurrent memory can cut now.
        retained: The newest checkpoint with a copied state, while it is the current state.
    """

    writers: NDArray[np.int64]
    length: int = 0
    depth: int = 0
    retained: Checkpoint | None = None

    def stamp_at(self, length: int) -> int:
        return int(self.writers[length - 1]) if length else 0


class LlamaCppSession:
    """
    Mutable state of up to `max_sequences` sequences. Used by one thread at a time.

    Args:
        weights: Loaded model.
        options: What the core asks for.
        profile: The measured width classes; forwards stay inside them.
        config: The plugin's configuration.
        info: What the model file's header says.
        flash_attention: What the probe decided.

    Raises:
        CapabilityError: Hidden layers are asked for that llama.cpp does not give.
        ConfigError: The options contradict the model.
        BackendError: llama.cpp cannot provide the context.
    """

    def __init__(
        self,
        weights: NativeModel,
        options: SessionOptions,
        *,
        profile: ShapeProfile,
        config: LlamaCppConfig,
        info: GgufInfo,
        flash_attention: bool = False,
    ) -> None:
        check_hidden_layers(info, options.hidden_layers)
        self._info = info
        self._weights = weights
        self.profile = profile
        self.context_size = context_size_of(options, weights.trained_context)
        self.max_sequences = options.max_sequences
        self._is_recurrent = weights.is_recurrent
        self._evicts = weights.window > 0 and not config.swa_full
        self._window = weights.window
        classes = (profile.decode, profile.prefill)
        self._stride = 1 + max(_most_scratch(shape) for shape in classes) if self._is_recurrent else 1
        # Scratch sequences make every decode move states, so that no other sequence's earlier ones would last.
        keeps_states = self._is_recurrent and (self._stride == 1 or options.max_sequences == 1)
        max_outputs = max(options.max_rows, profile.decode.max_rows) + options.max_sequences
        self._context = NativeContext(
            weights,
            ContextSettings(
                context_size=self.context_size + max(widest_gap(shape) for shape in classes),
                max_sequences=options.max_sequences * self._stride,
                batch_rows=max(shape.max_rows for shape in classes),
                max_outputs=max_outputs,
                threads=options.threads or 1,
                flash_attention=flash_attention,
                kv_type=config.kv_type,
                swa_full=config.swa_full,
                rollback_rows=options.rollback_rows if keeps_states else 0,
                hidden_layers=options.hidden_layers,
            ),
        )
        self.rollback_capacity: int | None = self._context.rollback_rows if self._is_recurrent else None
        self.capabilities = self._offered(options.hidden_layers)
        self._sequences: dict[SeqId, _Sequence] = {}
        self._forwards = 0  # number of the newest forward, never reused
        self._evaluator = Evaluator(
            self._context,
            profile,
            stride=self._stride,
            is_recurrent=self._is_recurrent,
            one_part=self._evicts or self._context.rollback_rows > 0,
        )

    def _offered(self, hidden_layers: tuple[int, ...]) -> frozenset[str]:
        offered = {Capability.LOGITS, Capability.GREEDY_IDS, Capability.STATE_SNAPSHOT}
        if not self._evicts:
            offered.add(Capability.PREFIX_REUSE)
        if hidden_layers:
            offered.add(Capability.HIDDEN_STATES)
        if NEXTN_STATE in hidden_layers:
            offered.add(Capability.NEXTN)
        if hidden_layers and not extension.missing(extension.NEXTN):
            offered.add(Capability.DRAFT_CONTEXT)
        return frozenset(offered)

    def open_draft_context(self, path: Path | None) -> LlamaCppDraftContext:
        """
        Load the drafter *path*, or with None the prediction layer inside the target's own file.

        Raises:
            ArtifactError: The file would abort or be misread by llama.cpp, which has not seen it.
            BackendError: llama.cpp cannot load it or make its context.
            CapabilityError: This target, this session or this build of llama.cpp cannot.
        """
        return open_draft(
            path,
            self._info,
            self._weights,
            self._context,
            context_size=self.context_size,
            max_sequences=self.max_sequences,
        )

    # Copies

    def prefix_store(self) -> LlamaCppPrefixStore:
        """Copies of sequences for the prompt cache: see `power_llamacpp.prefix` for what can be copied exactly."""
        return LlamaCppPrefixStore(self, can_cut=not self._is_recurrent, longest=self._window or None)

    def export_state(self, seq: SeqId) -> NDArray[np.uint8]:
        """Everything llama.cpp holds for *seq*; a private copy."""
        self._state(seq)
        return self._context.snapshot(seq * self._stride, whole=True)

    def import_state(self, seq: SeqId, data: NDArray[np.uint8], held: int, length: int) -> None:
        """
        Give the empty *seq* the first *length* of the *held* positions of an exported state.

        Raises:
            BackendError: *seq* is not empty, or llama.cpp refused; *seq* is empty then.
        """
        state, native = self._state(seq), seq * self._stride
        if state.length or length > self.context_size:
            raise refusal(f"sequence {seq} holds {state.length} positions", state.length, "an empty sequence")
        self._evaluator.empty_scratch(seq)
        done = self._context.restore_whole(native, data) and self._context.last_position(native) == held - 1
        if not done or (length < held and not self._context.remove(native, length)):
            self._empty(seq)
            raise BackendError(f"llama.cpp would not load a state into sequence {seq}", plugin=PLUGIN, got=data.size)
        self._forwards += 1  # a number of its own: no checkpoint of other rows fits these
        state.writers[:length] = self._forwards
        state.length = length
        for other in self._sequences.values():
            other.depth = 0  # the loaded state may have moved others, without their earlier ones

    # Sequences

    def open(self, seq: SeqId) -> None:
        """
        Make *seq* usable and empty.

        Raises:
            BackendError: *seq* is outside 0 .. max_sequences-1.
        """
        if not 0 <= seq < self.max_sequences:
            raise BackendError(
                f"there is no sequence {seq}", plugin=PLUGIN, got=seq, expected=f"0 to {self.max_sequences - 1}"
            )
        self._empty(seq)
        self._sequences[seq] = _Sequence(np.zeros(self.context_size, np.int64))

    def close(self, seq: SeqId) -> None:
        if self._sequences.pop(seq, None) is not None:
            self._empty(seq)

    def length(self, seq: SeqId) -> int:
        return self._state(seq).length

    def _state(self, seq: SeqId) -> _Sequence:
        self._context.handle  # noqa: B018 - says so where the whole session is closed
        try:
            return self._sequences[seq]
        except KeyError:
            raise BackendError(
                f"sequence {seq} is not open", plugin=PLUGIN, got=seq, expected=f"one of {sorted(self._sequences)}"
            ) from None

    def _empty(self, seq: SeqId) -> None:
        if not self._context.remove(seq * self._stride, 0):
            raise BackendError(f"llama.cpp would not forget sequence {seq}", plugin=PLUGIN, got=seq)

    # Evaluation

    def forward(self, batch: RowBatch, shape: WidthClass) -> LlamaCppRows:
        """
        Evaluate the rows of all sequences within *shape*.

        One native decode, except where rows must be padded or a sliding window evicts: then one a sequence.
        After a failure every sequence is as before, except that a recurrent one has no cuttable rows left; one
        that cannot be brought back is emptied, and the error says so.

        Raises:
            BackendError: The rows do not fit (nothing was evaluated), or llama.cpp failed.
        """
        context = self._context
        chains = read_chains(batch, context.model.vocab_size)
        self._admit(batch, chains, shape)
        before = [self.checkpoint(chain.seq, chain.rows) for chain in chains]
        self._forwards += 1  # earlier rows are gone from here on
        for state in self._sequences.values():
            state.depth = 0  # a decode may move the states of other sequences, but not their earlier states
        try:
            computed = self._evaluator.run(batch, chains, shape)
            self._grow(chains)
            return self._rows(batch, computed)
        except BaseException as error:  # an interrupt between two of these lines is undone like a failure
            lost = [point.seq for point in before if not self._set_state(point.seq, point)]
            if lost and isinstance(error, BackendError):
                error.what += f" (sequences {lost} could not be brought back and are empty now)"
            raise

    def _admit(self, batch: RowBatch, chains: list[Chain], shape: WidthClass) -> None:
        """Refuse rows that llama.cpp would abort on, misplace or compute outside *shape*."""
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
        if not self._evaluator.fits(chains, shape):
            most = min(shape.max_rows, self._context.batch_rows)
            raise refusal(f"{batch.n} rows do not fit the width class", batch.n, f"at most {most} rows")
        outputs = int(np.count_nonzero(batch.outputs[: batch.n]))
        if outputs > self._context.max_outputs:
            raise refusal(f"{outputs} outputs are asked for", outputs, f"at most {self._context.max_outputs}")

    def _rows(self, batch: RowBatch, computed: Computed) -> LlamaCppRows:
        ordinals = np.full(batch.n, -1, np.intp)
        ordinals[batch.outputs[: batch.n]] = computed.order
        number = self._forwards
        return LlamaCppRows(
            computed.logits,
            ordinals,
            computed.width,
            computed.hidden,
            lambda: self._forwards == number and self._context.is_open,
        )

    def _grow(self, chains: list[Chain]) -> None:
        """Book the rows of a forward that succeeded."""
        for chain in chains:
            state = self._sequences[chain.seq]
            state.writers[state.length : state.length + chain.rows] = self._forwards
            state.length += chain.rows
            state.retained = None
            state.depth = min(self._context.rollback_rows, chain.rows - 1)

    # Undoing

    def can_truncate(self, seq: SeqId, length: int) -> bool:
        state = self._state(seq)
        if length in (0, state.length):
            return True
        if not 0 < length < state.length:
            return False
        return state.length - length <= state.depth if self._is_recurrent else self._sees_all(seq, length)

    def _sees_all(self, seq: SeqId, length: int) -> bool:
        """Whether everything position *length* can see through a sliding window is still held."""
        if not self._window:
            return True
        oldest_visible = max(0, length - self._window + 1)
        return self._context.first_position(seq * self._stride) <= oldest_visible

    def truncate(self, seq: SeqId, length: int) -> None:
        state = self._state(seq)
        if not self.can_truncate(seq, length):
            raise BackendError(
                f"sequence {seq} cannot be cut from {state.length} to {length} positions",
                plugin=PLUGIN,
                got=length,
                fix="restore a checkpoint instead",
            )
        if length == state.length:
            return
        if not self._context.remove(seq * self._stride, length):
            raise BackendError(
                f"llama.cpp would not cut sequence {seq} from {state.length} to {length} positions",
                plugin=PLUGIN,
                got=length,
                fix="restore a checkpoint instead",
            )
        state.length, state.depth, state.retained = length, 0, None

    def checkpoint(self, seq: SeqId, rows: int) -> Checkpoint:  # noqa: ARG002 - no kind of memory depends on it
        """
        Retain what is needed to undo a forward of any number of further rows of *seq*.

        A position where rows can be cut, else a copy of the state; asking again before the state changed
        returns the same copy.
        """
        state = self._state(seq)
        if state.retained is not None:
            return state.retained
        if not self._is_recurrent or not state.length:
            return Checkpoint(seq, state.length, state.stamp_at(state.length))
        data = self._context.snapshot(seq * self._stride)
        state.retained = Checkpoint(seq, state.length, state.stamp_at(state.length), data)
        return state.retained

    def can_restore(self, seq: SeqId, checkpoint: object) -> bool:
        state = self._state(seq)
        if not isinstance(checkpoint, Checkpoint) or checkpoint.seq != seq or checkpoint.length > state.length:
            return False
        if state.stamp_at(checkpoint.length) != checkpoint.stamp:  # its rows were replaced, or seq was reopened
            return False
        return self._is_recurrent or self._sees_all(seq, checkpoint.length)

    def restore(self, seq: SeqId, checkpoint: object) -> None:
        """
        Bring *seq* back to *checkpoint*.

        Raises:
            BackendError: `can_restore` is false, or llama.cpp refused; *seq* is empty after a refusal.
        """
        if not isinstance(checkpoint, Checkpoint) or not self.can_restore(seq, checkpoint):
            raise BackendError(
                f"sequence {seq} cannot be brought back to this checkpoint",
                plugin=PLUGIN,
                got=checkpoint,
                fix="evaluate its tokens again",
            )
        state = self._state(seq)
        if checkpoint.length == state.length and (not self._is_recurrent or state.retained is checkpoint):
            return
        if not self._set_state(seq, checkpoint):
            raise BackendError(
                f"llama.cpp would not bring sequence {seq} back; it is empty now",
                plugin=PLUGIN,
                got=checkpoint,
                fix="evaluate its tokens again",
            )

    def _set_state(self, seq: SeqId, checkpoint: Checkpoint) -> bool:
        """Make *seq* natively what *checkpoint* describes; where that fails, empty it and return False."""
        state, native = self._sequences[seq], seq * self._stride
        self._evaluator.empty_scratch(seq)
        if checkpoint.state is None:
            done = self._context.remove(native, checkpoint.length)
        else:
            done = self._context.restore(native, checkpoint.state, checkpoint.length)
        if not done:
            self._empty(seq)
            state.length, state.depth, state.retained = 0, 0, None
            return False
        state.length, state.depth = checkpoint.length, 0
        state.retained = checkpoint if checkpoint.state is not None else None
        return True

    def shutdown(self) -> None:
        """Free the context. Idempotent; rows read afterwards are refused."""
        self._forwards += 1
        self._sequences.clear()
        self._context.close()


def context_size_of(options: SessionOptions, trained: int) -> int:
    """
    Positions per sequence that *options* ask for.

    Raises:
        ConfigError: None or fewer than one, or more than the model was trained for.
    """
    size = options.context_for(trained)
    if not 1 <= size <= trained:
        raise ConfigError(
            f"context_size is {size}",
            plugin=PLUGIN,
            got=size,
            expected=f"1 to {trained}, what the model was trained for",
        )
    return size


def _most_scratch(shape: WidthClass) -> int:
    """Most scratch sequences that any row count of *shape* needs."""
    if is_dense(shape):
        return 0
    return max(scratch_sequences(shape, rows) or 0 for rows in range(1, shape.max_rows + 1))
