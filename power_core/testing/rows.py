"""What a scripted forward answers, for as long as it may be asked."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.shapes import ShapeIdentity
from power_core.testing.faults import Strict
from power_core.testing.numerics import Numerics, State
from power_core.types import SeqId, TokenId

__all__ = ["Chain", "ForwardRecord", "RowState", "ScriptedRows"]


@frozen
class Chain:
    """The rows of one sequence in a forward; the last *outputs* of them were read back."""

    seq: SeqId
    start: int
    tokens: tuple[TokenId, ...]
    outputs: int


@frozen
class ForwardRecord:
    """
    One forward that took place.

    Args:
        chains: Its rows, by sequence.
        width: Rows computed, pad rows included.
        identity: The width class it ran in.
    """

    chains: tuple[Chain, ...]
    width: int
    identity: ShapeIdentity

    @property
    def rows(self) -> int:
        """Rows of the batch, pad rows not counted."""
        return sum(len(chain.tokens) for chain in self.chains)


@frozen
class RowState:
    """A row: `tokens[:end]` is the prefix it ends, *state* the digest of that prefix."""

    tokens: Sequence[TokenId]
    end: int
    state: State
    output: bool


class ScriptedRows:
    """
    A `power_core.target.Rows`. A row that was not asked for, or a late question, is a violation.

    Args:
        owner: The session; it counts the calls `rows.greedy`, `rows.logits` and `rows.hidden`.
        numerics: Computes the answers, when they are asked for.
        rows: The rows of the batch, in order.
        width: Rows computed, pad rows included.
        layers: Blocks that `hidden` answers for.
    """

    def __init__(
        self, owner: Strict, numerics: Numerics, rows: Sequence[RowState], width: int, layers: Collection[int]
    ) -> None:
        self._owner = owner
        self._numerics = numerics
        self._rows = rows
        self._layers = layers
        self._expired = False
        self.width = width

    def expire(self) -> None:
        """Called by the session at its next forward."""
        self._expired = True

    def greedy(self, i: int) -> TokenId:
        self._owner.faults.enter("rows.greedy")
        answer = int(np.argmax(self._row(i)))
        self._owner.faults.leave("rows.greedy")
        return answer

    def logits(self, i: int) -> NDArray[np.float32]:
        self._owner.faults.enter("rows.logits")
        answer = self._row(i)
        self._owner.faults.leave("rows.logits")
        return answer

    def hidden(self, i: int | slice, layer: int) -> NDArray[np.float32]:
        self._owner.faults.enter("rows.hidden")
        self._owner.require(layer in self._layers, f"hidden states of layer {layer} were not ordered")
        wanted = range(len(self._rows))[i] if isinstance(i, slice) else [i]
        for row in wanted:
            self._check(row)
        states = [self._numerics.hidden(self._rows[row].state, layer) for row in wanted]
        answer = np.stack(states) if isinstance(i, slice) else states[0]
        self._owner.faults.leave("rows.hidden")
        return answer

    def position(self, i: int) -> int:
        """The position of row *i*, for tests; a real backend's rows do not answer this."""
        return self._rows[i].end - 1

    def _row(self, i: int) -> NDArray[np.float32]:
        self._check(i)
        row = self._rows[i]
        self._owner.require(row.output, f"row {i} was read without outputs[{i}]")
        return self._numerics.row(row.state, row.tokens[: row.end])

    def _check(self, i: int) -> None:
        self._owner.require(not self._expired, "rows were read after the session's next forward")
        self._owner.require(0 <= i < len(self._rows), f"row {i} of {len(self._rows)} was read")
