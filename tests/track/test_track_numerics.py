"""Errors that other tools of this kind make, one test each."""

import ml_dtypes
import numpy as np
import pytest
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


@pytest.mark.parametrize("n", [-149, -126, -1, 0, 1, 10, 127])
def test_bin_boundaries(n, found):
    """Bin n holds 2^n <= |x| < 2^(n+1)."""
    low = np.float32(2.0**n)
    high = np.nextafter(np.float32(2.0 ** (n + 1) if n < 127 else np.inf), np.float32(0))
    if n == -149:
        high = low
    record, tracker = activation(lambda x: x * 1, torch.tensor([low, -high]), found)
    assert record.stats.exponents == {n: 2}
    assert tracker.logframe()["exponent_counts"][n].tolist()[0] == 2


def test_half_precision_does_not_overflow_in_the_statistics(found):
    x = torch.full((5000,), 60000.0, dtype=torch.float16)
    x[::2] *= -1
    stats = activation(lambda x: x * 1, x, found)[0].stats
    for name in ("rm2", "rm4", "rm8", "mean_abs", "max_abs"):
        assert getattr(stats, name) == pytest.approx(60000.0, rel=1e-3)
    assert stats.std == pytest.approx(60000.0, rel=1e-3)
    assert abs(stats.mean) < 1e-6


def test_large_values_do_not_overflow_in_the_eighth_power(found):
    stats = activation(lambda x: x * 1, torch.full((3,), 1e30), found)[0].stats
    assert stats.rm8 == pytest.approx(1e30, rel=1e-6)
    stats = activation(lambda x: x * 1, torch.full((3,), 1e-30), found)[0].stats
    assert stats.rm8 == pytest.approx(1e-30, rel=1e-6)


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64, torch.bool, torch.uint8],
    ids=str,
)
def test_eight_bit_floats_and_integers(dtype, found):
    record, tracker = activation(lambda x: x.to(dtype), torch.tensor([0.0, 1.0, 2.0, 1.0]), found)
    assert record.dtype == str(dtype).removeprefix("torch.")
    assert record.stats.zeros == 1
    assert record.stats.count == 4
    frame = tracker.logframe()
    for name in frame["metadata"]["dtype"]:
        ml_dtypes.finfo(name)  # which plots use


def test_weight_gradients_belong_to_their_step(found):
    model = nn.Linear(2, 1, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer=opt) as tracker:
        for n in range(3):
            opt.zero_grad()
            (model(torch.ones(1, 2)).sum() * (n + 1)).backward()
            opt.step()
            tracker.step()
    records = found(tracker).of(Kind.WEIGHT_GRADIENT, "weight")
    assert [(r.step, r.stats.max) for r in records] == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_optimizer_state_has_the_name_of_its_parameter_with_frozen_ones(found):
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)])
    model[0].weight.requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with tap.track(model, optimizer=opt) as tracker:
        model(torch.ones(1, 2)).sum().backward()
        model[1].weight.grad.fill_(1.0)
        model[2].weight.grad.fill_(2.0)
        opt.step()
        tracker.step()
    states = {r.name: r.stats.mean for r in found(tracker).of(Kind.OPTIMISER_STATE)}
    assert states == {"1.weight.momentum_buffer": 1.0, "2.weight.momentum_buffer": 2.0}
    frame = tracker.logframe()["metadata"]
    rows = frame[frame["tensor_type"] == "Optimiser_State.momentum_buffer"]
    assert rows["name"].tolist() == ["1", "2"]


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda x: (x, x), ["Model[0]", "Model[1]"]),
        (lambda x: {"a": x, "b": None}, ["Model[a]"]),
        (lambda x: None, []),
    ],
)
def test_tuples_and_dicts_of_outputs(make, names, found):
    class Model(nn.Module):
        def forward(self, x):
            return make(x * 2)

    model = Model()
    with tap.track(model) as tracker:
        model(torch.ones(3))
        tracker.step()
    assert found(tracker).names(Kind.ACTIVATION) == names


def test_exception_of_the_user_passes():
    mine = ValueError("of the user")
    with pytest.raises(ValueError, match="of the user") as caught, tap.track(nn.Linear(2, 2)):
        raise mine
    assert caught.value is mine


def test_tracking_runs_no_operations_of_torch(monkeypatch):
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
