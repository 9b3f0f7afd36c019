"""
Hidden states of rows beside a kept prompt, so that a drafter is told of rows that a hit does not evaluate.

They belong to exactly the tokens of their entry, and are found, cut, counted and dropped with it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.drafter import HiddenRows
from power_core.errors import BackendError
from power_core.prefix import Snapshot
from power_core.types import SeqId

__all__ = ["MOST_KEPT", "MOST_TOLD", "KeptRows", "RowHistory", "RowStore", "row_snapshot"]

MOST_KEPT = 512  # rows: of a conversation's last turns, whose cut a next prompt is likely to begin with
# Reused rows that a drafter is told of. Fewer cost acceptance where little of a prompt is new; more brought nothing,
# take time before the first proposal, and may reach beyond what a small drafter was trained on.
MOST_TOLD = 128
_HEADER_MOST = 1 << 16


@frozen(eq=False)
class KeptRows:
    """
    Copies of rows that were committed. Never written to.

    Args:
        layers: Target block -> float32[rows, hidden].
        position: Absolute position of the first row.
        count: Rows.
    """

    layers: Mapping[int, NDArray[np.float32]]
    position: int
    count: int

    def hidden(self, i: int | slice, layer: int) -> NDArray[np.float32]:
        return self.layers[layer][i]

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.position + self.count

    @property
    def nbytes(self) -> int:
        """What they take."""
        return sum(rows.nbytes for rows in self.layers.values())

    def part(self, start: int, end: int) -> KeptRows | None:
        """Those of the positions from *start* up to *end*, not copied; None where there are none."""
        first, last = max(start, self.position), min(end, self.end)
        if first >= last:
            return None
        block = slice(first - self.position, last - self.position)
        return KeptRows({layer: rows[block] for layer, rows in self.layers.items()}, first, last - first)

    def told(self) -> HiddenRows:
        """As a drafter is told of them."""
        return HiddenRows(self, 0, self.count, self.position)


class RowHistory:
    """
    The last rows of one sequence, for an entry of the prompt cache.

    Args:
        layers: Target blocks that its drafter reads.
        limit: Position from which on nothing is kept.
    """

    def __init__(self, layers: Iterable[int], limit: int) -> None:
        self._layers = tuple(layers)
        self._limit = limit
        self._blocks: list[KeptRows] = []  # without gaps between them

    def begin(self, rows: KeptRows, length: int) -> HiddenRows | None:
        """
        Begin with the part of *rows* that ends at position *length*: a hit brought it.

        Returns:
            What of it the drafter is to be told of; None where the last row, or one of the blocks, is not known.
        """
        part = rows.part(length - MOST_KEPT, length)
        if part is None or part.end != length or not part.layers.keys() >= set(self._layers):
            return None
        part = KeptRows({layer: part.layers[layer] for layer in self._layers}, part.position, part.count)
        self._blocks = [part]
        first = max(part.count - MOST_TOLD, 0)
        return HiddenRows(part, first, part.count - first, part.position + first)

    def add(self, rows: HiddenRows) -> HiddenRows:
        """Copy *rows*, which follow those that were added. Returns the same rows, to be read at any time."""
        if rows.position >= self._limit:
            return rows
        block = slice(rows.start, rows.start + rows.count)
        states = {layer: rows.rows.hidden(block, layer).copy() for layer in self._layers}
        kept = KeptRows(states, rows.position, rows.count)
        self._blocks.append(kept)
        while self._blocks[0].end <= kept.end - MOST_KEPT:
            del self._blocks[0]
        return kept.told()

    def cut(self, length: int) -> None:
        """Forget the rows from position *length* on: their step was undone."""
        parts = (block.part(0, length) for block in self._blocks)
        self._blocks = [part for part in parts if part is not None]

    def last(self, length: int) -> KeptRows | None:
        """A copy of the last rows before position *length*, `MOST_KEPT` at most; None where they are not known."""
        parts = [block.part(length - MOST_KEPT, length) for block in self._blocks]
        found = [part for part in parts if part is not None]
        if not found or found[-1].end != length:
            return None
        layers = {layer: np.concatenate([part.layers[layer] for part in found]) for layer in self._layers}
        return KeptRows(layers, found[0].position, length - found[0].position)


class RowStore:
    """
    Keeps rows as a part of cached state; see `power_core.prefix.PrefixStore`.

    They are part of no sequence of the target, so that nothing is saved from one or loaded into one.
    """

    can_cut = True
    longest = None

    def save(self, seq: SeqId) -> Snapshot | None:  # noqa: ARG002 - rows come from steps, not from a session
        return None

    def load(self, seq: SeqId, snapshot: Snapshot, length: int) -> None:  # noqa: ARG002 - the protocol's
        raise BackendError("rows are no state of a target", who="prompt cache")

    def free(self, snapshot: Snapshot) -> None:
        pass

    def to_bytes(self, snapshot: Snapshot) -> bytes | None:
        rows = snapshot.payload
        if not isinstance(rows, KeptRows):
            return None
        facts = {"position": rows.position, "rows": rows.count, "layers": list(rows.layers)}
        head = json.dumps(facts).encode()
        head += b" " * (-len(head) % 4)  # so that the values lie where floats may
        return b"".join([struct.pack("<I", len(head)), head, *(each.tobytes() for each in rows.layers.values())])

    def from_bytes(self, data: bytes) -> Snapshot:
        try:
            return row_snapshot(_parse(data))
        except (ValueError, KeyError, TypeError, struct.error) as exc:
            raise BackendError(f"these are no rows: {type(exc).__name__}: {exc}", who="prompt cache") from exc


def row_snapshot(rows: KeptRows) -> Snapshot:
    """*rows* as a part of the entry that ends where they end."""
    return Snapshot(rows, rows.nbytes, rows.end, can_cut=True)


def _parse(data: bytes) -> KeptRows:
    (size,) = struct.unpack_from("<I", data)
    if size > _HEADER_MOST:
        raise ValueError(f"a header of {size} bytes")
    facts = json.loads(data[4 : 4 + size])
    layers, rows, position = [int(layer) for layer in facts["layers"]], int(facts["rows"]), int(facts["position"])
    if not layers or len(set(layers)) != len(layers) or rows < 1 or position < 0:
        raise ValueError(f"{rows} rows of {len(layers)} layers at {position}")
    values = np.frombuffer(data, np.float32, offset=4 + size).reshape(len(layers), rows, -1)
    if not values.size:
        raise ValueError("no values")
    return KeptRows(dict(zip(layers, values, strict=True)), position, rows)
