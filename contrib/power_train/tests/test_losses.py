"""The losses, against autograd."""

from __future__ import annotations

import pytest
import torch
from power_train.losses import IGNORED, head_loss, pass_weights, position_weights


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0])
def test_the_written_out_gradient_is_that_of_the_equation(variation: float) -> None:
    """Cross-entropy and total variation, rows without a label left out, more rows than a chunk."""
    generator = torch.Generator().manual_seed(0)
    rows, hidden, vocab = 300, 16, 40
    states = torch.randn(rows, hidden, generator=generator).bfloat16().float().requires_grad_()
    matrix = torch.randn(vocab, hidden, generator=generator).bfloat16()
    target = torch.randn(rows, hidden, generator=generator).bfloat16()
    labels = torch.randint(-1, vocab, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)

    found = head_loss(states, labels, weights, matrix, target_states=target if variation else None, variation=variation)
    found.loss.backward()
    gradient, states.grad = states.grad, None

    log_q = (states @ matrix.float().T).log_softmax(-1)
    p = (target.float() @ matrix.float().T).softmax(-1)
    kept = weights * (labels != IGNORED)
    entropy = -log_q.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    gap = (p - log_q.exp()).abs().sum(-1)
    expected = (kept * ((1 - variation) * entropy + variation * gap)).sum() / kept.sum()
    expected.backward()
    assert found.loss.item() == pytest.approx(expected.item(), rel=0.02)
    assert gradient is not None
    assert states.grad is not None
    assert torch.nn.functional.cosine_similarity(gradient.flatten(), states.grad.flatten(), dim=0) > 0.99
    if variation:
        assert torch.allclose(found.acceptance, (1 - gap / 2).detach(), atol=0.01)


def test_weights_decay_by_position_and_by_pass() -> None:
    """The first prediction weighs one, and each later one less by a constant factor."""
    assert torch.allclose(position_weights(3, 4.0), torch.tensor([1.0, 0.7788, 0.6065]), atol=1e-4)
    assert torch.allclose(pass_weights(3, 0.8), torch.tensor([1.0, 0.8, 0.64]))
