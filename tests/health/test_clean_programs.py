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
def classification():
    net = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
    )
    optimizer = adam(net)
    return net, optimizer, fit(optimizer, cross(net))


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
def language_model():
    net = Language()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    return net, optimizer, fit(optimizer, next_token(net))


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


@program
def warm_restarts():
    net = mlp(8, 16, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
    train = fit(optimizer, cross(net))
    return net, optimizer, lambda: (train(), schedule.step())


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)
        )
        self.critic = mlp(8, 16, 1)


def gan_step(
    net: Gan, clip: float | None
) -> tuple[list[torch.optim.Optimizer], Callable[[], None]]:
    one, two = adam(net.generator), adam(net.critic)

    def step() -> None:
        with torch.no_grad():
            fake = net.generator(torch.randn(16, 4))
        two.zero_grad()
        (
            F.softplus(-net.critic(torch.randn(16, 8))).mean() + F.softplus(net.critic(fake)).mean()
        ).backward()
        two.step()
        if clip is not None:
            with torch.no_grad():
                for parameter in net.critic.parameters():
                    parameter.clamp_(-clip, clip)
        one.zero_grad()
        F.softplus(-net.critic(net.generator(torch.randn(16, 4)))).mean().backward()
        one.step()

    return [one, two], step


@program
def gan():
    net = Gan()
    return net, *gan_step(net, None)


@program
def wgan_with_clipping():
    net = Gan()
    return net, *gan_step(net, 0.5)


@program
def generator_alone():
    net = Gan()
    (one, _), step = gan_step(net, None)
    return net, one, step


@program
def reinforce():
    net = mlp(8, 16, 3)
    optimizer = adam(net)

    def loss():
        states = torch.randn(16, 8)
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=net(states)).sample()
        chosen = F.log_softmax(net(states), dim=-1).gather(1, actions[:, None])
        return -(chosen * torch.randn(16, 1)).mean()

    return net, optimizer, fit(optimizer, loss)


@program
def q_learning_with_target():
    net, target = mlp(8, 16, 3), mlp(8, 16, 3).requires_grad_(False)
    optimizer = adam(net)

    def step():
        x, actions = digits()
        with torch.no_grad():
            wanted = target(torch.randn(16, 8)).max(dim=1).values
        optimizer.zero_grad()
        F.mse_loss(net(x).gather(1, actions[:, None])[:, 0], wanted).backward()
        optimizer.step()
        target.load_state_dict(net.state_dict())

    return net, optimizer, step


@program
def lstm():
    net = nn.ModuleDict({"lstm": nn.LSTM(8, 16, batch_first=True), "head": nn.Linear(16, 3)})
    optimizer = adam(net)

    def loss():
        output, _ = net["lstm"](torch.randn(4, 6, 8))
        return F.cross_entropy(net["head"](output[:, -1]), torch.randint(0, 3, (4,)))

    train = fit(optimizer, loss)

    def step():
        train()

    return net, optimizer, step


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
def forward_forward():
    net = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])
    optimizers = [adam(layer) for layer in net]

    def step():
        good, bad = digits()[0], digits()[0] + 1
        for layer, optimizer in zip(net, optimizers, strict=True):
            a, b = torch.tanh(layer(good.detach())), torch.tanh(layer(bad.detach()))
            optimizer.zero_grad()
            F.softplus(b.square().mean(1) - a.square().mean(1)).mean().backward()
            optimizer.step()
            good, bad = a, b

    return net, optimizers, step


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
def weight_average():
    net = mlp(8, 16, 3)
    optimizer = adam(net)
    average = torch.optim.swa_utils.AveragedModel(net)
    train = fit(optimizer, cross(net))
    return net, optimizer, lambda: (train(), average.update_parameters(net))


@program
def averages_swapped_for_evaluation():
    net = mlp(8, 16, 3)
    optimizer = adam(net)
    average = copy.deepcopy(net.state_dict())
    train = fit(optimizer, cross(net))

    def step():
        train()
        mine = copy.deepcopy(net.state_dict())
        net.load_state_dict(average)
        net(digits()[0])
        net.load_state_dict(mine)

    return net, optimizer, step


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
def dropout_as_uncertainty():
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = adam(net)
    train = fit(optimizer, cross(net))

    def step():
        train()
        net.eval()
        net[1].train()
        with torch.no_grad():
            torch.stack([net(digits()[0]) for _ in range(4)]).std(0)
        net.train()

    return net, optimizer, step


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


def test_there_are_thirty():
    assert len(PROGRAMS) >= 30


@pytest.mark.slow
def test_no_alert_in_jax():
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3)(linen.relu(linen.Dense(16)(x)))

    net, adam = Net(), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    key = jax.random.key(0)
    params = net.init(key, jax.numpy.ones((1, 8)))
    state = adam.init(params)

    @jax.jit
    def update(params, state, x, y):
        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, x), y).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        changes, state = adam.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, gradients, value

    with tap.track(params, state, alerts=True) as tracker:
        for i in range(STEPS):
            x = jax.random.normal(jax.random.fold_in(key, i), (16, 8))
            y = jax.random.randint(jax.random.fold_in(key, STEPS + i), (16,), 0, 3)
            result = tracker.intercept(update, params, state, x, y)
            params, state, gradients, value = result
            tracker.step(params, state, gradients, loss=float(value))
    assert len(tracker.records) > STEPS
    assert [str(alert) for alert in (*tracker.alerts, *tracker.hints)] == []


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
