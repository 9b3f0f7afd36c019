"""Results of a draft forward."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from power_core.errors import BackendError, CapabilityError
from power_llamacpp.draft_facts import DraftFacts, DraftKind

__all__ = ["LlamaCppDraftRows"]


class LlamaCppDraftRows:
    """
    Rows of one draft forward, valid until the context's next.

    Args:
        facts: What the drafter is.
        logits: float32[outputs, vocab].
        ordinals: int[rows]; for each row its row in *logits*, or -1 where it has none.
        states: float32[rows, hidden] given beside the logits, or None where the drafter gives none.
        is_current: Whether the memory behind them still holds this forward.
    """

    __slots__ = ("_facts", "_is_current", "_logits", "_ordinals", "_states")

    def __init__(
        self,
        facts: DraftFacts,
        logits: NDArray[np.float32],
        ordinals: NDArray[np.intp],
        states: NDArray[np.float32] | None,
        is_current: Callable[[], bool],
    ) -> None:
        self._facts = facts
        self._logits = logits
        self._ordinals = ordinals
        self._states = states
        self._is_current = is_current

    def logits(self, i: int) -> NDArray[np.float32]:
        """
        float32[vocab], read-only: see `power_core.draft_context.DraftRows`.

        llama.cpp itself fills a reduced vocabulary up with -inf, so that rows always cover the target's.

        Raises:
            BackendError: The row has no logits or holds NaN, or the memory is gone.
        """
        self._check(i)
        ordinal = int(self._ordinals[i])
        if ordinal < 0:
            raise BackendError(f"draft row {i} has no logits", plugin="llamacpp", got=i, fix="ask for its output")
        row: NDArray[np.float32] = self._logits[ordinal]
        largest = float(row.max())  # NaN where there is one
        if not isfinite(largest):
            raise _damaged(i, largest)
        return row

    def extra(self, i: int) -> NDArray[np.float32]:
        """
        float32[n], read-only, beside the logits of row *i*: see `power_core.draft_context.DraftRows`.

        Row 0 of a DSpark block that drafts behind a bonus anchor has no confidence: the number there means nothing.

        Raises:
            BackendError: There is no such row, it holds a number that is not finite, or the memory is gone.
            CapabilityError: The drafter has nothing beside its logits.
        """
        self._check(i)
        width = {
            DraftKind.MTP: self._facts.hidden_size,
            DraftKind.DSPARK: 1 if self._facts.has_confidence else 0,
            DraftKind.DFLASH2: self._facts.top_k * (self._facts.top_k + 1),
            DraftKind.DFLASH: 0,
        }[self._facts.kind]
        if not width or self._states is None:
            raise CapabilityError(
                f"this {self._facts.kind} drafter gives nothing beside its logits",
                plugin="llamacpp",
                got=str(self._facts.kind),
                fix="read the logits only",
            )
        row: NDArray[np.float32] = self._states[i, :width]
        if not np.isfinite(row).all():
            raise _damaged(i, float(row[np.argmin(np.isfinite(row))]))
        return row

    def _check(self, i: int) -> None:
        if not self._is_current():
            raise BackendError("these draft rows are gone", plugin="llamacpp", fix="read them before the next call")
        if not 0 <= i < len(self._ordinals):
            expected = f"0 to {len(self._ordinals) - 1}"
            raise BackendError(f"there is no draft row {i}", plugin="llamacpp", got=i, expected=expected)


def _damaged(i: int, value: float) -> BackendError:
    return BackendError(
        f"draft row {i} holds {value}",
        plugin="llamacpp",
        got=value,
        expected="finite numbers",
        fix="check the drafter file against its digest",
    )
