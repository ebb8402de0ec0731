"""Alerts about a model in training: their module, and the actions on them."""

import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap import alerts
from tensortap.core.record import Kind
from tensortap.values import rebuild

pytestmark = pytest.mark.usefixtures("no_errors")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.Tanh()

    def forward(self, x):
        return self.act(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Poisoned:
    """A hook that puts a NaN into the output of a module at one step."""

    def __init__(self, model, path, step, value=torch.nan):
        self.now = 0
        self.step, self.value = step, value
        model.get_submodule(path).register_forward_hook(self)

    def __call__(self, module, args, output):
        if self.now == self.step:
            output = output.clone()
            output[0, 0] = self.value
            return output
        return None


def train(model, tracker, steps, poisoned=None, opt=None):
    opt = opt or torch.optim.SGD(model.parameters(), lr=0.0)
    for n in range(steps):
        if poisoned:
            poisoned.now = n
        opt.zero_grad()
        loss = model(torch.full((3, 4), 0.5)).square().mean()
        loss.backward()
        tracker.step(loss=loss)


@pytest.mark.parametrize("rule", ["nan", "inf"])
@pytest.mark.parametrize("path", ["blocks.0.fc", "blocks.1.act", "blocks.2"])
def test_alert_names_the_origin(rule, path):
    model = Net()
    value = torch.nan if rule == "nan" else torch.inf
    poisoned = Poisoned(model, path, step=4, value=value)
    with tap.track(model, alerts=[alerts.nan(), alerts.inf()]) as tracker:
        train(model, tracker, 6, poisoned)
    first = tracker.alerts[0]
    assert (first.rule, first.name, first.kind) == (rule, path, Kind.ACTIVATION)
    assert (first.step, first.rank, first.module, first.origin) == (4, 0, path, path)
    # modules after the origin raise no alert
    assert [a.name for a in tracker.alerts if a.kind is Kind.ACTIVATION and a.rule == rule] == [
        path
    ]
    assert {a.step for a in tracker.alerts} == {4}


def test_alert_about_a_part_of_an_output_names_its_module():
    class Two(nn.Module):
        def forward(self, x):
            return x, x * torch.nan

    model = nn.Sequential(Two())
    with tap.track(model, alerts=[alerts.nan()]) as tracker:
        model(torch.ones(3))
        tracker.step()
    (alert,) = tracker.alerts
    assert (alert.name, alert.module) == ("0[1]", "0")


def test_on_alert_callback():
    seen = []
    model = Net()
    poisoned = Poisoned(model, "blocks.1", step=1)
    with tap.track(model, alerts=True, on_alert=seen.append) as tracker:
        train(model, tracker, 3, poisoned)
    assert seen == tracker.alerts != []
    assert seen[0].name == "blocks.1"


def test_stop_raises_from_step_and_removes_the_hooks():
    model = Net()
    poisoned = Poisoned(model, "blocks.1", step=2)
    with (
        pytest.raises(tap.StopTraining, match=r"blocks\.1") as stopped,
        tap.track(model, alerts=True, on_alert="stop") as tracker,
    ):
        train(model, tracker, 10, poisoned)
    assert poisoned.now == 2
    assert stopped.value.alert == tracker.alerts[0]
    # the step is complete, and only the user's hook remains
    assert {r.name for r in tracker.records if r.step == 2 and r.kind is Kind.WEIGHT}
    left = [hook for m in model.modules() for hook in m._forward_hooks.values()]
    assert left == [poisoned]


def test_keep_keeps_whole_tensors_after_an_alert():
    model = Net()
    poisoned = Poisoned(model, "blocks.1", step=2)
    with tap.track(model, alerts=[alerts.nan()], on_alert="keep") as tracker:
        train(model, tracker, 6, poisoned)
    records = [r for r in tracker.records if r.stats is not None]
    whole = [r for r in records if r.value is not None]
    assert {r.step for r in whole} == {2, 3}
    first = next(i for i, r in enumerate(records) if r.stats.nans)
    after = [r for r in records[first + 1 :] if r.step in (2, 3)]
    assert after
    assert all(r.value is not None for r in after)
    for record in whole:
        assert tap.viz.summarize(rebuild(record.value)).nans == record.stats.nans


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_of_a_grad_scaler_does_not_stop(fused):
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=2.0**-10)
    scales = []
    with tap.track(model, optimizer=opt, alerts=[alerts.inf(), alerts.nan()],
                   on_alert="stop") as tracker:  # fmt: skip
        for n in range(6):
            loss = model(torch.full((3, 4), 0.5)).square().mean() * 2.0**20
            scales.append(scaler.get_scale())
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            if n < 5:
                tracker.step(loss=loss)
        assert len(set(scales)) > 2  # it overflowed and continued
        assert {a.kind for a in tracker.alerts} <= {Kind.GRADIENT, Kind.WEIGHT_GRADIENT}
        assert tracker.alerts
        with torch.no_grad():
            model.blocks[0].fc.weight.fill_(torch.nan)
        with pytest.raises(tap.StopTraining, match=r"fc\.weight \(Weight\)"):
            tracker.step(loss=loss)


def test_infinite_gradient_that_was_applied_stops():
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer=opt, alerts=[alerts.inf()], on_alert="stop") as tracker:
        (model(torch.ones(3, 4)).sum() * torch.inf).backward()
        opt.step()
        with pytest.raises(tap.StopTraining):
            tracker.step()
