"""Which proposals the rows of one step go to, where all of them together do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

__all__ = ["share_rows"]

_UNKNOWN = 0.5  # chance of a token nobody has an estimate of: such proposals then share alike


def share_rows(wanted: Sequence[int], chances: Sequence[Sequence[float]], room: int) -> list[int]:
    """
    Give *room* rows to the proposed tokens that are likeliest to be used.

    A token is used where it and all before it are accepted, so a row is worth that chance, and the best
    set of rows is the likeliest ones: chances fall along a proposal, so a set is always of beginnings.

    Args:
        wanted: Tokens of each member's proposal that its policy wants checked.
        chances: For each member the chance that the first i+1 tokens are accepted, i = 0, 1, ...; may be
            shorter than what is wanted.
        room: Rows there are.

    Returns:
        Tokens of each proposal to check.

    >>> share_rows([3, 3], [[0.9, 0.8, 0.7], [0.5, 0.2, 0.1]], room=4)
    [3, 1]
    """
    if sum(wanted) <= room:
        return list(wanted)
    given = [0] * len(wanted)
    heap = [(-_chance(chances[i], 0), i) for i, most in enumerate(wanted) if most > 0]
    heapify(heap)
    for _ in range(room):  # fewer than are wanted, so that the heap lasts
        member = heap[0][1]
        given[member] += 1
        if given[member] < wanted[member]:
            heapreplace(heap, (-_chance(chances[member], given[member]), member))
        else:
            heappop(heap)
    return given


def _chance(chances: Sequence[float], position: int) -> float:
    return chances[position] if position < len(chances) else _UNKNOWN ** (position + 1)
