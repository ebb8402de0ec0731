"""How a loss was computed, derived from the gradient of an output."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tensortap.frameworks.torch.loss_gradients import LossProbe

TARGET = (torch.arange(64) % 3 == 0).float()
BINARY = F.binary_cross_entropy_with_logits


def facts(loss, scale=1.0, squeeze=False):
    torch.manual_seed(0)
    output = scale * torch.randn(64)
    output = (output.sigmoid() if squeeze else output).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(output), output)
    return LossProbe(output.detach()).facts(gradient)


@pytest.mark.parametrize("factor", [1.0, 1024.0, 0.25])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_binary_labels_of_any_scale(factor, reduction):
    right = facts(lambda x: factor * BINARY(x, TARGET, reduction=reduction))
    assert (right.function, right.applied_twice, right.wrong_label) == ("sigmoid", False, None)
    wrong = facts(lambda x: factor * BINARY(x, 2 * TARGET - 1, reduction=reduction))
    assert wrong.wrong_label == -1
    twice = facts(lambda x: factor * BINARY(x, TARGET, reduction=reduction), squeeze=True)
    assert twice.applied_twice


def test_labels_of_a_mean():
    assert facts(lambda x: BINARY(x, TARGET + 1)).wrong_label == 2


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_other_losses_are_not_taken_for_cross_entropy(scale):
    goal = scale * torch.linspace(-3, 3, 64)
    losses = (
        lambda x: F.l1_loss(x, goal),
        lambda x: F.mse_loss(x, goal),
        lambda x: F.huber_loss(x, goal),
        lambda x: F.relu(1 - (2 * TARGET - 1) * x).mean(),
        lambda x: x.mean(),
    )
    for loss in losses:
        found = facts(loss, scale)
        assert found is None or (found.wrong_label, found.applied_twice) == (None, False)
        found = facts(loss, scale, squeeze=True)
        assert found is None or (found.wrong_label, found.applied_twice) == (None, False)
