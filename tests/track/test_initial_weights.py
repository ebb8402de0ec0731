"""Weights before the first update: recorded once, as of the step before it."""

import jax.numpy as jnp
import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.core.record import Kind
from tensortap.rooms.track.torch.track import ParameterHooks
from tensortap.values import rebuild

pytestmark = pytest.mark.usefixtures("no_errors")


def train(net, steps=2, seed=1, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(seed)
    with tap.track(net, optimizer, **options) as tracker:
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            tracker.step()
    return tracker


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def initial(tracker):
    found = [r for r in tracker.records if r.step < 0]
    assert {(r.kind, r.step, r.tags.get("initial")) for r in found} <= {(Kind.WEIGHT, -1, "1")}
    assert all("initial" not in r.tags for r in tracker.records if r.step >= 0)
    return {r.name: r for r in found}


@pytest.mark.parametrize("options", [{}, {"every": 5, "alerts": True}, {"analyses": ["norms"]}])
def test_initial_weights_are_recorded(options):
    net = model()
    expected = {name: tap.viz.summarize(p) for name, p in net.named_parameters()}
    tracker = train(net, **options)
    assert {name: r.stats for name, r in initial(tracker).items()} == expected
    assert not tracker.alerts
    later = [r for r in tracker.records if r.kind is Kind.WEIGHT and r.step == 0]
    assert {r.name for r in later} == set(expected)
    assert all(r.stats != expected[r.name] for r in later)


def test_options_select_them():
    assert list(initial(train(model(), include="^0"))) == ["0.weight", "0.bias"]
    assert not initial(train(model(), kind=("activation", "gradient")))
    assert not initial(train(model(), init_step=7))
    net = model()
    value = net[0].weight.detach().clone()
    found = initial(train(net, tensors="0.weight", digests=True))
    assert torch.equal(rebuild(found["0.weight"].value), value)
    assert found["2.weight"].value is None
    assert all(r.digest for r in found.values())


def test_weights_that_have_no_values_yet_are_left_out():
    net = nn.ModuleDict({"lazy": nn.LazyLinear(3), "meta": nn.Linear(4, 3, device="meta")})
    with tap.track(net) as tracker:
        net["lazy"](torch.randn(2, 4)).sum().backward()
        tracker.step()
    assert not initial(tracker)
    weights = {(r.name, r.step) for r in tracker.records if r.kind is Kind.WEIGHT}
    assert weights == {("lazy.weight", 0), ("lazy.bias", 0)}


def test_states_of_jax():
    before, after = {"w": jnp.arange(3.0)}, {"w": jnp.ones(3)}
    with tap.track(before) as tracker:
        tracker.step(after)
    weights = [(r.step, r.stats.max) for r in tracker.records if r.kind is Kind.WEIGHT]
    assert (list(initial(tracker)), weights) == (["w"], [(-1, 2.0), (0, 1.0)])


def test_what_reads_a_run_knows_them(tmp_path, monkeypatch):
    one, other = (train(model(seed), to=tmp_path / str(seed)).path for seed in (0, 1))
    first = tap.compare(one, other).first
    assert (first.key.name, first.key.kind, first.key.step) == ("0.weight", "Weight", -1)
    frame = tap.open(one).logframe()["metadata"]
    assert frame[frame["step"] == -1]["tensor_type"].unique().tolist() == ["Weight"]
    monkeypatch.setattr(ParameterHooks, "_observe_initial", lambda self: None)
    without = train(model(0), to=tmp_path / "without").path
    for pair in ((one, without), (without, one)):
        report = tap.compare(*pair)
        assert report
        assert (report.ignored, report.missing) == (4, ())
