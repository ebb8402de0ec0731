"""Small training programs for tests of rules."""

from __future__ import annotations

import torch
from torch import nn

import tensortap as tap


def model(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 2))


def sgd(net: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def train(net, optimizer, step=None, steps=25, hints=False, **options):
    """Return rule and name of the alerts, or the hints, of a program."""
    if step is None:

        def step():
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()

    with tap.track(net, optimizer=optimizer, alerts=True, **options) as tracker:
        for _ in range(steps):
            step()
            tracker.step()
    found = tracker.hints if hints else tracker.alerts
    return {(alert.rule, alert.name) for alert in found}
