"""Optimizers that compute the gradients by calling a closure."""

from __future__ import annotations

import pytest
import torch

import tensortap as tap
from tensortap.core.record import Kind


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS])
def test_gradients_belong_to_their_step(optimizer):
    model = torch.nn.Linear(3, 1)
    optimizer = optimizer(model.parameters(), lr=0.1)
    expected = []
    with tap.track(model, optimizer) as tracker:
        for step in range(4):
            x = torch.full((2, 3), step + 1.0)

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            expected.append(model.weight.grad.abs().max().item())
            optimizer.zero_grad()  # before tracker.step()
            tracker.step()
    found = [
        record.stats.max_abs
        for record in tracker.records
        if record.kind is Kind.WEIGHT_GRADIENT and record.name == "weight"
    ]
    assert found == expected
