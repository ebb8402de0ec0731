"""Bugs that raise no error: each rule with the bug, and with the fix."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import tensortap as tap
from tests.health.training import model, sgd, train


def test_a_parameter_in_no_optimizer():
    net = model()
    only = torch.optim.SGD(net[0].parameters(), lr=0.1)
    assert train(net, only) == {("no_optimizer", "1.weight"), ("no_optimizer", "1.bias")}
    assert train(net, sgd(net)) == set()


def _replace(net):
    net[1] = nn.Linear(8, 2)


def _move(net):  # to another device, where that makes new parameters; here to another dtype
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        net[1].double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.parametrize("change", [_replace, _move])
@pytest.mark.parametrize("when", ["before tracking", "while tracking", "before the optimizer"])
def test_an_optimizer_that_holds_replaced_parameters(change, when):
    net = model()
    if when == "before the optimizer":
        change(net)
    optimizer = sgd(net)
    if when == "before tracking":
        change(net)
    with tap.track(net, optimizer=optimizer, alerts=True) as tracker:
        for i in range(6):
            if i == 1 and when == "while tracking":
                change(net)
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            tracker.step()
    messages = {a.name: a.message for a in tracker.alerts if a.rule == "no_optimizer"}
    assert set(messages) == (set() if when == "before the optimizer" else {"1.weight", "1.bias"})
    expected = "the optimizer has 2 tensors that the model does not have"
    assert all(expected in message for message in messages.values())


def test_parameters_replaced_in_steps_that_are_not_recorded():
    net = model()
    optimizer = sgd(net)
    steps = iter(range(25))

    def step():
        if next(steps) == 5:
            net[1] = nn.Linear(8, 2)
        optimizer.zero_grad()
        net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()

    found = train(net, optimizer, step, every=1000)
    assert found == {("no_optimizer", "1.weight"), ("no_optimizer", "1.bias")}


@pytest.mark.parametrize("bug", ["detached", "never called"])
def test_a_parameter_without_a_gradient(bug):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.branch = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            if bug == "detached":
                return self.used(x) + self.branch(x).detach()
            return self.used(x) + (0 if bug else self.branch(x))

    net = Net()
    optimizer = sgd(net)
    with tap.track(net, optimizer=optimizer, alerts=True) as tracker:
        for _ in range(22):
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            tracker.step()
    found = {alert.name: alert.message for alert in tracker.alerts if alert.rule == "no_gradient"}
    assert set(found) == {"branch.weight", "branch.bias"}
    why = "is its output detached" if bug == "detached" else "is it called in forward()?"
    assert why in found["branch.weight"]
    bug = ""
    assert train(net, optimizer) == set()


CUTS = {
    "item": lambda loss: torch.tensor(loss.item(), requires_grad=True),
    "detach": lambda loss: loss.detach().requires_grad_(),
    "fine": lambda loss: loss,
}


@pytest.mark.parametrize("how", CUTS)
def test_a_loss_that_is_cut_off_from_the_model(how):
    net = model()
    optimizer = sgd(net)

    def step():
        optimizer.zero_grad()
        CUTS[how](net(torch.randn(3, 4)).square().mean()).backward()
        optimizer.step()

    assert train(net, optimizer, step) == (set() if how == "fine" else {("no_gradient", "model")})


def test_gradients_zeroed_before_the_step():
    net = model()
    optimizer = sgd(net)
    for keep in (True, False):

        def step(keep=keep):
            net(torch.randn(3, 4)).square().mean().backward()
            optimizer.zero_grad(set_to_none=keep)
            optimizer.step()

        assert train(net, optimizer, step) == {("gradient_discarded", "model")}
        assert train(net, optimizer) == set()  # zeroed before the backward pass


@pytest.mark.parametrize("bug", [True, False])
def test_gradients_zeroed_between_micro_batches(bug):
    net = model()
    optimizer = sgd(net)

    def step():
        optimizer.zero_grad()
        for _ in range(3):
            if bug:
                optimizer.zero_grad()
            (net(torch.randn(3, 4)).square().mean() / 3).backward()
        optimizer.step()

    found = train(net, optimizer, step, hints=True)
    assert (("gradient_zeroed", "model") in found) is bug


def test_a_closure_may_zero_gradients_several_times():
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    batch = torch.randn(8, 4)

    def closure():
        optimizer.zero_grad()
        loss = (net(batch) - 1).square().mean()
        loss.backward()
        return loss

    assert train(net, optimizer, lambda: optimizer.step(closure), hints=True) == set()


def test_gradients_that_are_never_zeroed():
    net = model()
    optimizer = sgd(net)

    def step():
        net(torch.randn(3, 4)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    assert train(net, optimizer, step) == {("gradient_not_zeroed", "model")}

    def zeroes_the_model():
        step()
        net.zero_grad(set_to_none=False)

    net.zero_grad()
    assert train(net, optimizer, zeroes_the_model) == set()


def test_learning_rates():
    net = model()
    optimizer = sgd(net, lr=0.0)
    assert ("learning_rate", "learning rate of group 0") in train(net, optimizer)

    def step():
        optimizer.zero_grad()
        net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        schedule.step()

    optimizer = sgd(net, lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 25)
    assert train(net, optimizer, step, steps=24) == set()
    optimizer = sgd(net, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / 20)  # too short
    assert train(net, optimizer, step) == {("learning_rate", "learning rate of group 0")}


def test_advice_about_many_zeros_follows_their_cause():
    for layer, advice in ((nn.Dropout(0.97), "this dropout"), (nn.Threshold(9.0, 0.0), "leaky")):
        net = model(layer)
        optimizer = sgd(net, lr=1e-3)
        with tap.track(net, optimizer, alerts=[tap.alerts.dead()]) as tracker:
            for _ in range(4):
                net(torch.randn(64, 4)).square().mean().backward()
                tracker.step()
        (alert,) = tracker.alerts
        assert advice in alert.message


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), spectral_norm(nn.Linear(8, 8))])
def test_training_in_eval_mode(layer):
    net = model(layer)
    net.eval()
    assert train(net, sgd(net), only_training=False) == {("training_in_eval", "model")}
    net.train()
    assert train(net, sgd(net)) == set()
    plain = model().eval()  # nothing in it depends on the mode
    assert train(plain, sgd(plain), only_training=False) == set()


@pytest.mark.parametrize("fixed", [False, True])
def test_dropout_in_evaluation(fixed):
    net = model(nn.Dropout(0.5))
    optimizer = sgd(net)

    def step():
        optimizer.zero_grad()
        net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            net.train(not fixed)
            net(torch.randn(3, 4))
            net.train()

    assert train(net, optimizer, step) == (set() if fixed else {("dropout_in_evaluation", "1")})


@pytest.mark.parametrize("fixed", [False, True])
def test_an_evaluation_after_the_last_step(fixed):
    net = model(nn.Dropout(0.5))
    with tap.track(net, optimizer=sgd(net), alerts=True) as tracker:
        net(torch.randn(3, 4)).square().mean().backward()
        tracker.step()
        with torch.no_grad():
            net.train(not fixed)
            net(torch.randn(3, 4))
    assert [alert.rule for alert in tracker.alerts] == ([] if fixed else ["dropout_in_evaluation"])


def test_initial_weights():
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    nn.init.constant_(net[0].weight, 0.01)
    net[2].weight = nn.Parameter(net[1].weight.detach().clone())  # is it to be tied?
    with torch.no_grad():
        net[3].weight.fill_(float("nan"))
        net[4].weight.zero_()  # on purpose, as in residual branches
    with tap.track(net, optimizer=sgd(net, lr=1e-6), alerts=[tap.alerts.initialization()]) as t:
        t.step()
    found = {alert.name: alert.message.partition(":")[0] for alert in t.alerts}
    assert found == {
        "0.weight": "all of its values start as 0.01, so its units stay identical",
        "2.weight": "it starts as a copy of 1.weight, and both are trained, so they drift apart",
        "3.weight": "it starts with values that are not finite",
    }
    for layer in net:
        layer.reset_parameters()
    net[2].weight = net[1].weight  # tied
    with tap.track(net, optimizer=sgd(net, lr=1e-6), alerts=[tap.alerts.initialization()]) as t:
        t.step()
    assert t.alerts == []


def test_a_copy_that_is_not_trained_may_be_equal():
    online = model()
    net = nn.ModuleDict({"online": online, "target": copy.deepcopy(online)})
    only, both = sgd(online), sgd(net)
    assert train(net, only, lambda: None, steps=1) == set()
    assert {name for _, name in train(net, both, lambda: None, steps=1)} == {
        "target.0.weight", "target.1.weight",
    }  # fmt: skip


def test_a_rule_that_raises_does_not_reach_training(caplog):
    def broken(facts, state):
        raise RuntimeError("broken rule")
        yield

    rule = tap.alerts.no_optimizer()
    rule.__dict__["of_steps"] = broken
    net = model()
    with contextlib.suppress(RuntimeError), tap.track(net, optimizer=sgd(net), alerts=[rule]) as t:
        t.step()
        t.step()
    assert t.alerts == []


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8), True),
        (lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.1), True),
        (lambda o: torch.optim.lr_scheduler.StepLR(o, 20, 0.1), False),
        (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30), False),
        (lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 30), False),
    ],
)
def test_a_schedule_of_epochs_that_is_stepped_per_batch(make, found):
    net = model()
    optimizer = sgd(net, lr=0.01)
    scheduler = make(optimizer)

    def step():
        optimizer.zero_grad()
        net(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()

    hints = train(net, optimizer, step, hints=True, steps=29)
    name = "learning rate of group 0"
    assert hints == ({("scheduler_per_batch", name)} if found else set())


def test_a_tracker_whose_steps_never_end_says_so_once(caplog):
    net = model()
    optimizer = sgd(net)
    with tap.track(net, optimizer):
        for _ in range(45):
            optimizer.zero_grad()
            net(torch.randn(3, 4)).mean().backward()
            optimizer.step()
    said = [each for each in caplog.messages if "call tracker.step() after each" in each]
    assert len(said) == 1
