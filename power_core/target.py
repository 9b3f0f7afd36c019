"""
The target protocol: what a backend implements so that the core can decode with it exactly.

A backend (`TargetBackend`) loads files into models; a model (`TargetModel`) is weights, tokenizer and
identity; a session (`TargetSession`) is mutable state for several sequences and the one call that
costs: `forward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.shapes import ShapeProfile, WidthClass
from power_core.types import SeqId, TargetIdentity, TokenId

__all__ = [
    "ChatMessage",
    "HiddenStates",
    "RowBatch",
    "Rows",
    "SessionOptions",
    "SessionSizes",
    "SharedWeights",
    "TargetBackend",
    "TargetModel",
    "TargetSession",
    "Tokenizer",
    "encode_raw",
]

_DEFAULT_CONTEXT = 4096


class RowBatch:
    """
    The rows of one forward, over all sequences; memory is allocated once and reused.

    A row is (sequence, position, token, parent): `parents[i]` is the index in this batch of the row
    that row i continues, or -1 where it continues the last row the session already holds for that
    sequence. A chain has parents -1, i, i+1, ...; a tree needs no other record.

    Attributes:
        tokens: int32[capacity]; token ids.
        positions: int32[capacity]; absolute positions.
        seqs: int32[capacity]; sequence ids.
        parents: int32[capacity].
        outputs: bool[capacity]; whether `Rows` must be able to answer for this row.
        n: Rows in use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.positions: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.seqs: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.parents: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.outputs: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self.n = 0
        self._iota: NDArray[np.int32] = np.arange(-1, capacity, dtype=np.int32)

    def clear(self) -> None:
        self.n = 0

    def add_chain(self, seq: SeqId, position: int, tokens: Sequence[TokenId], outputs: int) -> int:
        """
        Append a chain of rows for *seq* starting at *position*; the last *outputs* rows are read back.

        Returns:
            The index in the batch of the chain's first row.
        """
        start, count = self.n, len(tokens)
        end = start + count
        self.tokens[start:end] = tokens
        self.positions[start:end] = self._iota[1 : count + 1] + position
        self.seqs[start:end] = seq
        self.parents[start:end] = self._iota[start:end]
        self.parents[start] = -1
        self.outputs[start:end] = False
        self.outputs[end - outputs : end] = outputs > 0
        self.n = end
        return start


class HiddenStates(Protocol):
    """The part of `Rows` that drafters read; it may outlive the forward as a copy."""

    def hidden(self, i: int | slice, layer: int) -> NDArray[np.float32]:
        """
        float32[hidden] output of block *layer* for row *i*, or float32[rows, hidden] for a slice of rows.

        A read-only view where the backend can give one; needs `hidden-states` and the layer among
        `SessionOptions.hidden_layers`. Blocks are numbered from 0.
        """


class Rows(HiddenStates, Protocol):
    """
    Results of one forward. Valid until the session's next `forward`, whatever `truncate` and `restore` do in between.

    Indices are rows of the `RowBatch` that was given, and must have had `outputs` set
    (`hidden` answers for every row of the batch).
    """

    @property
    def width(self) -> int:
        """Rows computed, pad rows included."""

    def greedy(self, i: int) -> TokenId:
        """Id of the largest logit of row *i*, lowest id on a tie; no vocabulary row is copied."""

    def logits(self, i: int) -> NDArray[np.float32]:
        """float32[vocab] view of row *i*; not to be written to."""


class TargetSession(Protocol):
    """
    Mutable target state of up to `max_sequences` sequences. Used by one thread at a time.

    Attributes:
        profile: Measured width classes, level and costs.
        context_size: Positions each sequence may hold.
        max_sequences: Sequence ids are 0 .. max_sequences-1.
        rollback_capacity: Rows that `truncate` can drop after a forward, or None where unlimited.
        capabilities: Names from `Capability`.
    """

    # Read-only members, so that an implementation may declare narrower types than these.
    @property
    def profile(self) -> ShapeProfile: ...
    @property
    def context_size(self) -> int: ...
    @property
    def max_sequences(self) -> int: ...
    @property
    def rollback_capacity(self) -> int | None: ...
    @property
    def capabilities(self) -> frozenset[str]: ...

    def open(self, seq: SeqId) -> None:
        """Make *seq* usable and empty."""

    def forward(self, batch: RowBatch, shape: WidthClass) -> Rows:
        """
        Evaluate the rows of all sequences in ONE pass, within *shape* (pad rows are the session's affair).

        Each chain must start at `length(seq)`; they come in ascending order of sequences. On an exception no sequence
        has changed.

        Raises:
            BackendError: The native library failed, or the rows do not fit.
        """

    def length(self, seq: SeqId) -> int:
        """Positions held for *seq*."""

    def can_truncate(self, seq: SeqId, length: int) -> bool:
        """Whether `truncate` to *length* would be exact."""

    def truncate(self, seq: SeqId, length: int) -> None:
        """
        Drop every row of *seq* from position *length* on.

        Raises:
            BackendError: Called although `can_truncate` is false, or the library refused.
        """

    def checkpoint(self, seq: SeqId, rows: int) -> object:
        """Retain what is needed to undo a forward of up to *rows* further rows of *seq*."""

    def can_restore(self, seq: SeqId, checkpoint: object) -> bool:
        """Whether `restore` would be exact; if not, the engine re-evaluates the sequence from its tokens."""

    def restore(self, seq: SeqId, checkpoint: object) -> None:
        """Bring *seq* back to the state *checkpoint* was taken in. A checkpoint can be restored more than once."""

    def close(self, seq: SeqId) -> None:
        """Forget *seq* and free its rows. After a failure the sequence id is not used again."""

    def shutdown(self) -> None:
        """Free everything. Idempotent."""


