"""Errors that other tools of this kind make, one test each."""

import numpy as np
import torch
from torch import nn

import tensortap as tap
from tensortap.core.record import Kind


def activation(make, x, found):
    class Model(nn.Module):
        def forward(self, x):
            return make(x)

    model = nn.Sequential(Model())
    with tap.track(model) as tracker:
        model(x)
        tracker.step()
    return found(tracker).one(Kind.ACTIVATION, "0"), tracker


SPECIAL = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.5, 1.0, 0.75])


def test_zeros_nans_and_infinities_are_in_no_exponent_bin(found):
    record, tracker = activation(lambda x: x * 1, SPECIAL, found)
    stats = record.stats
    assert stats.exponents == {0: 2, -1: 1}
    assert (stats.zeros, stats.nans, stats.posinfs, stats.neginfs) == (2, 1, 1, 1)
    assert sum(stats.bins) + 5 == stats.count
    row = tracker.logframe().iloc[0]
    assert row["exponent_counts"][0] == 2
    assert row["exponent_counts"][np.inf] == 2  # above every bin, not at zero
    assert row["scalar_stats"]["zeros"] == 2
    assert row["scalar_stats"]["nans"] == 1


def test_tracking_runs_no_operations_of_torch():
    """Statistics are one pass in C, not a dozen operations with synchronization."""
    from torch.utils._python_dispatch import TorchDispatchMode

    operations = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations.append(str(func))
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        opt.zero_grad()
        operations.clear()
        with Listen():
            model(torch.ones(8, 64)).sum().backward()
        return [name for name in operations if "detach" not in name]

    plain = step()
    with tap.track(model, optimizer=opt) as tracker:
        assert step() == plain
        tracker.step()
    assert len(list(tracker.records)) == 12  # two of them are initial weights
