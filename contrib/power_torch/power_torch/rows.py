"""Results of one forward, read back row by row."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray

from power_core.errors import BackendError, CapabilityError
from power_core.types import TokenId
from power_torch.network import Outputs

__all__ = ["TorchRows"]


class TorchRows:
    """
    Rows of one forward, valid until the session's next.

    Args:
        outputs: What the network computed.
        layers: The blocks whose outputs it kept.
        ordinals: int[rows]; for each row of the batch its row of the logits, or -1 where none was asked for.
        width: Rows computed, pad rows included.
        is_current: Whether the session is open and has not gone on to another forward.
    """

    __slots__ = ("_greedy", "_hidden", "_is_current", "_layers", "_logits", "_ordinals", "_read", "width")

    def __init__(
        self,
        outputs: Outputs,
        layers: tuple[int, ...],
        ordinals: NDArray[np.intp],
        width: int,
        is_current: Callable[[], bool],
    ) -> None:
        self._logits = outputs.logits
        self._hidden: torch.Tensor | NDArray[np.float32] = outputs.hidden
        self._layers = layers
        self._ordinals = ordinals
        self._is_current = is_current
        self._read: dict[int, NDArray[np.float32]] = {}
        self._greedy: tuple[list[int], list[float]] | None = None
        self.width = width

    def greedy(self, i: int) -> TokenId:
        """
        Id of the largest logit of row *i*, lowest id on a tie.

        On an accelerator the ids of all rows come back at once, and no vocabulary row does.

        Raises:
            BackendError: As `logits`.
        """
        ordinal = self._ordinal(i)
        if self._logits is None or self._logits.device.type == "cpu":
            row = self._row(ordinal)
            best = int(row.argmax())  # the first NaN where there is one, so that one look at the winner finds both
            largest = float(row[best])
        else:
            if self._greedy is None:
                largest_logits, ids = self._logits.float().max(-1)
                self._greedy = ids.tolist(), largest_logits.tolist()
            best, largest = self._greedy[0][ordinal], self._greedy[1][ordinal]
        if not isfinite(largest):
            raise _damaged(i, largest)
        return best

    def logits(self, i: int) -> NDArray[np.float32]:
        """
        float32[vocab], read-only, of row *i*.

        Raises:
            BackendError: The row holds NaN or a positive infinity; it was not asked for; or a later forward or
                the session's end made it invalid.
        """
        row = self._row(self._ordinal(i))
        largest = float(row.max())  # NaN where there is one
        if not isfinite(largest):
            raise _damaged(i, largest)
        return row

    def hidden(self, i: int | slice, layer: int) -> NDArray[np.float32]:
        """
        float32[hidden] output of block *layer* for row *i*, or float32[rows, hidden] for a slice; read-only.

        Raises:
            BackendError: There is no such row, or a later forward or the session's end made it invalid.
            CapabilityError: The layer is not among those the session was opened for.
        """
        self._check_current()
        if layer not in self._layers:
            raise CapabilityError(
                f"the output of block {layer} was not kept",
                plugin="torch",
                got=layer,
                expected=f"one of {list(self._layers)}",
                fix="name it in SessionOptions.hidden_layers",
            )
        n = len(self._ordinals)
        if isinstance(i, int) and not 0 <= i < n:
            raise BackendError(f"there is no row {i}", plugin="torch", got=i, expected=f"0 to {n - 1}")
        if isinstance(self._hidden, torch.Tensor):
            self._hidden = self._hidden.cpu().numpy()
            self._hidden.flags.writeable = False
        values: NDArray[np.float32] = self._hidden[self._layers.index(layer), :n][i]
        return values

    def _row(self, ordinal: int) -> NDArray[np.float32]:
        row = self._read.get(ordinal)
        if row is None:
            if self._logits is None:
                raise BackendError("no row has an output", plugin="torch", fix="set `outputs` for it")
            row = self._read[ordinal] = self._logits[ordinal].float().cpu().numpy()
            row.flags.writeable = False
        return row

    def _ordinal(self, i: int) -> int:
        self._check_current()
        ordinal = int(self._ordinals[i]) if 0 <= i < len(self._ordinals) else -1
        if ordinal < 0:
            raise BackendError(f"row {i} has no output", plugin="torch", got=i, fix="set `outputs` for it")
        return ordinal

    def _check_current(self) -> None:
        if not self._is_current():
            raise BackendError("these rows are gone", plugin="torch", fix="read them before the next forward")


def _damaged(i: int, largest: float) -> BackendError:
    return BackendError(
        f"the largest logit of row {i} is {largest}",
        plugin="torch",
        got=largest,
        expected="a finite number",
        fix="check the model file against its digest",
    )
