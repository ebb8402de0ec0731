"""Rules and hooks run no code of a model: no property, no parametrization, no __getattr__."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

import tensortap as tap
from tensortap.rooms.track.torch import layouts


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
        self.batch_norm = CountingNorm(8)
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
        x = self.batch_norm(self.norm(x.transpose(1, 2))).transpose(1, 2)
        value = self.drop(self.value(x))
        return self.gate(F.scaled_dot_product_attention(x, self.key(x), value))


class CountingNorm(nn.BatchNorm1d):
    """A norm that counts how often somebody reads whether it has running statistics."""

    asked: ClassVar[list[str]] = []

    def __getattribute__(self, name):
        if name == "track_running_stats":
            CountingNorm.asked.append(name)
        return super().__getattribute__(name)

    def __bool__(self):
        CountingNorm.asked.append("bool")
        return True


class CountingSequence(nn.Sequential):
    """A sequence that counts how often somebody looks for its layers."""

    def __iter__(self):
        self[0].asked.append("iter")
        return super().__iter__()


def recorded(net, optimizer, how):
    """Return what looks at a model, and the end of a step for it."""
    if how == "ops":
        return tap.ops(net), lambda: None
    if how == "plain":
        return contextlib.nullcontext(), lambda: None
    tracker = tap.track(net, optimizer, **OPTIONS[how])
    return tracker, tracker.step


OPTIONS = {
    "rules": {"alerts": True, "analyses": True},
    "track": {"kind": "all", "tensors": True, "digests": True, "only_training": False},
}


def trained(how):
    """Return losses and state, and for what the model was asked."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), CountingSequence(Counting()))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    values = []
    looking, end_step = recorded(net, optimizer, how)
    with looking as tracker:
        for _ in range(5):
            optimizer.zero_grad()
            loss = net(torch.randn(3, 6, 8)).square().mean()
            loss.backward()
            optimizer.step()
            net.eval()
            with torch.no_grad():
                values += [loss.clone(), net(torch.randn(3, 6, 8))]
            net.train()
            end_step()
    if how == "rules":
        quantities = {record.name.rpartition(".")[2] for record in tracker.records}
        assert {"max_logit", "update_ratio", "kurtosis"} <= quantities
    asked = [*net[1][0].asked, *CountingNorm.asked]
    CountingNorm.asked.clear()
    return [*values, *net.state_dict().values(), torch.get_rng_state()], asked


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize("how", [*OPTIONS, "ops"])
def test_a_model_is_not_asked_for_anything(how):
    import torch._dynamo  # with which ops looks for compiled modules

    trained("plain")  # the first training of a process may round differently
    (plain, asked), (tracked, also) = trained("plain"), trained(how)
    assert also == asked
    for one, other in zip(plain, tracked, strict=True):
        assert torch.equal(one, other)


def test_a_layer_between_shards_is_not_asked_for_its_weight():
    layer = Counting()
    layer.asked.clear()
    assert layouts._of_columns(layer, torch.ones(2, 8)) is None
    spectral = parametrizations.spectral_norm(nn.Linear(8, 8))
    before = spectral.parametrizations.weight[0]._u.clone()
    assert layouts._of_columns(spectral, torch.ones(2, 8)) is None
    assert torch.equal(spectral.parametrizations.weight[0]._u, before)
    assert layer.asked == []
