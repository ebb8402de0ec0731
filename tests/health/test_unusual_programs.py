"""No false alarms: correct programs with unusual habits raise no alert."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.health.test_clean_programs import Gan, adam, cross, digits, evaluated, fit, found_in, mlp

PROGRAMS = {}


def program(make):
    PROGRAMS[make.__name__] = make
    return make


# -- losses ----------------------------------------------------------------------------------


@program
def triplets():  # do not depend on the last bias
    net = mlp(8, 16, 4)
    optimizer = adam(net)

    def loss():
        x, _ = digits()
        return F.triplet_margin_loss(net(x), net(x + 0.1), net(digits()[0]))

    return net, optimizer, fit(optimizer, loss)


@program
def padded_tokens():
    net = nn.Sequential(nn.Embedding(20, 16, padding_idx=0), nn.Linear(16, 20))
    optimizer = adam(net)

    def loss():
        tokens = torch.randint(1, 20, (4, 9))
        tokens[0, 5:] = 0
        return F.cross_entropy(net(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], ignore_index=0)

    return net, optimizer, fit(optimizer, loss)


# -- steps -----------------------------------------------------------------------------------


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
def optimizers_in_turn():
    net = mlp(8, 16, 3)
    optimizers = itertools.cycle(made := [adam(net[0]), adam(net[2])])
    loss = cross(net)

    def step():
        for each in made:
            each.zero_grad()
        loss().backward()
        next(optimizers).step()

    return net, made, step


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


@program
def gradient_penalty():
    net = Gan()
    one, two = adam(net.generator), adam(net.critic)

    def step():
        for _ in range(2):
            real, fake = digits()[0], net.generator(torch.randn(16, 4)).detach()
            mixed = (real + torch.rand(16, 1) * (fake - real)).requires_grad_()
            (slope,) = torch.autograd.grad(net.critic(mixed).sum(), mixed, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            two.zero_grad()
            (net.critic(fake).mean() - net.critic(real).mean() + 10 * penalty).backward()
            two.step()
        one.zero_grad()
        (-net.critic(net.generator(torch.randn(16, 4))).mean()).backward()
        one.step()

    return net, [one, two], step


@program
def meta_learning():
    net = mlp(8, 16, 3)
    optimizer = adam(net)

    def loss():
        weights = dict(net.named_parameters())
        x, y = digits()
        inner = F.cross_entropy(torch.func.functional_call(net, weights, (x,)), y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), slopes, strict=True)}
        x, y = digits()
        return F.cross_entropy(torch.func.functional_call(net, fast, (x,)), y)

    return net, optimizer, fit(optimizer, loss)


# -- models ----------------------------------------------------------------------------------


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


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        scale = weight.abs().max() / 7
        return (weight / scale).round() * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class RoundedLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, Rounded.apply(self.weight), self.bias)


@program
def quantization_aware():
    net = nn.Sequential(RoundedLinear(8, 16), nn.ReLU(), RoundedLinear(16, 3))
    optimizer = adam(net)
    return net, optimizer, fit(optimizer, cross(net))


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.often, self.rarely = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x, head):
        return getattr(self, head)(self.body(x).tanh())


@program
def a_head_that_is_rarely_used():
    net = Tasks()
    optimizer, count = adam(net), itertools.count(1)

    def loss():
        x, y = digits()
        return F.cross_entropy(net(x, "often" if next(count) % 15 else "rarely"), y)

    return net, optimizer, fit(optimizer, loss)


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


class KeysWithBias(nn.Module):
    """Attention as in BERT: a bias of the keys has no influence, and a gradient of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = (each(x).unsqueeze(1) for each in (self.query, self.key, self.value))
        x = x + F.scaled_dot_product_attention(q, k, v).squeeze(1)
        return self.head(self.layer(x).mean(1))


@program
def attention_with_a_bias_of_keys():
    net = KeysWithBias()
    optimizer = torch.optim.Adam(net.parameters())

    def loss():
        return F.cross_entropy(net(torch.randn(16, 5, 8)), digits()[1])

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


class SkippedAtRandom(nn.Module):
    """Stochastic depth: the last layer is skipped in half of the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if not self.training or float(torch.rand(())) >= number / 4:
                x = x + layer(x).relu()
        return self.head(x)


@program
def stochastic_depth():
    net = SkippedAtRandom()
    optimizer = adam(net)
    return net, optimizer, evaluated(net, fit(optimizer, cross(net)))


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


@program
def closures_that_are_called_many_times():
    net = mlp(8, 16, 3)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, line_search_fn="strong_wolfe")

    def step():
        x, y = digits()

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return net, optimizer, step


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_alert(name):
    assert found_in(PROGRAMS[name]) == ([], set())
