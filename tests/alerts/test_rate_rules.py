"""Rules over schedulers, clipping and dtypes: each with the bug, and with the fix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tensortap as tap
from tests.alerts.training import model, sgd, train

BATCH = 16


def rules(net, optimizer, step, **options):
    return {rule for rule, _ in train(net, optimizer, step, **options)}


def backward(net, optimizer, scaler=None):
    optimizer.zero_grad()
    loss = net(torch.randn(BATCH, 4)).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


ORDERS = {
    "right": ("backward", "optimizer", "scheduler"),
    "per epoch": ("backward", "optimizer"),
    "before": ("backward", "scheduler", "optimizer"),
    "first": ("scheduler", "backward", "optimizer"),
    "twice": ("backward", "optimizer", "scheduler", "scheduler"),
}


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize("name", ORDERS)
def test_where_a_scheduler_is_stepped(name):
    net = model()
    optimizer = sgd(net, lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    do = {
        "backward": lambda: backward(net, optimizer),
        "optimizer": optimizer.step,
        "scheduler": scheduler.step,
    }

    def step():
        for part in ORDERS[name]:
            do[part]()

    fine = name in ("right", "per epoch")
    assert rules(net, optimizer, step) == (set() if fine else {"scheduler_order"})


def test_schedulers_of_others_do_not_matter():
    net, other = model(), model()
    optimizer, others = sgd(net), sgd(other)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(others, 0.9)

    def step():
        backward(net, optimizer)
        optimizer.step()
        others.step()
        scheduler.step()
        scheduler.step()

    assert rules(net, optimizer, step) == set()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8), True),
        (lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.1), True),
        (lambda o: torch.optim.lr_scheduler.StepLR(o, 20, 0.1), False),
        (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30), False),
        (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10), True),
        (lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 30), False),
    ],
)
def test_a_schedule_of_epochs_that_is_stepped_per_batch(make, found):
    net = model()
    optimizer = sgd(net, lr=0.01)
    scheduler = make(optimizer)

    def step():
        backward(net, optimizer)
        optimizer.step()
        scheduler.step()

    hints = rules(net, optimizer, step, hints=True, steps=29)
    assert hints == ({"scheduler_per_batch"} if found else set())


@pytest.mark.parametrize(
    ("threshold", "found"), [(1e-3, {"clipping"}), (1e3, {"clipping"}), (None, set())]
)
def test_clipping_that_always_or_never_acts(threshold, found):
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = sgd(net, lr=1e-4)

    def step():
        backward(net, optimizer)
        if threshold is not None:
            nn.utils.clip_grad_norm_(net.parameters(), threshold)
        optimizer.step()

    assert rules(net, optimizer, step, hints=True, steps=91) == found


@pytest.fixture
def process_group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_gradients_that_ddp_writes_are_not_clipped(process_group):
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))  # the mean of one is the same
    optimizer = sgd(net, lr=1e-4)

    def step():
        backward(net, optimizer)
        optimizer.step()

    assert rules(net, optimizer, step, hints=True, steps=91) == set()


@pytest.mark.parametrize("zeroed", [True, False])
def test_clipping_after_the_step(zeroed):
    net = nn.Linear(4, 4)
    optimizer = sgd(net, lr=1e-4)

    def step():
        backward(net, optimizer)
        optimizer.step()
        for parameter in net.parameters():
            parameter.grad.mul_(0.0 if zeroed else 0.5)  # zeroed by hand, or clipped

    assert rules(net, optimizer, step, hints=True) == (set() if zeroed else {"clipping"})


def test_clipping_of_scaled_gradients():
    net = nn.Linear(4, 4)
    optimizer = sgd(net, lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with tap.track(net, optimizer=optimizer, alerts=True) as tracker:
        for _ in range(91):
            with torch.autocast("cpu", torch.float16):
                backward(net, optimizer, scaler)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            tracker.step()
    (hint,) = tracker.hints
    assert hint.rule == "clipping"
    assert "scaler.unscale_(optimizer) before clipping" in hint.message


def test_clipping_that_sometimes_acts_and_accumulation():
    net = nn.Linear(4, 4)
    optimizer = sgd(net, lr=1e-4)
    count = iter(range(1000))

    def clips():
        backward(net, optimizer)
        often = next(count) % 20 < 10
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3 if often else 1e3)
        optimizer.step()

    def divides():  # by a constant, which is no clipping
        backward(net, optimizer)
        for parameter in net.parameters():
            parameter.grad.div_(4)
        optimizer.step()

    assert rules(net, optimizer, clips, hints=True, steps=91) == set()
    assert rules(net, optimizer, divides, hints=True, steps=91) == set()


@pytest.mark.parametrize(
    ("threshold", "found"), [(1e-3, {"clipping"}), (1e3, set()), (None, set())]
)
def test_clipping_under_a_scaler(threshold, found):
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = sgd(net, lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step():
        with torch.autocast("cpu", torch.float16):
            backward(net, optimizer, scaler)
        if threshold is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), threshold)
        scaler.step(optimizer)
        scaler.update()

    assert rules(net, optimizer, step, hints=True, steps=91) == found


@pytest.mark.parametrize("overflows", [True, False])
def test_a_scale_that_falls_for_ever(overflows):
    net = model()
    optimizer = sgd(net, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step():
        with torch.autocast("cpu", torch.float16):
            backward(net, optimizer, scaler)
        if overflows:
            net[0].weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()

    found = rules(net, optimizer, step, steps=21)
    assert ("scale_falls" in found) is overflows
    assert "no_autocast" not in found


@pytest.mark.parametrize("autocast", [True, False])
def test_a_scaler_without_autocast(autocast):
    net = model()
    optimizer = sgd(net, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def step():
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            backward(net, optimizer, scaler)
        scaler.step(optimizer)
        scaler.update()

    assert rules(net, optimizer, step) == (set() if autocast else {"no_autocast"})


@pytest.mark.parametrize("where", ["forward", "backward", "step", "switched off"])
def test_autocast_around_other_code_than_the_model(where):
    net = model()
    if where == "switched off":
        net = Off(net)
    optimizer = sgd(net, lr=1e-3)

    def autocast(*places):
        return torch.autocast("cpu", torch.bfloat16, enabled=where in places)

    def step():
        optimizer.zero_grad()
        with autocast("forward", "switched off"):
            loss = net(torch.randn(BATCH, 4)).square().mean()
        with autocast("backward"):
            loss.backward()
        with autocast("step"):
            optimizer.step()

    assert rules(net, optimizer, step) == (set() if where == "forward" else {"no_autocast"})


class Off(nn.Module):
    """A model that switches autocast off."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.inner(x)


class Mixed(nn.Module):
    """A model of which a layer leaves autocast, or whose output is float64."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug, self.first, self.second = bug, nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x)
        if self.bug == "float32":
            with torch.autocast("cpu", enabled=False):
                return self.second(x.float())
        x = self.second(x)
        return x.double() if self.bug == "float64" else x


@pytest.mark.parametrize("bug", ["", "float32", "float64"])
def test_layers_that_compute_in_other_dtypes(bug):
    net = Mixed(bug)
    optimizer = sgd(net, lr=1e-3)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            backward(net, optimizer)
        optimizer.step()

    assert rules(net, optimizer, step, hints=True) == ({"wide_layers"} if bug else set())
