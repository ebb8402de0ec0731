"""coord_check: known exponents, agreement with mup, and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest

import tensortap as tap
from tensortap.rooms.widths.coordinates import growth_exponent

WIDTHS = [64, 128, 256, 512]


def torch_batch():
    import torch

    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((32, 16)).astype(np.float32), rng.integers(0, 4, 32)
    return tuple(map(torch.from_numpy, arrays))


def mlp(width: int):
    """An MLP in standard parametrization."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(16, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False), nn.ReLU(),
        nn.Linear(width, 4, bias=False),
    )  # fmt: skip


def mup_mlp(width: int):
    from mup import MuAdam, MuReadout, set_base_shapes
    from torch import nn

    def make(n):
        return nn.Sequential(
            nn.Linear(16, n, bias=False), nn.ReLU(), nn.Linear(n, n, bias=False), nn.ReLU(),
            MuReadout(n, 4, bias=False),
        )  # fmt: skip

    model = set_base_shapes(make(width), make(64), delta=make(128))  # rescales initial weights
    return model, MuAdam(model.parameters(), lr=1e-3)


def test_known_exponents_of_standard_parametrization():
    widths = [256, 512, 1024]  # in narrow models, terms that do not grow are not negligible yet
    check = tap.rooms.widths.coord_check(mlp, widths=widths, steps=2, data=torch_batch(), seeds=5)
    layers = {layer.module: layer for layer in check.layers}
    assert layers["0"].change.value == pytest.approx(0.0, abs=0.05)
    assert layers["2"].change.value == pytest.approx(1.0, abs=0.05)
    for name in "02":
        assert layers[name].initial.value == pytest.approx(0.0, abs=0.05)
    assert {name: layer.verdict for name, layer in layers.items() if name in "024"} == {
        "0": "stable", "2": "grows", "4": "grows",
    }  # fmt: skip
    assert not check
    assert "2           grows" in str(check)


def test_known_exponents_of_maximal_update_parametrization():
    check = tap.rooms.widths.coord_check(
        mup_mlp, widths=WIDTHS, steps=3, data=torch_batch(), seeds=30
    )
    layers = {layer.module: layer for layer in check.layers}
    for name in "02":
        assert layers[name].change.value == pytest.approx(0.0, abs=0.05)
        assert layers[name].initial.value == pytest.approx(0.0, abs=0.05)
    assert layers["4"].initial.value == pytest.approx(-0.5, abs=0.05)
    assert check


def test_sizes_are_those_of_mup():
    from mup.coord_check import get_coord_data

    models = {width: lambda width=width: mup_mlp(width)[0] for width in (64, 128)}
    options = {"lr": 1e-3, "nsteps": 3, "nseeds": 2, "cuda": False, "show_progress": False}
    theirs = get_coord_data(models, [torch_batch()], mup=True, optimizer="adam", **options)
    check = tap.rooms.widths.coord_check(
        mup_mlp, widths=[64, 128], steps=3, data=torch_batch(), seeds=2
    )
    ours = check.frame().query("quantity == 'output'")
    assert len(ours) == len(theirs) == 2 * 2 * 3 * 6
    names = theirs["module"].replace("", "Sequential")
    wanted = theirs.assign(module=names, step=theirs["t"] - 1)
    keys = ["width", "module", "step"]
    found = ours.groupby(keys)["size"].mean()
    np.testing.assert_allclose(found, wanted.groupby(keys)["l1"].mean()[found.index], rtol=1e-5)


def test_the_random_state_and_the_model_are_left_alone():
    import torch

    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = torch.utils.data.DataLoader(list(zip(*torch_batch(), strict=True)), batch_size=8)
    check = tap.rooms.widths.coord_check(mlp, widths=[8, 16, 32], steps=2, data=loader, seeds=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert [trace.name for trace in check.figure().data][:2] == ["0 (output)", "0 (change)"]
    with pytest.raises(ValueError, match="step must be one of the recorded steps, got 9"):
        check.figure(step=9)


def test_exponents_and_their_intervals():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        points = [(n, n**0.5 * 2 ** rng.normal(0, 0.1)) for n in (64, 128, 256, 512)]
        found = growth_exponent(points)
        inside += found.low <= 0.5 <= found.high
    assert 180 <= inside <= 199  # 95 %
    assert growth_exponent([(1, 0.0), (2, 1.0)]) is None
    two = growth_exponent([(1, 1.0), (2, 4.0)])
    assert (two.value, two.verdict) == (2.0, "stable")  # two points prove nothing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": [64]}, "widths must be at least two positive numbers"),
        ({"steps": 1}, "steps must be at least 2"),
        ({"data": [1, 2, 3]}, "data must be"),
        ({"make_model": lambda width: width}, "make_model must return a torch module"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    given = {"make_model": mlp, "widths": [8, 16], "data": torch_batch(), **options}
    with pytest.raises((TypeError, ValueError), match=message):
        tap.rooms.widths.coord_check(given.pop("make_model"), **given)
