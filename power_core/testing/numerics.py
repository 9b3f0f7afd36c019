"""
What a scripted target computes: logits as a pure function of the tokens before them.

Every position carries a 64-bit digest of its prefix, extended by one token at a time. A second digest
says which forwards of the prefix ran outside the decode width class, as a real model's cached state
does: it is 0 while none did, and otherwise disturbs the logits by a little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import ArrayLike, NDArray

from power_core.types import TokenId

__all__ = ["LogitsFunction", "Numerics", "State", "next_table"]

LogitsFunction = Callable[[tuple[TokenId, ...]], ArrayLike]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_CACHED_ROWS = 8192


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@frozen
class State:
    """
    Where a sequence stands after one position.

    Args:
        prefix: Digest of the tokens so far.
        drift: Digest of the forwards outside the decode class, 0 where there were none.
    """

    prefix: int
    drift: int = 0


class Numerics:
    """
    The arithmetic of a scripted target.

    Args:
        vocab_size: Number of ids.
        seed: Two seeds are two models.
        spread: Logits lie in [-spread, spread); the smaller, the flatter the distribution.
        order: Only the last *order* tokens count, so that texts repeat themselves; None counts them all.
        logits: Replaces the digest's logits by those of the tokens so far.
        drift: Size of the disturbance outside the decode class, in logits.
        hidden_size: Length of a hidden state.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        seed: int = 0,
        spread: float = 4.0,
        order: int | None = None,
        logits: LogitsFunction | None = None,
        drift: float = 2.0,
        hidden_size: int = 8,
    ) -> None:
        self.vocab_size = vocab_size
        self.seed = _mix(seed + _GOLDEN)
        self.spread = spread
        self.order = order
        self.function = logits
        self.drift = drift
        self.hidden_size = hidden_size
        self.start = State(self.seed)
        self._lanes = np.arange(1, max(vocab_size, hidden_size) + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._rows: dict[State, NDArray[np.float32]] = {}

    def extend(self, state: State, token: TokenId, *, drifts: bool) -> State:
        """The state after *token*; *drifts* where its forward ran outside the decode class."""
        prefix = _mix((state.prefix ^ (token + 1)) * _GOLDEN & _MASK)
        # Once disturbed, the digest goes on telling apart in which class each further token was evaluated.
        drift = _mix(prefix ^ state.drift ^ (1 if drifts else 2)) if drifts or state.drift else 0
        return State(prefix, drift)

    def row(self, state: State, tokens: Sequence[TokenId]) -> NDArray[np.float32]:
        """
        Logits after *tokens*, float32[vocab], read-only.

        Args:
            state: The state after *tokens*.
            tokens: The prefix; read only where a function or an order was given.
        """
        row = self._rows.get(state)
        if row is None:
            if len(self._rows) >= _CACHED_ROWS:
                self._rows.clear()
            row = self._compute(state, tokens)
            row.setflags(write=False)
            self._rows[state] = row
        return row

    def forget(self) -> None:
        """Drop the cached rows; they are computed again when they are asked for."""
        self._rows.clear()

    def _compute(self, state: State, tokens: Sequence[TokenId]) -> NDArray[np.float32]:
        if self.function is not None:
            row = np.array(self.function(tuple(tokens)), np.float32)  # a copy: the caller may reuse its array
        elif self.order is not None:
            suffix = self.start
            for token in tokens[max(0, len(tokens) - self.order) :]:
                suffix = self.extend(suffix, token, drifts=False)
            row = self._uniform(suffix.prefix, self.vocab_size, self.spread)
        else:
            row = self._uniform(state.prefix, self.vocab_size, self.spread)
        if state.drift:
            row = row + self._uniform(state.drift, self.vocab_size, self.drift)
        return row

    def hidden(self, state: State, layer: int) -> NDArray[np.float32]:
        """float32[hidden_size], read-only: a pure function of the prefix and the layer."""
        vector = self._uniform(_mix(state.prefix ^ state.drift ^ (layer + 1)), self.hidden_size, 1.0)
        vector.setflags(write=False)
        return vector

    def _uniform(self, digest: int, count: int, size: float) -> NDArray[np.float32]:
        """float32[count] in [-size, size), a pure function of *digest*."""
        bits = self._lanes[:count] + np.uint64(digest)  # wraps, as intended
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
        unit = (bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
        return (unit * 2 - 1) * np.float32(size)


def next_table(successors: Sequence[TokenId]) -> LogitsFunction:
    """
    A target that answers token t with `successors[t]`, whatever came before it.

    >>> next_table([1, 0])((0, 1)).tolist()
    [1.0, 0.0]
    """
    rows = np.eye(len(successors), dtype=np.float32)

    def logits(tokens: tuple[TokenId, ...]) -> NDArray[np.float32]:
        row: NDArray[np.float32] = rows[successors[tokens[-1]]]
        return row

    return logits
