"""Rules over the parameters of a model: each with the bug, and with the fix."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tensortap as tap
from tests.alerts.training import model, sgd, train


class Net(nn.Module):
    """A model with a list of layers, registered or not."""

    def __init__(self, layers: type = list) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.layers = layers([nn.Linear(8, 8), nn.Linear(8, 2)])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_updates_that_are_lost_in_rounding():
    for lr, expected in ((1e-4, {("never_changes", "1.weight")}), (0.1, set())):
        net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).bfloat16()
        optimizer = torch.optim.SGD(net[1:2].parameters(), lr=lr)

        def step(net=net, optimizer=optimizer):
            optimizer.zero_grad()
            net(torch.randn(3, 4).bfloat16()).square().mean().backward()
            optimizer.step()

        rules = [tap.alerts.never_changes()]
        with tap.track(net, optimizer=optimizer, alerts=rules) as tracker:
            for _ in range(31):
                step()
                tracker.step()
        assert {(alert.rule, alert.name) for alert in tracker.alerts} == expected


def test_rows_of_an_embedding_without_a_gradient_may_stay():
    net = nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 2))
    optimizer = sgd(net, momentum=0.0)

    def step():
        optimizer.zero_grad()
        net(torch.tensor([3, 4])).square().mean().backward()
        optimizer.step()

    assert train(net, optimizer, step, steps=31) == set()


def test_gradients_that_are_rounding_errors_are_no_bug():
    net = model(nn.BatchNorm1d(8))  # takes away the bias of the layer before it
    assert train(net, sgd(net, lr=1e-3), steps=31) == set()


def test_weights_that_change_outside_of_the_step():
    net = model()
    optimizer = sgd(net)
    clips = True

    def step():
        optimizer.zero_grad()
        net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        if clips:
            with torch.no_grad():
                net[0].weight.clamp_(-0.5, 0.5)

    with tap.track(net, optimizer=optimizer, alerts=True, on_alert="stop") as tracker:
        for _ in range(5):
            step()
            tracker.step()
    (hint,) = tracker.hints
    assert (hint.rule, hint.severity, tracker.alerts) == ("changed_outside", "hint", [])
    assert str(hint).startswith("step 2, model (Weight): hint: 0.weight change outside")
    clips = False
    assert train(net, optimizer, step, hints=True) == set()

    def rewrites():
        step()
        net[0].weight.data.clamp_(-0.1, 0.1)

    assert train(net, optimizer, rewrites, hints=True) == {("changed_outside", "model")}


def test_hints_in_a_run(tmp_path):
    net = model()
    optimizer = sgd(net, weight_decay=0.01)
    with tap.track(net, optimizer=optimizer, alerts=True, out_path=tmp_path / "run") as tracker:
        tracker.step()
    run = tap.open(tracker.path)
    assert run.alerts() == []
    (hint,) = run.hints()
    assert (hint.rule, hint.name, hint.severity) == ("weight_decay", "model", "hint")
    assert "(0.bias, 1.bias)" in hint.message


def test_weight_decay_in_groups():
    net = model()
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim < 2]},
    ]
    assert train(net, torch.optim.AdamW(groups, weight_decay=0.0), hints=True) == set()


@pytest.mark.parametrize("runs", [False, True])
def test_a_frozen_module_that_never_runs(runs):
    class WithSpare(Net):
        def __init__(self):
            super().__init__(nn.ModuleList)
            self.spare = nn.Linear(4, 8).requires_grad_(False)

        def forward(self, x):
            extra = self.spare(x).sum() if runs else 0
            return super().forward(x) + extra

    net = WithSpare()
    found = train(net, sgd(net), hints=True)
    assert found == (set() if runs else {("never_runs", "spare")})


@pytest.mark.parametrize("layers", [list, lambda layers: {0: layers}, nn.ModuleList])
def test_layers_in_a_plain_list(layers):
    net = Net(layers)
    if isinstance(net.layers, dict):
        net.forward = lambda x: net.layers[0][1](net.layers[0][0](net.first(x)))
    registered = isinstance(net.layers, nn.Module)
    optimizer = sgd(net)
    with tap.track(net, optimizer=optimizer, alerts=True) as tracker:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            tracker.step()
    found = {(alert.rule, alert.name) for alert in tracker.alerts}
    assert found == (set() if registered else {("not_registered", "layers")})
    assert registered or "it holds 4 tensors" in tracker.alerts[0].message


@pytest.mark.parametrize("make", [lambda x: x.requires_grad_(), nn.Parameter, lambda x: x])
def test_a_tensor_that_is_no_parameter(make):
    net = model()
    net.gain = make(torch.ones(2))
    net.register_forward_hook(lambda module, args, output: output * module.gain)
    lost = net.gain.requires_grad and not isinstance(net.gain, nn.Parameter)
    assert train(net, sgd(net)) == ({("not_registered", "gain")} if lost else set())


@pytest.mark.parametrize("bug", [True, False])
def test_one_layer_several_times(bug):
    layers = [nn.Linear(8, 8)] * 3 if bug else [nn.Linear(8, 8) for _ in range(3)]
    net = nn.Sequential(nn.Linear(4, 8), act := nn.Tanh(), nn.Sequential(*layers), act)
    found = train(net, sgd(net, lr=1e-3), hints=True)
    assert found == ({("repeated_layer", "2")} if bug else set())


def test_a_hidden_teacher_is_no_bug():
    net = Net(nn.ModuleList)
    teacher = copy.deepcopy(net)
    net.teacher = [teacher]  # on purpose: it must not be trained or saved
    optimizer = sgd(net)

    def step():
        x = torch.randn(3, 4)
        with torch.no_grad():
            wanted = teacher(x)
        optimizer.zero_grad()
        (net(x) - wanted - 1).square().mean().backward()
        optimizer.step()

    assert train(net, optimizer, step) == set()


def test_tied_weights_that_come_apart():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    optimizer = sgd(net)
    assert train(net, optimizer) == set()
    with tap.track(net, optimizer=optimizer, alerts=True) as tracker:
        for i in range(11):
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            if i == 2:
                net[2].weight = nn.Parameter(net[0].weight.detach().clone())
            tracker.step()
    found = {alert.name: alert.message for alert in tracker.alerts if alert.rule == "untied"}
    assert list(found) == ["2.weight"]
    assert "it was tied to 0.weight" in found["2.weight"]
