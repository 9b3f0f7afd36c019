"""
Draft contexts: a drafter's weights evaluated natively, beside the target, by the target's own backend.

A target session with the capability `draft-context` opens them; the plugin of the strategy keeps the
policy (what to inject, what to propose, where to cut). The core itself never uses this protocol: it is
here so that backend plugins and drafter plugins need not know each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.types import SeqId, TokenId

__all__ = ["NEXTN_STATE", "DraftBlock", "DraftContext", "DraftContextHost", "DraftRows"]

NEXTN_STATE: Final = -1
"""
In `SessionOptions.hidden_layers` and for `Rows.hidden`: the state that the target's own prediction (NextN) layers
read, which is no block's output. Only sessions of targets that carry such layers give it; they have the capability
`nextn` when they were asked for it.
"""


@frozen(eq=False)
class DraftBlock:
    """
    Rows of one sequence in a draft forward.

    Args:
        seq: The sequence.
        position: Absolute position of the first row: any for an empty sequence, else where its last row ended.
        tokens: One id a row.
        hidden: float32[rows, hidden] given beside the tokens (MTP), or None.
        outputs: Last rows whose logits are read, None for all. A block drafter (DFlash, DSpark) reads all or none.
    """

    seq: SeqId
    position: int
    tokens: Sequence[TokenId]
    hidden: NDArray[np.float32] | None = None
    outputs: int | None = None


class DraftRows(Protocol):
    """Results of a draft forward, rows of all blocks in order; valid until the context's next call."""

    def logits(self, i: int) -> NDArray[np.float32]:
        """
        float32[vocab] of row *i*, read-only, over the target's vocabulary; ids outside a reduced draft vocabulary
        are -inf. A DSpark row carries the Markov bias of its own greedy chain.

        Raises:
            BackendError: The row has no logits, holds NaN, or a later call took the memory.
        """

    def extra(self, i: int) -> NDArray[np.float32]:
        """
        float32[n] of row *i* beside the logits: an MTP head's hidden state, DSpark's confidence (one number),
        DFlash2's lattice (top_k ids as floats, not sorted, then top_k x top_k scores [predecessor][candidate];
        position 1 has one predecessor, the anchor, in every row of its scores, and position 0 has no lattice).

        An MTP row's state is there for every row, whatever `DraftBlock.outputs` says.

        Raises:
            BackendError: As `logits`.
            CapabilityError: The artifact has no such output.
        """


class DraftContext(Protocol):
    """
    Draft state of the target session's sequences. Used by the session's thread.

    Rows are of two kinds: *injected* ones (target features) stay, *drafted* ones are removed with `truncate`
    before the next injection.
    """

    def open(self, seq: SeqId) -> None:
        """Make *seq* usable and empty."""

    def close(self, seq: SeqId) -> None:
        """Forget *seq*."""

    def end_position(self, seq: SeqId) -> int | None:
        """The position after the last row held, or None where there is none."""

    @property
    def max_rows(self) -> int:
        """Most rows of one `forward` of a block drafter; injections and MTP rows are split inside."""

    def inject(self, seq: SeqId, position: int, features: NDArray[np.float32]) -> None:
        """
        Add target features float32[rows, width] at absolute positions *position*, *position* + 1, ...

        Any position may come first; after that each call continues where the last row ended. Not for MTP, whose
        rows pair a token with the state before it: those go through `forward`.

        Raises:
            BackendError: The shape or the position does not fit (nothing was evaluated), or the library failed.
        """

    def forward(self, blocks: Sequence[DraftBlock], *, logits: bool = True) -> DraftRows:
        """
        Evaluate *blocks* in one pass; their rows stay until they are truncated.

        Args:
            blocks: At most one a sequence.
            logits: Whether logits are read; artifacts whose answer is `DraftRows.extra` alone need none.

        Raises:
            BackendError: The rows do not fit (nothing was evaluated), or the library failed.
        """

    def truncate(self, seq: SeqId, length: int) -> None:
        """Drop every row of *seq* from absolute position *length* on."""

    def shutdown(self) -> None:
        """Free everything; called before the target session's own shutdown. Idempotent."""


@runtime_checkable
class DraftContextHost(Protocol):
    """A target session with the capability `draft-context`."""

    def open_draft_context(self, path: Path | None) -> DraftContext:
        """
        Load the drafter *path*, or with None the prediction layers inside the target's own file.

        Raises:
            ArtifactError: The file would abort or be misread by the library; native code has not seen it.
            CapabilityError: This target or this build of the library cannot.
        """
