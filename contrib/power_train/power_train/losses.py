"""
Losses as published, over a reduced vocabulary, with their gradients written out.

The logits of a step would not fit in the cache, and autograd would keep them all: `head_loss` makes them in chunks
of rows, takes the gradient with respect to the states at once and forgets them.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["HeadResult", "head_loss", "pass_weights", "position_weights"]

_CHUNK = 256
IGNORED = -1


def position_weights(rows: int, gamma: float) -> Tensor:
    """
    DFlash's decay over a block's predictions, arXiv 2602.06036, section 4.2: w_k = exp(-(k - 1) / gamma), k = 1...

    An early mistake makes every later position worthless.
    """
    return torch.exp(-torch.arange(rows) / gamma)


def pass_weights(passes: int, decay: float) -> Tensor:
    """Weight decay^(k - 1) of MTP's k-th recurrent pass, as in EAGLE-3's training-time test (0.8)."""
    return decay ** torch.arange(passes).float()


@frozen(eq=False)
class HeadResult:
    """
    What the head did.

    Args:
        loss: Scalar with a gradient to the states.
        cross_entropy: Weighted mean over the rows, detached.
        acceptance: float32[rows]: 1 - TV(p, q), the chance that the target keeps a draft; 0 without a target.
        hits: bool[rows]: whether the likeliest token is the label.
    """

    loss: Tensor
    cross_entropy: float
    acceptance: Tensor
    hits: Tensor


def head_loss(
    states: Tensor,
    labels: Tensor,
    weights: Tensor,
    matrix: Tensor,
    *,
    target_states: Tensor | None = None,
    variation: float = 0.0,
) -> HeadResult:
    """
    Cross-entropy, and DSpark's total variation to the target's distribution, with their gradient.

        L = sum_i w_i [ (1 - a) * -log q_i(x_i)  +  a * sum_v |p_i(v) - q_i(v)| ] / sum_i w_i

    with q the drafter's distribution, p the target's (both over the reduced vocabulary), x the target's token and
    a = *variation*. DSpark, deepspec/trainer of deepseek-ai/DeepSpec; sum |p - q| is twice the total variation, and
    1 - TV the rate at which rejection sampling accepts (Leviathan et al., arXiv 2211.17192).

    Args:
        states: float32[rows, hidden].
        labels: int64[rows], rows of *matrix*, or `IGNORED`.
        weights: float32[rows].
        matrix: bfloat16[draft vocabulary, hidden]; frozen.
        target_states: bfloat16[rows, hidden], states of the target that give p through *matrix*.
        variation: a; 0 without *target_states*.
    """
    weights = weights * (labels != IGNORED)
    outputs: tuple[Tensor, Tensor, Tensor, Tensor] = _HeadLoss.apply(  # type: ignore[no-untyped-call]  # torch's own
        states, labels, weights, matrix, target_states, variation
    )
    loss, entropy, acceptance, hits = outputs
    return HeadResult(loss, float(entropy), acceptance, hits)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        labels: Tensor,
        weights: Tensor,
        matrix: Tensor,
        target_states: Tensor | None,
        variation: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        total = weights.sum().clamp(min=1e-6)
        gradient = torch.empty_like(states)
        entropy, distance = torch.zeros(()), torch.zeros(())
        acceptance = torch.zeros(len(states))
        hits = torch.zeros(len(states), dtype=torch.bool)
        for start in range(0, len(states), _CHUNK):
            part = slice(start, start + _CHUNK)
            weight = weights[part] / total
            label = labels[part].clamp(min=0)[:, None]
            logits = (states[part].bfloat16() @ matrix.T).float()
            hits[part] = logits.argmax(-1) == labels[part]
            q = logits.softmax(-1)
            entropy += (weight * -q.gather(1, label).squeeze(1).clamp(min=1e-30).log()).sum()
            if target_states is None:
                slope = q
                slope.scatter_add_(1, label, torch.full_like(label, -1, dtype=q.dtype))
            else:
                p = (target_states[part] @ matrix.T).float().softmax(-1)
                difference = q - p
                gap = difference.abs().sum(-1)
                acceptance[part] = 1 - gap / 2
                distance += (weight * gap).sum()
                sign = difference.sign_()
                inner = (q * sign).sum(-1, keepdim=True)  # d sum|p - q| / dz = q * (sign - <q, sign>)
                slope = sign.sub_(inner).mul_(variation).add_(1 - variation).mul_(q)
                slope.scatter_add_(1, label, torch.full_like(label, -1, dtype=q.dtype) * (1 - variation))
            gradient[part] = (slope.mul_(weight[:, None])).bfloat16() @ matrix
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy, acceptance, hits)
        return (1 - variation) * entropy + variation * distance, entropy, acceptance, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None, None
