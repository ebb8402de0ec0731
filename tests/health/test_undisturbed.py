"""Rules and analyses run no code of a model: no property, no parametrization, no __getattr__."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

import tensortap as tap


class Noisy(nn.Module):
    """A parametrization that draws random numbers whenever the weight is read."""

    def forward(self, weight):
        return weight + 0.01 * torch.randn_like(weight)


class Counting(nn.Module):
    """A router that counts how often somebody reads its properties or what is not in its dict."""

    def __init__(self):
        super().__init__()
        self.asked = []
        self.key = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = parametrizations.spectral_norm(nn.Conv1d(8, 8, 1))
        self.value = nn.Linear(8, 8)
        register_parametrization(self.value, "weight", Noisy())
        self.drop = nn.Dropout(0.1)
        self.gate = nn.Linear(8, 4)

    @property
    def num_experts(self):
        self.asked.append("num_experts")
        return 4

    @property
    def weight(self):
        self.asked.append("weight")
        return self.value.weight

    def __getattr__(self, name):
        vars(self).get("asked", []).append(name)
        return super().__getattr__(name)

    def forward(self, x):
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        value = self.drop(self.value(x))
        return self.gate(F.scaled_dot_product_attention(x, self.key(x), value))


class CountingSequence(nn.Sequential):
    """A sequence that counts how often somebody looks for its layers."""

    def __iter__(self):
        self[0].asked.append("iter")
        return super().__iter__()


def trained(**options):
    """Return losses and state, and for what the model was asked."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), CountingSequence(Counting()))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    values = []
    with tap.track(net, optimizer, **options) if options else contextlib.nullcontext() as tracker:
        for _ in range(5):
            optimizer.zero_grad()
            loss = net(torch.randn(3, 6, 8)).square().mean()
            loss.backward()
            optimizer.step()
            net.eval()
            with torch.no_grad():
                values += [loss.clone(), net(torch.randn(3, 6, 8))]
            net.train()
            if tracker is not None:
                tracker.step()
    if tracker is not None:
        quantities = {record.name.rpartition(".")[2] for record in tracker.records}
        assert {"max_logit", "update_ratio", "kurtosis"} <= quantities
    asked = list(net[1][0].asked)
    return [*values, *net.state_dict().values(), torch.get_rng_state()], asked


@pytest.mark.usefixtures("no_errors")
def test_a_model_is_not_asked_for_anything():
    trained()  # the first training of a process may round differently
    (plain, asked), (tracked, also) = trained(), trained(alerts=True, analyses=True)
    assert also == asked
    for one, other in zip(plain, tracked, strict=True):
        assert torch.equal(one, other)
