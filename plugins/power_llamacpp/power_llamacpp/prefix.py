"""
Copies of a sequence's state for the prompt cache: llama.cpp's own bytes, loaded into another sequence or session.

A loaded sequence must compute what it would have computed: the same rows, in the same cells. A copy lists cells
in order and is loaded into an empty cache from the first cell on, where evaluation would have put them.
That fails for one kind of memory: copies of a sliding window leave out what it has passed, so that later cells move,
and sums over cells are grouped differently. Such a sequence is copied only while all of it is within the
window; where the cache itself forgets, none is.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.errors import BackendError
from power_core.prefix import Snapshot
from power_core.types import SeqId

if TYPE_CHECKING:
    from power_llamacpp.session import LlamaCppSession

__all__ = ["LlamaCppPrefixStore"]

PLUGIN = "llamacpp"
_HEAD = struct.Struct("<8sIB")  # magic, positions, whether it can be cut
_MAGIC = b"PWRLLM01"


@frozen
class LlamaCppPrefixStore:
    """
    The `power_core.prefix.PrefixStore` of a session.

    Args:
        session: Whose sequences are copied.
        can_cut: Whether a copy can be loaded in part: attention can, recurrent state cannot.
        longest: Positions up to which a copy is exact, or None for any number.
    """

    session: LlamaCppSession
    can_cut: bool
    longest: int | None

    def save(self, seq: SeqId) -> Snapshot | None:
        """The state of *seq* as it is now; None beyond `longest`."""
        length = self.session.length(seq)
        if not length or (self.longest is not None and length > self.longest):
            return None
        data = self.session.export_state(seq)
        return Snapshot(data, data.nbytes, length, self.can_cut)

    def load(self, seq: SeqId, snapshot: Snapshot, length: int) -> None:
        """
        Give *seq*, which is open and empty, the state after the first *length* tokens.

        Raises:
            BackendError: llama.cpp refuses it; *seq* is empty as before.
        """
        data = snapshot.payload
        if not isinstance(data, np.ndarray) or not 0 < length <= snapshot.length:
            raise BackendError("this is no copy of a state", plugin=PLUGIN, got=snapshot)
        if length < snapshot.length and not self.can_cut:
            raise BackendError(
                f"a state of {snapshot.length} positions cannot be loaded as one of {length}", plugin=PLUGIN, got=length
            )
        self.session.import_state(seq, data, snapshot.length, length)

    def free(self, snapshot: Snapshot) -> None:
        """Nothing to do: the bytes go with the snapshot."""

    def to_bytes(self, snapshot: Snapshot) -> bytes | None:
        """The snapshot for the disk."""
        data: NDArray[np.uint8] = snapshot.payload  # type: ignore[assignment]  # made by `save`
        return _HEAD.pack(_MAGIC, snapshot.length, snapshot.can_cut) + data.tobytes()

    def from_bytes(self, data: bytes) -> Snapshot:
        """
        A snapshot that `to_bytes` wrote.

        Raises:
            BackendError: The bytes are none.
        """
        try:
            magic, length, can_cut = _HEAD.unpack_from(data)
        except struct.error:
            magic, length, can_cut = b"", 0, False
        state = np.frombuffer(data, np.uint8)[_HEAD.size :]
        if magic != _MAGIC or not state.size or bool(can_cut) != self.can_cut:
            raise BackendError("the file holds no state of this kind of memory", plugin=PLUGIN, got=magic)
        return Snapshot(state, state.nbytes, length, self.can_cut)
