"""Reasons that need more than two values: models of torch that differ in one thing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tensortap as tap


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ x


class Net(nn.Module):
    """Layers whose inputs are on different scales, so that an epsilon shows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attn = Attention()
        self.norm = nn.LayerNorm(8, eps=1e-3)
        self.act = nn.GELU()
        self.bn = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 2)
            self.norm.bias.uniform_(-1, 1)
        self.shift = 0.0

    def forward(self, x):
        y = self.attn(x) * torch.linspace(0.1, 3, x.shape[1])[:, None]
        y = self.act(self.norm(y + self.shift))
        return self.bn((y * self.scale).flatten(0, 1))


def recorded(folder, change=lambda model: None, steps=2, **options):
    model = Net()
    change(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    options = {"tensors": True, "kind": "all", **options}
    with tap.track(model, opt, to=folder, **options) as tracker:
        for _ in range(steps):
            opt.zero_grad()
            model(torch.randn(4, 6, 8, generator=data)).square().mean().backward()
            opt.step()
            tracker.step()
    return tracker.path


def swap(model):
    model.attn.q, model.attn.k = model.attn.k, model.attn.q


def change_epsilon(model):
    model.norm.eps = 1e-2


def change_activation(model):
    model.act = nn.ReLU()


def approximate(model):
    model.act = nn.GELU("tanh")


def shift(model):
    model.shift = 0.25


def keep_statistics(model):
    model.bn.momentum = 0.0


def change_buffer(model):
    model.scale[3] = 2.0


def nothing_known(model):
    with torch.no_grad():
        model.norm.weight[3] *= 1.5


CASES = {
    "swapped": (swap, "attn.q.weight", "a equals attn.k.weight of b"),
    "epsilon": (change_epsilon, "norm", "a is b with an epsilon 10 times as large"),
    "activation": (change_activation, "act", "a is ReLU of its input, b is GELU"),
    "approximate": (approximate, "act", "a is GELU (tanh) of its input, b is GELU"),
    "constant": (shift, "norm.input[0]", "a is b plus 0.25"),
    "stale": (keep_statistics, "bn.running_mean", "a has not changed since step -1, b has"),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("right"))


@pytest.mark.parametrize("name", CASES)
def test_reason(right, tmp_path, name):
    change, first, reason = CASES[name]
    report = tap.compare(recorded(tmp_path, change), right)
    assert report.first.key.name == first
    assert reason in report.first.explanations, report.first


def test_other_differences_have_no_such_reason(right, tmp_path):
    """A weight that differs in one element, and outputs without a difference in the weights."""
    wrong = recorded(tmp_path, nothing_known)
    report = tap.compare(wrong, right)
    assert (report.first.key.name, report.first.explanations) == ("norm.weight", ())
    report = tap.compare(wrong, right, kinds=["Activation"])
    assert (report.first.key.name, report.first.explanations) == ("norm", ())
    report = tap.compare(wrong, right, names="^act$", kinds=["Activation"])
    assert (report.first.key.name, report.first.explanations) == ("act", ())


def test_reasons_without_tensors(tmp_path):
    """Statistics tell an equal tensor, and one that does not change."""
    one, two, three = (
        recorded(tmp_path / name, change, tensors=False)
        for name, change in (("a", swap), ("b", lambda model: None), ("c", keep_statistics))
    )
    assert tap.compare(one, two).first.explanations == ("a equals attn.k.weight of b",
                                                        "b equals attn.k.weight of a")  # fmt: skip
    report = tap.compare(three, two)
    assert report.first.explanations == ("a has not changed since step -1, b has",)
    assert tap.compare(two, three).first.explanations == ("b has not changed since step -1, a has",)


def test_culprit_is_a_module_or_a_buffer(right, tmp_path):
    report = tap.compare(recorded(tmp_path / "a", shift), right)
    assert report.first.key.name == "norm.input[0]"
    assert report.culprit.startswith("culprit: Net: its code computes norm.input[0]")
    report = tap.compare(recorded(tmp_path / "b", change_buffer), right)
    assert report.culprit == "culprit: the buffer scale differs before any output does"
