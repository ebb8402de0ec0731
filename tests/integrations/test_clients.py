"""Loops of accelerate and Fabric: steps under gradient accumulation, and after resuming."""

from __future__ import annotations

import pytest
import torch

import tensortap as tap
from tensortap.core.record import Kind

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of other libraries
ACT, GRAD, WEIGHT = Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT
WGRAD, STATE = Kind.WEIGHT_GRADIENT, Kind.OPTIMISER_STATE
ACCUMULATED = 2


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))


def check(tracker, module, weight, steps, calls=ACCUMULATED):
    """Check the steps and calls of every kind of record."""
    records = [r for r in tracker.records if r.step >= 0]  # without initial weights
    for kind, name, number in [
        (ACT, module, calls), (GRAD, module, calls), (WEIGHT, weight, 1), (WGRAD, weight, 1),
        (STATE, f"{weight}.exp_avg", 1),
    ]:  # fmt: skip
        found = [(r.step, r.call) for r in records
                 if r.kind is kind and r.name == name and "mode" not in r.tags]  # fmt: skip
        wanted = [(step, call) for step in steps for call in range(number)]
        if kind is GRAD:  # in the order of the backward passes
            found.sort()
        assert found == wanted, (kind, name)
    assert not tracker.unseen


def accelerated(first, folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = mlp()
    model, opt = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if first:
        accelerator.load_state(folder)

    def step(batch):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            gradient = tap.viz.summarize(model[0].weight.grad)
            opt.step()
            opt.zero_grad()
        return gradient if accelerator.sync_gradients else None

    return model, opt, step, lambda: accelerator.save_state(folder)


def fabricated(first, folder):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    inner = mlp()
    model, opt = fabric.setup(inner, torch.optim.AdamW(inner.parameters()))
    state = {"model": model, "optimizer": opt}
    if first:
        fabric.load(folder / "state", state)
    calls = []

    def step(batch):
        fabric.backward(model(batch).square().mean() / ACCUMULATED)
        calls.append(1)
        if len(calls) % ACCUMULATED:
            return None
        gradient = tap.viz.summarize(inner[0].weight.grad)
        opt.step()
        opt.zero_grad()
        return gradient

    return model, opt, step, lambda: fabric.save(folder / "state", state)


@pytest.mark.parametrize("prepare", [accelerated, fabricated])
def test_prepared_models_and_optimizers(prepare, tmp_path, found, no_errors):
    for first in (0, 2):  # the second training resumes the first
        model, opt, step, save = prepare(first, tmp_path)
        gradients = []
        with tap.track(model, optimizer=opt, init_step=first) as tracker:
            for n in range(2 * ACCUMULATED):
                gradient = step(torch.full((3, 4), n + 1.0))
                if gradient is not None:
                    gradients.append(gradient)
                    tracker.step()
        save()
        check(tracker, "0", "0.weight", range(first, first + 2))
        assert [r.stats for r in found(tracker).of(WGRAD, "0.weight")] == gradients
        assert found(tracker).of(ACT, "Sequential")
