"""No false alarms: correct programs of many kinds raise no alert."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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


def evaluated(net: nn.Module, train: Callable[[], None]) -> Callable[[], None]:
    """Return a step that evaluates the model after it has trained it."""

    def step() -> None:
        train()
        net.eval()
        with torch.no_grad():
            net(digits()[0])
        net.train()

    return step


def cross(net: nn.Module) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        x, y = digits()
        return F.cross_entropy(net(x), y)

    return loss


@program
def with_evaluation():
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = adam(net)
    return net, optimizer, evaluated(net, fit(optimizer, cross(net)))


@program
def convolutions():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, nesterov=True)
    batch = torch.randn(8, 3, 8, 8), torch.randint(0, 3, (8,))
    return net, optimizer, fit(optimizer, lambda: F.cross_entropy(net(batch[0]), batch[1]))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


class Language(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def next_token(net: nn.Module) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        tokens = torch.randint(0, 11, (4, 9))
        return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return loss


@program
def tied_weights():
    net = Language(tied=True)
    optimizer = adam(net)
    return net, optimizer, fit(optimizer, next_token(net))


@program
def warmup_and_cosine():
    net = Language()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 5))
    train = fit(optimizer, next_token(net))
    return net, optimizer, lambda: (train(), warm.step())


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
def generator_alone():
    net = Gan()
    (one, _), step = gan_step(net)
    return net, one, step


@program
def momentum_encoder_in_the_model():
    net = nn.ModuleDict({"online": mlp(8, 16, 4), "target": mlp(8, 16, 4).requires_grad_(False)})
    net["target"].load_state_dict(net["online"].state_dict())
    optimizer = adam(net)

    def step():
        x, _ = digits()
        optimizer.zero_grad()
        F.mse_loss(net["online"](x), net["target"](x + 0.1)).backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(net["target"].parameters(), net["online"].parameters(), strict=True):
                a.lerp_(b, 0.1)

    return net, optimizer, step


@program
def frozen_backbone():
    backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)).requires_grad_(False)
    net = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(16, 3)})
    optimizer = adam(net)

    def loss():
        x, y = digits()
        return F.cross_entropy(net["head"](backbone(x)), y)

    return net, optimizer, fit(optimizer, loss)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@program
def lora():
    net = Lora()
    optimizer = adam(net)
    return net, optimizer, fit(optimizer, cross(net))


@program
def accumulation():
    net = mlp(8, 16, 3)
    optimizer = adam(net)
    loss = cross(net)

    def step():
        for _ in range(4):
            (loss() / 4).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return net, optimizer, step


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


@program
def mixed_precision():
    net = Language()
    optimizer = adam(net)
    loss = next_token(net)

    def mixed():
        with torch.autocast("cpu", torch.bfloat16):
            return loss()

    return net, optimizer, fit(optimizer, mixed)


@program
def loss_scaling():
    net = mlp(8, 16, 3)
    optimizer = adam(net)
    loss, scaler = cross(net), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            scaled = scaler.scale(loss())
        scaled.backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return net, optimizer, step


@program
def checkpointing():
    net = Language()
    optimizer = adam(net)

    def loss():
        from torch.utils.checkpoint import checkpoint

        tokens = torch.randint(0, 11, (4, 9))
        x = net.embed(tokens[:, :-1])
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(net.head(x).flatten(0, 1), tokens[:, 1:].flatten())

    return net, optimizer, fit(optimizer, loss)


@program
def reentrant_checkpointing():
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = adam(net)

    def loss():
        x, y = digits()
        x.requires_grad_()
        return F.cross_entropy(torch.utils.checkpoint.checkpoint(net, x, use_reentrant=True), y)

    return net, optimizer, fit(optimizer, loss)


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


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            if (mine := chosen == i).any():
                out[mine] = weight[mine, None] * expert(x[mine])
        return out


@program
def experts_by_chance():
    net = Experts()
    optimizer = adam(net)
    return net, optimizer, fit(optimizer, cross(net))


@program
def compiled():
    net = mlp(8, 16, 3)
    optimizer = adam(net)
    fast = torch.compile(net, backend="aot_eager")
    return net, optimizer, fit(optimizer, cross(fast))


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


@program
def distillation():
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 3))
    net.teacher = [nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).eval()]
    optimizer = adam(net)

    def loss():
        x, y = digits()
        with torch.no_grad():
            wanted = (net.teacher[0](x) / 2).softmax(1)
        made = net(x)
        return F.kl_div((made / 2).log_softmax(1), wanted, reduction="batchmean") + F.cross_entropy(
            made, y
        )

    return net, optimizer, fit(optimizer, loss)


@program
def sparse_embeddings():
    net = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3))
    sparse = torch.optim.SparseAdam(net[0].parameters())
    dense = torch.optim.Adam(net[1].parameters())

    def step():
        sparse.zero_grad()
        dense.zero_grad()
        tokens = torch.randint(0, 50, (16,))
        F.cross_entropy(net(tokens), tokens % 3).backward()
        sparse.step()
        dense.step()

    return net, [sparse, dense], step


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
