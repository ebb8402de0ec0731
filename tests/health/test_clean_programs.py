"""No false alarms: correct programs with unusual steps; tests/health/collection has usual ones."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tap

STEPS = 25
Program = Callable[[], tuple[nn.Module, object, Callable[[], object]]]
PROGRAMS: dict[str, Program] = {}


def program(make: Program) -> Program:
    PROGRAMS[make.__name__] = make
    return make


def mlp(*sizes: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def adam(*nets: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    trained = [p for net in nets for p in net.parameters() if p.requires_grad]
    return torch.optim.Adam(trained, lr=lr)


def fit(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def digits(n: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 8), torch.randint(0, 3, (n,))


def cross(net: nn.Module) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        x, y = digits()
        return F.cross_entropy(net(x), y)

    return loss


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)
        )
        self.critic = mlp(8, 16, 1)


def gan_step(net: Gan) -> tuple[list[torch.optim.Optimizer], Callable[[], None]]:
    one, two = adam(net.generator), adam(net.critic)

    def step() -> None:
        with torch.no_grad():
            fake = net.generator(torch.randn(16, 4))
        two.zero_grad()
        (
            F.softplus(-net.critic(torch.randn(16, 8))).mean() + F.softplus(net.critic(fake)).mean()
        ).backward()
        two.step()
        one.zero_grad()
        F.softplus(-net.critic(net.generator(torch.randn(16, 4)))).mean().backward()
        one.step()

    return [one, two], step


@program
def gan():
    net = Gan()
    return net, *gan_step(net)


@program
def accumulation_over_steps():
    net = mlp(8, 16, 3)
    optimizer = adam(net)
    loss, count = cross(net), iter(range(1, 1000))

    def step():
        loss().backward()
        if next(count) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return net, optimizer, step


def checkpointed(reentrant):
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = adam(net)

    def loss():
        x, y = digits()
        return F.cross_entropy(checkpoint(net, x.requires_grad_(), use_reentrant=reentrant), y)

    return net, optimizer, fit(optimizer, loss)


PROGRAMS["checkpointing"] = lambda: checkpointed(False)
PROGRAMS["reentrant_checkpointing"] = lambda: checkpointed(True)


@program
def lbfgs():
    net = mlp(8, 16, 3)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    x, y = digits()

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    return net, optimizer, lambda: optimizer.step(closure)


@program
def sharpness_aware():
    net = mlp(8, 16, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    loss = cross(net)

    def step():
        optimizer.zero_grad()
        loss().backward()
        moves = [0.01 * p.grad.clone() for p in net.parameters()]
        with torch.no_grad():
            for p, move in zip(net.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss().backward()
        with torch.no_grad():
            for p, move in zip(net.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()

    return net, optimizer, step


# -- unusual steps ---------------------------------------------------------------------------


@program
def zeroed_through_data():
    net = mlp(8, 16, 3)
    optimizer = adam(net)
    loss = cross(net)

    def step():
        loss().backward()
        optimizer.step()
        for parameter in net.parameters():
            parameter.grad.data.zero_()

    return net, optimizer, step


@program
def updates_by_hand():
    net = mlp(8, 16, 3)
    loss = cross(net)

    def step():
        gradients = torch.autograd.grad(loss(), list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient

    return net, None, step


@program
def backward_pass_in_the_next_step():
    net = mlp(8, 16, 3)
    optimizer = adam(net)
    forward, losses = cross(net), []

    def step():
        if losses:
            optimizer.zero_grad()
            losses.pop().backward()
            optimizer.step()
        losses.append(forward())

    return net, optimizer, step


@program
def steps_inside_backward():
    net = mlp(8, 16, 3)
    made = {p: torch.optim.SGD([p], 0.1) for p in net.parameters()}

    def update(parameter):
        made[parameter].step()
        made[parameter].zero_grad()

    for parameter in made:
        parameter.register_post_accumulate_grad_hook(update)
    loss = cross(net)
    return net, list(made.values()), lambda: loss().backward()


# -- unusual models --------------------------------------------------------------------------


@program
def target_network_that_is_not_frozen():
    online = mlp(8, 16, 3)
    net = nn.ModuleDict({"online": online, "target": copy.deepcopy(online)})
    optimizer = adam(online)

    def step():
        x, actions = digits()
        with torch.no_grad():
            wanted = 1 + net["target"](digits()[0]).max(1).values
        optimizer.zero_grad()
        F.smooth_l1_loss(online(x).gather(1, actions[:, None])[:, 0], wanted).backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(net["target"].parameters(), online.parameters(), strict=True):
                a.lerp_(b, 0.01)

    return net, optimizer, step


@program
def parametrizations():
    of = nn.utils.parametrizations
    net = nn.Sequential(
        of.weight_norm(nn.Linear(8, 16)), nn.ReLU(), of.spectral_norm(nn.Linear(16, 16)),
        nn.ReLU(), of.orthogonal(nn.Linear(16, 3)),
    )  # fmt: skip
    optimizer = adam(net)
    return net, optimizer, fit(optimizer, cross(net))


# -- batches and dtypes ----------------------------------------------------------------------


@program
def autocast_around_the_whole_step():
    net = mlp(8, 16, 3)
    optimizer = adam(net)
    train = fit(optimizer, cross(net))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            train()

    return net, optimizer, step


def found_in(make: Program) -> tuple[list[str], set[str]]:
    """Return the alerts that a program raises, and the rules that give hints."""
    torch.manual_seed(0)
    net, optimizer, step = make()
    with tap.track(net, optimizer=optimizer, alerts=True) as tracker:
        for _ in range(STEPS):
            step()
            tracker.step()
    alerts = [str(alert) for alert in tracker.alerts if alert.rule not in ("unseen", "remark")]
    return alerts, {hint.rule for hint in tracker.hints}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_alert(name):
    assert found_in(PROGRAMS[name]) == ([], set())
