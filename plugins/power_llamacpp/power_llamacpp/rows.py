"""Results of one forward, as views of llama.cpp's own buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from power_core.errors import BackendError, CapabilityError
from power_core.types import TokenId

__all__ = ["LlamaCppRows"]


class LlamaCppRows:
    """
    Rows of one forward, valid until the session's next.

    Args:
        logits: float32[outputs, vocab]; a view of memory that the next forward overwrites.
        ordinals: int[rows]; for each row of the batch its row in *logits*, or -1 where none was asked for.
        width: Rows computed, pad rows included.
        hidden: float32[rows, hidden] by layer; views like *logits*.
        is_current: Whether the memory behind *logits* and *hidden* still holds this forward.
    """

    __slots__ = ("_hidden", "_is_current", "_logits", "_ordinals", "width")

    def __init__(
        self,
        logits: NDArray[np.float32],
        ordinals: NDArray[np.intp],
        width: int,
        hidden: Mapping[int, NDArray[np.float32]],
        is_current: Callable[[], bool],
    ) -> None:
        self._hidden = hidden
        self._logits = logits
        self._ordinals = ordinals
        self._is_current = is_current
        self.width = width

    def greedy(self, i: int) -> TokenId:
        """
        Id of the largest logit of row *i*, lowest id on a tie.

        Raises:
            BackendError: As `logits`.
        """
        row = self._row(i)
        best = int(row.argmax())  # the first NaN where there is one, so that one look at the winner finds both
        if not isfinite(row[best]):
            raise _damaged(i, float(row[best]))
        return best

    def logits(self, i: int) -> NDArray[np.float32]:
        """
        float32[vocab], read-only view of row *i*.

        Raises:
            BackendError: The row holds NaN or a positive infinity; it was not asked for; or a later forward or
                the session's end took the memory.
        """
        row = self._row(i)
        largest = float(row.max())  # NaN where there is one
        if not isfinite(largest):
            raise _damaged(i, largest)
        return row

    def hidden(self, i: int | slice, layer: int) -> NDArray[np.float32]:
        """
        float32[hidden], read-only view of the output of block *layer* for row *i*; float32[rows, hidden] for a slice.

        Raises:
            BackendError: There is no such row, or a later forward or the session's end took the memory.
            CapabilityError: The session was not opened with *layer* among its hidden layers.
        """
        self._check_current()
        states = self._hidden.get(layer)
        if states is None:
            raise CapabilityError(
                f"there are no hidden states of layer {layer}",
                plugin="llamacpp",
                got=layer,
                expected=f"one of {sorted(self._hidden)}" if self._hidden else None,
                fix="name it in SessionOptions.hidden_layers",
            )
        if not isinstance(i, slice) and not 0 <= i < len(states):
            raise BackendError(f"there is no row {i}", plugin="llamacpp", got=i, expected=f"0 to {len(states) - 1}")
        return states[i]

    def _check_current(self) -> None:
        if not self._is_current():
            raise BackendError("these rows are gone", plugin="llamacpp", fix="read them before the next forward")

    def _row(self, i: int) -> NDArray[np.float32]:
        self._check_current()
        ordinal = self._ordinals[i] if 0 <= i < len(self._ordinals) else -1
        if ordinal < 0:
            raise BackendError(f"row {i} has no output", plugin="llamacpp", got=i, fix="set `outputs` for it")
        row: NDArray[np.float32] = self._logits[ordinal]
        return row


def _damaged(i: int, largest: float) -> BackendError:
    """llama.cpp computes on with NaN and reports success; without this, id 0 would be the answer."""
    return BackendError(
        f"the largest logit of row {i} is {largest}",
        plugin="llamacpp",
        got=largest,
        expected="a finite number",
        fix="check the model file against its digest",
    )
