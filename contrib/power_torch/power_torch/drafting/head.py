"""Output heads: logits over all target ids, or over the rows of a reduced vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ReducedHead"]


class ReducedHead:
    """
    An output matrix whose rows stand for target ids.

    Args:
        matrix: [rows, hidden].
        ids: int64[rows], the target id of each row (`d2t`); None where row r is id r.
        logit_scale: Factor of the logits.
        softcap: Where positive, logits become softcap * tanh(logits / softcap).
    """

    def __init__(
        self, matrix: Tensor, ids: Tensor | None = None, *, logit_scale: float = 1.0, softcap: float = 0.0
    ) -> None:
        self.matrix = matrix
        self.ids = ids
        self.logit_scale = logit_scale
        self.softcap = softcap

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[..., rows] of *hidden* [..., hidden]."""
        logits = (hidden.to(self.matrix.dtype) @ self.matrix.T).float()
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap > 0 else logits

    def target_ids(self, rows: Tensor) -> Tensor:
        """The target ids that *rows* of the matrix stand for."""
        return rows if self.ids is None else self.ids[rows]

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """
        The *k* largest of each row of *logits*, best first.

        Returns:
            int64[..., k] target ids and their float32[..., k] logits.
        """
        best = torch.topk(logits, k, dim=-1)
        return self.target_ids(best.indices), best.values
