"""Several models tracked in one run: each has names of its own."""

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.core.record import Kind

pytestmark = pytest.mark.usefixtures("no_errors")


def mlp():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def train(models, trackers, optimizers, steps=3):
    for _ in range(steps):
        x = torch.randn(5, 4)
        for model in models:
            x = model(x)
        loss = x.square().mean()
        loss.backward()
        for opt, tracker in zip(optimizers, trackers, strict=True):
            opt.step()
            opt.zero_grad()
            tracker.step(loss=loss.item())


def adams(*models):
    return [torch.optim.AdamW(model.parameters()) for model in models]


def test_name_is_put_before_all_names(found):
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    (opt,) = adams(model)
    with tap.track(model, opt, name="generator", include=r"^(0|1|2|Seq)", tensors="^0$") as tracker:
        x = nn.functional.linear(model[0](torch.randn(3, 4)), model[2].weight)
        model[1](x, x, x)[0].sum().backward()
        opt.step()
        tracker.step(loss=1.0)
    seen = found(tracker)
    assert all(record.name.startswith("generator.") for record in seen.all)
    assert seen.one(Kind.ACTIVATION, "generator.0").value is not None
    assert seen.one(Kind.WEIGHT, "generator.0.bias").value is None
    assert seen.one(Kind.ACTIVATION, "generator.1[0]").tags["module"] == "generator.1"
    state = seen.one(Kind.OPTIMISER_STATE, "generator.0.bias.exp_avg")
    assert state.tags["parameter"] == "generator.0.bias"
    assert seen.one(Kind.METRIC, "generator.loss").value == 1.0
    assert list(tracker.unseen) == ["generator.2"]


@pytest.mark.slow
@pytest.mark.parametrize("names", [(None, None), ("generator", "critic"), (None, "critic")])
def test_two_models_in_one_run(names, open_run, caplog):
    models = mlp(), mlp()
    optimizers = adams(*models)
    with (
        tap.track(models[0], optimizers[0], name=names[0]) as first,
        tap.track(models[1], optimizers[1], name=names[1]) as second,
    ):
        train(models, (first, second), optimizers)
    tap.flush()
    run = tap.open(open_run)
    keys = [(r.name, r.kind, r.step, r.call) for r in run.records()]
    assert len(set(keys)) == len(keys)
    assert tap.compare(open_run, open_run)
    said = [record for record in caplog.records if "model2." in record.getMessage()]
    assert len(said) == (names == (None, None))
    prefixes = [f"{name}." if name else "" for name in names]
    if said:
        prefixes[1] = "model2."
    for tracker, prefix in zip((first, second), prefixes, strict=True):
        records = list(tracker.records)
        assert {r.step for r in records} == {-1, 0, 1, 2}
        weights = {r.name for r in records if r.kind is Kind.WEIGHT}
        assert weights == {f"{prefix}{name}" for name, _ in models[0].named_parameters()}


def test_one_tracker_after_the_other_needs_no_prefix(found):
    model = mlp()
    (opt,) = adams(model)
    for _ in range(2):
        with tap.track(model, opt) as tracker:
            train([model], [tracker], [opt], steps=1)
        assert found(tracker).names(Kind.ACTIVATION) == ["0", "1", "Sequential"]


def test_names_are_checked():
    for wrong in ("", 5):
        with pytest.raises(TypeError, match="name must be"):
            tap.track(mlp(), name=wrong)
    model = mlp()
    with tap.track(model, name="g"), pytest.raises(ValueError, match="'g' is already used"):
        tap.track(mlp(), name="g").__enter__()
    assert not model[0]._forward_hooks
