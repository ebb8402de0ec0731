"""Analyses: chosen by name, recorded as numbers, and never a danger to the training."""

import typing

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.core.record import Kind
from tensortap.rooms.analyses.analysis import FAMILIES, Analysis


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(net, optimizer, steps=3, **options):
    with tap.track(net, optimizer, **options) as tracker:
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            net(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            tracker.step()
    return tracker


def test_a_family_that_does_not_exist():
    with pytest.raises(ValueError, match="analyses has no 'norm'; choose from norms"):
        tap.track(model(), analyses=["norm"])
    with pytest.raises(TypeError, match="analyses must be True or False or a list of strings"):
        tap.track(model(), analyses="norms")
    with pytest.raises(TypeError, match="which have no options"):
        tap.track(model(), analyses={"experts": {"top_k": 2}})


def test_numbers_are_records_and_columns_of_the_logframe(tmp_path):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tap.init(tmp_path)
    tracker = train(net, optimizer, every=2, analyses=["norms"])
    tap.finish()
    run = tap.open(tracker.path)
    frame = run.logframe()
    weights = frame[frame["metadata", "tensor_type"] == "Weight"]
    assert sorted(set(weights["metadata", "step"])) == [-1, 0, 2]
    weights = weights[weights["metadata", "name"] == "0"]
    last = weights[weights["metadata", "step"] == 2].iloc[0]
    expected = float(net[0].weight.detach().double().norm())
    assert last["scalar_stats", "weight_norm"] == pytest.approx(expected, rel=1e-12)
    stats = run.stats()
    row = stats[(stats["name"] == "0.weight.weight_norm") & (stats["step"] == 2)].iloc[0]
    assert (row["kind"], row["value"]) == ("Health", last["scalar_stats", "weight_norm"])


class Broken(Analysis):
    """Raises wherever it can."""

    def output(self, seen):
        raise RuntimeError("output")

    gradient = after_backward = before_update = after_update = end_step = output


def test_an_error_in_an_analysis_does_not_reach_the_training(monkeypatch, caplog):
    monkeypatch.setitem(FAMILIES, "broken", f"{__name__}:Broken")
    before = tap.receipt().dropped
    plain, observed = model(), model()
    for net, options in ((plain, {}), (observed, {"analyses": ["broken"]})):
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), **options)
    pairs = zip(plain.parameters(), observed.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert "'analysis broken' raised in output" in caplog.text
    assert tap.receipt().dropped != before


class Listening(Analysis):
    """Notes what it is told."""

    heard: typing.ClassVar[list] = []

    def output(self, seen):
        self.heard.append(("output", seen.name, seen.call))

    def gradient(self, name, gradient):
        self.heard.append(("gradient", name))

    def after_backward(self, found):
        self.heard.append(("after_backward", len(found)))

    def before_update(self, found):
        self.heard.append(("before_update", len(found)))

    def after_update(self, found):
        self.heard.append(("after_update", len(found)))

    def end_step(self):
        self.heard.append(("end_step",))
        self.give_model({"answer": 42})


def test_what_happens_in_a_step_is_told_in_its_order(monkeypatch):
    monkeypatch.setitem(FAMILIES, "listening", f"{__name__}:Listening")
    Listening.heard.clear()
    net = model()
    tracker = train(
        net, torch.optim.SGD(net.parameters(), lr=0.1), 3, every=3, analyses=["listening"]
    )
    forward, backward, rest = Listening.heard[:4], Listening.heard[4:8], Listening.heard[8:]
    assert [name for _, name, _ in forward] == ["0", "1", "2", "Sequential"]
    assert sorted(name for _, name in backward) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert rest == [
        ("after_backward", 4), ("before_update", 4), ("after_update", 4), ("end_step",)
    ]  # fmt: skip
    (answer,) = [record for record in tracker.records if record.kind is Kind.HEALTH]
    assert (answer.name, answer.value, answer.step) == ("model.answer", 42.0, 0)
    frame = tracker.logframe()
    (row,) = frame[frame["scalar_stats", "answer"] == 42]["metadata", "name"]
    assert row == "Sequential"