@frozen
class ChatMessage:
    """One turn of a chat: role is `system`, `user` or `assistant`."""

    role: str
    content: str


class Tokenizer(Protocol):
    """
    Text to ids and back, as the model file defines it.

    Attributes:
        vocab_size: Number of ids.
        bos_id: Begin-of-sequence id, or None.
        eos_id: The end-of-sequence id constrained decoding emits, or None.
        end_ids: Every end-of-generation id of the file.
        special_ids: Control ids; they render as no text.
        has_chat_template: Whether `encode_chat` can work.
    """

    # Read-only members: see `TargetSession`.
    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> TokenId | None: ...
    @property
    def eos_id(self) -> TokenId | None: ...
    @property
    def end_ids(self) -> frozenset[TokenId]: ...
    @property
    def special_ids(self) -> frozenset[TokenId]: ...
    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[TokenId]:
        """Ids of *text*; BOS is added where the file asks for it and *add_special*."""

    def token_bytes(self, token_id: TokenId) -> bytes:
        """The bytes *token_id* contributes to text; empty for control ids."""

    def token_name(self, token_id: TokenId) -> str:
        """The vocabulary's own spelling, control ids included, for messages and traces."""

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[TokenId]:
        """
        Ids of *messages* under the file's chat template, ready for the assistant's turn.

        Special ids come from the template only; a turn marker inside a message stays plain text.

        Raises:
            RequestError: No template in the file, or the template refuses the messages.
        """


def encode_raw(tokenizer: Tokenizer, text: str) -> list[TokenId]:
    """Ids of *text* as a prompt without a template; of an empty one BOS alone, where the model has it."""
    ids = tokenizer.encode(text)
    return [tokenizer.bos_id] if not ids and tokenizer.bos_id is not None else ids


@frozen
class SessionOptions:
    """
    What the core asks of a session.

    Args:
        context_size: Positions per sequence; None takes the smaller of 4096 and what the model was trained for.
        max_sequences: Sequences decoded together. A session that holds fewer is replicated.
        max_rows: Most rows of one decode step over all sequences.
        rollback_rows: Resident rollback states asked for, for targets whose memory cannot be cut freely
            (`spec_mtp_recurrent_snapshots`).
        hidden_layers: Block outputs that `Rows.hidden` must answer for.
        threads: Compute threads; None lets the backend choose.
    """

    context_size: int | None = None
    max_sequences: int = 1
    max_rows: int = 16
    rollback_rows: int = 0
    hidden_layers: tuple[int, ...] = ()
    threads: int | None = None

    def context_for(self, trained: int) -> int:
        """
        Positions per sequence of a model that was trained for *trained*.

        >>> SessionOptions().context_for(2048), SessionOptions().context_for(131072)
        (2048, 4096)
        """
        return min(_DEFAULT_CONTEXT, trained) if self.context_size is None else self.context_size


class TargetModel(Protocol):
    """Weights, tokenizer and identity of one model file."""

    # Read-only members: see `TargetSession`.
    @property
    def identity(self) -> TargetIdentity: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def trained_context(self) -> int: ...

    def open_session(self, options: SessionOptions) -> TargetSession:
        """
        Allocate state and measure (or read from cache) the session's profile.

        Raises:
            BackendError: The library cannot provide it.
            ConfigError: The options contradict each other or the model.
        """

    def facts(self) -> Mapping[str, Any]:
        """Build and model facts for `power doctor` and receipts."""

    def close(self) -> None:
        """Free the weights; open sessions are shut down first. Idempotent."""


@runtime_checkable
class SharedWeights(Protocol):
    """A target model whose embedding and output matrices drafters may share: most drafters carry neither."""

    def matrix(self, which: Literal["token_embd", "output"]) -> NDArray[np.float32]:
        """
        float32[vocab, hidden], read-only, computed once and kept; for tied weights both are the same array.

        `output` is the matrix alone; a final norm's gain is not folded in.
        """


@runtime_checkable
class SessionSizes(Protocol):
    """A target model that can say what a session takes before there is one: needed where memory is bounded."""

    def session_bytes(self, options: SessionOptions) -> int:
        """The most bytes a session of *options* can take: caches, copies of its state, buffers; not the weights."""


@runtime_checkable
class TargetBackend(Protocol):
    """What a plugin's target factory returns."""

    def claims(self, path: Path) -> bool:
        """Whether *path* looks like this backend's format: a look at suffix or magic, no more."""

    def load(self, path: Path) -> TargetModel:
        """
        Check and load *path*.

        Raises:
            ArtifactError: The file is damaged, foreign or unsupported; native code has not seen it.
        """
