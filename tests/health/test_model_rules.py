"""Rules over a model: each with the bug, and with the fix."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensortap as tap
from tests.health.training import model, sgd, train

# -- structure -------------------------------------------------------------------------------


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


def test_hints_in_a_run(tmp_path):
    net = nn.Sequential(*[nn.Linear(4, 4)] * 2)
    path = tmp_path / "run"
    with tap.track(net, sgd(net), alerts=True, on_alert="stop", to=path) as tracker:
        tracker.step()
    run = tap.open(tracker.path)
    assert run.alerts() == []
    (hint,) = run.hints()
    assert (hint.rule, hint.name, hint.severity) == ("repeated_layer", "Sequential", "hint")
    assert str(hint).startswith("step 0, Sequential (Weight): hint: the same layer stands in it")


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


CLASSES = 3


def trained(batches, loss=None, *, net=None, hints=False, steps=25, after=None, **options):
    """Return the rules that speak up while a model is trained on `batches`."""
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = sgd(net, lr=0.01)
    batches = iter(batches)
    loss = loss or (lambda output: output.square().mean())

    def step():
        optimizer.zero_grad()
        loss(net(next(batches))).backward()
        optimizer.step()
        if after is not None:
            after(net)

    return {rule for rule, _ in train(net, optimizer, step, steps, hints, **options)}


def noise(scale=1.0, shape=(16, 4)):
    while True:
        yield scale * torch.randn(shape)


TARGET = torch.arange(16) % CLASSES


# -- modes -----------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout by a function; `fixed` tells it about the mode."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed

    def forward(self, x):
        return F.dropout(x, 0.5, self.training if self.fixed else True)


@pytest.mark.parametrize("how", ["function", "fixed", "module left in train mode"])
def test_random_numbers_in_evaluation(how):
    net = model(nn.Dropout(0.5) if "module" in how else Noisy(how == "fixed"))

    def evaluate(net):
        net.eval()
        net[1].train("module" in how)  # as for estimates of uncertainty
        with torch.no_grad():
            net(torch.randn(16, 4))
        net.train()

    found = trained(noise(), net=net, after=evaluate, hints=True)
    assert found == ({"random_in_evaluation"} if how == "function" else set())


# -- batches ---------------------------------------------------------------------------------


def test_inputs_that_are_not_normalized():
    pixels = (255 * x.sigmoid() for x in noise())
    assert trained(pixels, hints=True) == {"not_normalized"}
    assert trained((x.sigmoid() for x in noise()), hints=True) == set()


@pytest.mark.parametrize("how", ["in place", "first differs", "heavy tails", "moves once"])
def test_inputs_that_drift(how):
    scales = {
        "in place": (1.4 ** (n // 10) for n in itertools.count()),
        "first differs": itertools.chain([0.1], itertools.repeat(1.0)),
        "heavy tails": (3.0 ** (n // 10 * 7 % 5 - 2) for n in itertools.count()),
        "moves once": (1.0 if n < 25 else 2.5 for n in itertools.count()),
    }[how]
    inputs = (scale * x for scale, x in zip(scales, noise(), strict=False))
    found = trained(inputs, hints=True, steps=95)
    assert ("input_drift" in found) == (how == "in place")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_have_no_scale(bad):
    def evaluate(net):
        net.eval()
        with torch.no_grad():
            net(torch.full((16, 4), bad))
        net.train()

    inputs = (torch.full((16, 4), bad) for _ in itertools.count())
    found = trained(inputs, after=evaluate, hints=True)
    assert "not_normalized" not in found
