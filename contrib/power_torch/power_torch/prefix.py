"""
Copies of a sequence's cache rows for the prompt cache.

A row never changes once it is written, and position p is row p of every sequence and session: a copy goes where
evaluation would have put it. Any prefix of it can be loaded, windowed blocks included: their rows are all kept.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from power_core.errors import BackendError
from power_core.prefix import Snapshot
from power_core.types import SeqId

if TYPE_CHECKING:
    from power_torch.session import TorchSession

__all__ = ["TorchPrefixStore"]

PLUGIN = "torch"
_HEAD = struct.Struct("<8s4I")  # magic and the shape
_MAGIC = b"PWRTCH01"


@frozen
class TorchPrefixStore:
    """
    The `power_core.prefix.PrefixStore` of a session. Payloads are float32[layers, 2 * kv_heads, positions, head_dim].

    Args:
        session: Whose sequences are copied.
    """

    session: TorchSession
    can_cut = True
    longest = None

    def save(self, seq: SeqId) -> Snapshot | None:
        """The rows of *seq* as they are now, in main memory; None for an empty sequence."""
        length = self.session.length(seq)
        return self._snapshot(self.session.export_rows(seq)) if length else None

    def load(self, seq: SeqId, snapshot: Snapshot, length: int) -> None:
        """
        Give *seq*, which is open and empty, the state after the first *length* tokens.

        Raises:
            BackendError: The snapshot is none of this model's, or too short; *seq* is empty as before.
        """
        rows = snapshot.payload
        if not isinstance(rows, np.ndarray) or not 0 < length <= snapshot.length:
            raise BackendError("this is no copy of a state", plugin=PLUGIN, got=snapshot)
        self.session.import_rows(seq, rows[:, :, :length])

    def free(self, snapshot: Snapshot) -> None:
        """Nothing to do: the rows go with the snapshot."""

    def to_bytes(self, snapshot: Snapshot) -> bytes | None:
        """The snapshot for the disk."""
        rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = snapshot.payload  # type: ignore[assignment]  # made by `save`
        return _HEAD.pack(_MAGIC, *rows.shape) + rows.tobytes()

    def from_bytes(self, data: bytes) -> Snapshot:
        """
        A snapshot that `to_bytes` wrote.

        Raises:
            BackendError: The bytes are none, or of another model.
        """
        if len(data) >= _HEAD.size:
            magic, *shape = _HEAD.unpack_from(data)
            values = len(data) - _HEAD.size
            layers, heads, positions, width = shape
            if magic == _MAGIC and positions and values == 4 * layers * heads * positions * width:
                rows = np.frombuffer(data, "<f4", offset=_HEAD.size).reshape(shape)
                if self.session.can_import(rows):
                    return self._snapshot(rows)
        raise BackendError("the file holds no state of this model", plugin=PLUGIN, got=data[: len(_MAGIC)])

    def _snapshot(self, rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Snapshot:
        return Snapshot(rows, rows.nbytes, rows.shape[2], self.can_cut)
