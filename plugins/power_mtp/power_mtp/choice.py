"""Reading a row of draft logits: the likeliest token, how likely, and by how much."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_mtp.config import MtpConfig

__all__ = ["Choice", "choose"]


@frozen
class Choice:
    """
    The two likeliest rows of a softmax.

    Args:
        row: The likeliest.
        p0: Its probability.
        p1: The second one's.
    """

    row: int
    p0: float
    p1: float

    def is_cut(self, config: MtpConfig) -> bool:
        """Whether the draft ends before this token."""
        return self.p0 - self.p1 < config.draft_margin or self.p0 < config.draft_p_min


def choose(logits: NDArray[np.float32]) -> Choice | None:
    """
    The likeliest row of *logits* (float32[rows]), lowest on a tie; None where no logit is finite.

    >>> choice = choose(np.log(np.array([0.1, 0.6, 0.3], np.float32)))
    >>> choice.row, round(choice.p0, 3), round(choice.p1, 3)
    (1, 0.6, 0.3)
    """
    row = int(np.argmax(logits))  # the first NaN, if there is one
    top = logits[row]
    if not np.isfinite(top):
        return None
    total = float(np.exp(logits - top).sum())
    below, above = logits[:row], logits[row + 1 :]
    second = max(float(part.max()) for part in (below, above) if len(part)) if len(logits) > 1 else -np.inf
    return Choice(row, 1.0 / total, float(np.exp(second - top)) / total)
