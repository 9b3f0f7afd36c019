"""Log-probabilities of a raw target row."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from power_core.request import TokenLogprobs
from power_core.sampling.filters import check_row, largest
from power_core.types import TokenId

__all__ = ["token_logprobs"]


def token_logprobs(row: NDArray[np.float32], token_id: TokenId, top: int) -> TokenLogprobs:
    """
    Log-softmax in float64 of *token_id* and the *top* most likely tokens, ties by id.

    Args:
        row: float32[vocab], as the target gave it: before bias, penalties, grammar and processors.
        token_id: The emitted token. It is in the list only where it is among the most likely.
        top: Longest list wanted; tokens of probability 0 are left out.

    Raises:
        RequestError: Every logit is -inf.
        BackendError: A logit is NaN or +inf.
    """
    check_row(row, "logprobs")
    highest = float(row.max())
    log_total = math.log(float(np.exp(row.astype(np.float64) - highest).sum()))

    def logprob(i: TokenId) -> float:
        return float(row[i]) - highest - log_total  # in this order: large logits must cancel first

    ids = largest(row, top) if top else ()
    ranked = tuple((int(i), logprob(i)) for i in ids if row[i] != -math.inf)
    return TokenLogprobs(token_id, logprob(token_id), ranked)
