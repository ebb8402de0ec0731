"""Rules over losses, labels, inputs and second calls: each with its bug, and with the fix."""

from __future__ import annotations

import copy
import itertools
import math
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import tensortap as tap
from tensortap.capture.pipeline import pipeline
from tensortap.rooms.health.torch.probe import probe


def found(net, loss, *, steps=12, lr=1e-3, parameters=None, every=1):
    """Return the rules that found something in a training of `steps` steps."""
    optimizer = torch.optim.Adam(net.parameters() if parameters is None else parameters, lr)
    with tap.track(net, optimizer, alerts=True, every=every) as tracker:
        for number in range(steps):
            optimizer.zero_grad()
            loss(number).backward()
            optimizer.step()
            tracker.step()
    assert not tracker.unseen
    return {alert.rule for alert in (*tracker.alerts, *tracker.hints)}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def classifier(*more):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), *more)


def batch(n=16):
    x = torch.randn(n, 4)
    return x, x[:, :3].argmax(1)


def divergence(out, y):
    return F.kl_div(out, F.one_hot(y, 3) * 0.7 + 0.1, reduction="batchmean")


binary = F.binary_cross_entropy_with_logits
CASES = {
    "applied_twice": (
        lambda: (classifier(nn.Softmax(1)), F.cross_entropy),
        lambda: (classifier(), F.cross_entropy),
    ),
    "not_log_probabilities": (
        lambda: (classifier(), F.nll_loss),
        lambda: (classifier(nn.LogSoftmax(1)), F.nll_loss),
    ),
    "not_log_probabilities in kl_div": (
        lambda: (classifier(nn.Softmax(1)), divergence),
        lambda: (classifier(nn.LogSoftmax(1)), divergence),
    ),
    "not_log_probabilities beside an entropy": (
        lambda: (classifier(nn.Softmax(1)), divergence),
        lambda: (classifier(nn.Softmax(1)), lambda out, y: (out * (out + 1e-8).log()).sum()),
    ),
    "cut_logits": (
        lambda: (classifier(nn.ReLU()), F.cross_entropy),
        lambda: (classifier(), F.cross_entropy),
    ),
    "cut_logits of two classes": (
        lambda: (classifier(nn.ReLU()), lambda out, y: binary(out[:, 0], (y > 0).float())),
        lambda: (classifier(), lambda out, y: binary(out[:, 0], (y > 0).float())),
    ),
    "labels_ignored": (
        lambda: (classifier(), lambda out, y: F.cross_entropy(out, torch.full_like(y, -100))),
        lambda: (classifier(), lambda out, y: F.cross_entropy(out, y.where(y > 0, -100))),
    ),
    "odd_labels": (
        lambda: (classifier(), lambda out, y: F.cross_entropy(out, 0 * y)),
        lambda: (classifier(), F.cross_entropy),
    ),
    "loss_broadcasts": (
        lambda: (classifier(), lambda out, y: F.mse_loss(out[:, :1], y.float())),
        lambda: (classifier(), lambda out, y: F.mse_loss(out[:, 0], y.float())),
    ),
    "target_gradient": (
        lambda: (classifier(), lambda out, y: F.mse_loss(out[:, 0], out[:, 1] + y)),
        lambda: (classifier(), lambda out, y: F.mse_loss(out[:, 0], out[:, 1].detach() + y)),
    ),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("rule", "is_fixed"), list(itertools.product(CASES, (False, True))))
def test_graphs_of_losses(rule, is_fixed):
    net, criterion = CASES[rule][is_fixed]()

    def loss(_):
        x, y = batch()
        return criterion(net(x), y)

    assert (rule.split()[0] in found(net, loss)) is not is_fixed


@pytest.mark.parametrize(
    ("made", "fine", "words"),
    [
        (lambda p: -p.round().log().mean(), lambda p: -p.log().mean(), "log() of 4 zeros"),
        (lambda p: (p / p.round()).mean(), lambda p: (p / p).mean(), "a division by 0, in 4 of 8"),
        (lambda p: p.round().rsqrt().sum(), lambda p: p.rsqrt().sum(), "rsqrt(), in 4 of 8"),
        (lambda p: (900 * p).exp().mean(), lambda p: p.exp().mean(), "exp(), in 4 of 8"),
        (lambda p: p[p > 2].mean(), lambda p: p[p > 0].mean(), "mean() of no values"),
        (lambda p: (p * math.nan).exp().mean(), lambda p: p.log().mean(), ""),
    ],
)
def test_the_operation_that_made_a_loss_infinite(made, fine, words):
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Softmax(1))
    x = torch.tensor([[5.0], [-5.0], [4.0], [-4.0]])
    with torch.no_grad():
        net[0].weight[:] = torch.tensor([[1.0], [-1.0]])
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)
    with tap.track(net, optimizer, alerts=True) as tracker:
        for step in range(14):  # in 13, graphs of losses are not read otherwise
            optimizer.zero_grad()
            (made if step == 13 else fine)(net(x)).backward()
            optimizer.step()
            tracker.step()
    said = [alert.message for alert in tracker.alerts if alert.rule == "broken_loss"]
    assert len(said) == bool(words)
    assert all(words in each for each in said)


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_a_loss_that_stays_at_chance(is_shuffled):
    net = classifier()

    def loss(_):
        x, y = batch(64)
        return F.cross_entropy(net(x), y.roll(1) if is_shuffled else y)

    assert ("not_learning" in found(net, loss, steps=60, lr=0.03)) is is_shuffled


def test_a_loss_that_leaves_chance_late_is_no_hint():
    net = classifier()

    def loss(number):
        x, y = batch(64)
        return F.cross_entropy(net(x), y.roll(1) if number < 50 else y)

    assert "not_learning" not in found(net, loss, steps=110, lr=0.03)


def test_labels_that_are_the_tokens_of_an_encoder_are_no_hint():
    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, source, target):
            return self.out(self.tokens(source).mean(1, keepdim=True) + self.tokens(target))

    net = Copies()

    def loss(_):
        source = torch.randint(2, 20, (8, 6))
        target = torch.cat([torch.ones(8, 1, dtype=torch.long), source], 1)
        return F.cross_entropy(net(source, target[:, :-1]).transpose(1, 2), target[:, 1:])

    assert found(net, loss) == set()


@pytest.mark.parametrize("is_graph", [True, False])
def test_nodes_of_one_graph_may_influence_each_other(is_graph):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x) - self.layer(x).mean(0)

    net, nodes = Graph(), torch.randn(8, 4)
    rules = found(net, lambda _: net(nodes if is_graph else torch.randn(8, 4)).square().mean())
    assert ("rows_mixed" in rules) is not is_graph


@pytest.mark.parametrize("divided", [False, True])
def test_mean_losses_that_add_up(divided):
    net = classifier()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with tap.track(net, optimizer, alerts=True) as tracker:
        for _ in range(6):
            optimizer.zero_grad()
            for _ in range(4):
                x, y = batch()
                loss = F.cross_entropy(net(x), y)
                (loss / 4 if divided else loss).backward()
            optimizer.step()
            tracker.step()
    assert ("accumulation" in {hint.rule for hint in tracker.hints}) is not divided


class Language(nn.Module):
    def __init__(self, masked=True):
        super().__init__()
        self.embed, self.q, self.out = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)
        self.masked = masked

    def forward(self, tokens):
        h = self.embed(tokens).unsqueeze(1)
        h = h + F.scaled_dot_product_attention(self.q(h), h, h, is_causal=self.masked)
        return self.out(h.squeeze(1))


@pytest.mark.parametrize(
    ("masked", "shift", "rules"),
    [(True, 1, set()), (False, 1, {"sees_the_future"}), (True, 0, {"odd_labels"})],
)
def test_tokens(masked, shift, rules):
    net = Language(masked)

    def loss(_):
        tokens = torch.randint(0, 12, (6, 9)).cumsum(1) % 12
        labels = tokens[:, shift : shift + 8]
        return F.cross_entropy(net(tokens[:, :8]).flatten(0, 1), labels.flatten())

    assert found(net, loss) & {"sees_the_future", "odd_labels"} == rules


@pytest.mark.parametrize("mixes", [True, False])
def test_rows_that_influence_each_other(mixes):
    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0) if mixes else x)

    net = Net(4, 3)

    def loss(_):
        x = torch.randn(8, 4)
        return F.cross_entropy(net(x), x[:, :3].argmax(1))

    assert ("rows_mixed" in found(net, loss)) is mixes


@pytest.mark.parametrize("reads_last", [True, False])
def test_padding(reads_last):
    net = nn.ModuleDict({"embed": nn.Embedding(9, 8), "out": nn.Linear(8, 2)})

    def loss(_):
        lengths = torch.arange(8) % 5 + 3
        tokens = torch.randint(1, 9, (8, 8)) * (torch.arange(8) < lengths[:, None])
        h = net["embed"](tokens)
        h = h.mean(1) if reads_last else h[torch.arange(8), lengths - 1]
        return F.cross_entropy(net["out"](h), tokens[:, 0] % 2)

    assert ("padding" in found(net, loss)) is reads_last


@pytest.mark.parametrize("is_all_ones", [True, False])
def test_a_mask_of_padding_that_is_all_ones(is_all_ones):
    net = nn.ModuleDict({"embed": nn.Embedding(9, 8), "q": nn.Linear(8, 8), "out": nn.Linear(8, 2)})

    def loss(_):
        lengths = torch.arange(8) % 5 + 3
        real = torch.arange(8) < lengths[:, None]
        tokens = torch.randint(1, 9, (8, 8)) * real
        mask = torch.ones_like(real) if is_all_ones else real
        h = net["embed"](tokens)
        h = F.scaled_dot_product_attention(net["q"](h), h, h, attn_mask=mask[:, None])
        return F.cross_entropy(net["out"](h[:, 0]), tokens[:, 0] % 2)

    assert ("padding" in found(net, loss)) is is_all_ones


@pytest.mark.parametrize("bug", [True, False])
def test_inputs(bug):
    net = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(16, 2))
    fixed = torch.randint(0, 20, (8, 2))
    rules = found(net, lambda n: net((0 if bug else 1) * torch.randint(0, 20, (8, 2))).mean())
    assert ("one_index" in rules) is bug
    rules = found(net, lambda n: net(fixed.clone() if bug else (fixed + n) % 20).mean())
    assert ("same_batch" in rules) is bug


@pytest.mark.parametrize("size", [1, 8])
def test_batch_norm_with_single_rows(size):
    net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU())
    rules = found(net, lambda _: net(torch.randn(size, 2, 9)).square().mean())
    assert ("batch_norm" in rules) is (size == 1)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_copied_before_it_is_called_again(in_place):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model = net if in_place else torch.compile(net, backend="eager")
    if in_place:
        net.compile(backend="eager")
    assert found(model, lambda _: F.cross_entropy(model(batch()[0]), batch()[1]), steps=8) == set()
    assert int(net[1].num_batches_tracked) == 8


@pytest.mark.parametrize("is_stale", [True, False])
def test_spectral_norm_that_computes_otherwise_in_evaluation(is_stale):
    first = spectral_norm(nn.Linear(16, 8, bias=False))
    net = nn.Sequential(first, nn.Linear(8, 2, bias=False))
    nn.init.normal_(first.parametrizations.weight.original)
    first.parametrizations.weight[0].train(not is_stale)  # else its power iteration stands still

    def loss(_):
        x = torch.randn(16, 16)
        return (net(x) - x[:, :2]).square().mean()

    assert ("batch_norm" in found(net, loss, steps=27)) is is_stale


@pytest.mark.parametrize("bug", [True, False])
def test_parameters_that_hardly_learn(bug):
    net = classifier()
    net[0].requires_grad_(not bug)
    assert ("mostly_frozen" in found(net, lambda _: net(torch.randn(8, 4)).mean())) is False
    net[2].bias.requires_grad_(not bug)
    net = nn.Sequential(net[0], nn.Sequential(nn.Linear(8, 8)).requires_grad_(not bug), net[2])
    net[2].requires_grad_(True)
    assert ("mostly_frozen" in found(net, lambda _: net(torch.randn(8, 4)).mean())) is bug
    net, rate = classifier(), 1e-9 if bug else 1e-3

    def mean(_):
        return net(torch.randn(8, 4)).mean()

    for every in (1, 7):
        rules = found(net, mean, lr=rate, steps=50, every=every)
        assert ("hardly_changes" in rules) is bug


def test_training_is_bit_identical_with_losses_and_second_calls_looked_at(monkeypatch):
    called = []
    monkeypatch.setattr(
        "tensortap.rooms.health.torch.passes.probe", lambda *a: called.append(1) or probe(*a)
    )

    def trained(how):
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Embedding(12, 8), nn.Dropout(0.2), nn.Flatten(), nn.Linear(40, 8), nn.BatchNorm1d(8),
            nn.ReLU(), nn.Linear(8, 3),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        tracker = tap.track(net, optimizer, alerts=True) if how == "tracked" else None
        if tracker is not None:
            tracker.__enter__()
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            tokens = torch.randint(0, 12, (8, 5))
            loss = F.cross_entropy(net(tokens), tokens[:, 0] % 3)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if tracker is not None:
                tracker.step()
        if tracker is not None:
            tracker.__exit__(None, None, None)
            assert not tracker.unseen
        return [*losses, *copy.deepcopy(net).state_dict().values(), torch.get_rng_state()]

    plain, tracked = trained("plain"), trained("tracked")
    assert called
    assert all(map(torch.equal, plain, tracked))


def test_a_probe_draws_no_number_and_silences_its_own_thread_only(capsys):
    class Noisy(nn.Module):
        def forward(self, x):
            random.random()
            np.random.rand()  # noqa: NPY002 - the generator that programs share
            print("the model")
            other = threading.Thread(target=print, args=("another thread",))
            other.start()
            other.join()
            return x * 2

    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - the same
    probe(Noisy(), (torch.randn(4, 3),), {})
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    assert set(capsys.readouterr().out.splitlines()) == {"another thread"}


@pytest.mark.parametrize("norm", [False, True])
def test_a_model_that_catches_values_is_not_called_again(norm):
    class Net(nn.Sequential):
        def forward(self, x):
            x = super().forward(x)
            assert tap.catch(x, "caught by a model") is not None
            return x

    net = Net(nn.Linear(4, 3), *([nn.BatchNorm1d(3)] if norm else []))
    before = pipeline.counters["caught by a model"].calls if norm else 0
    found(net, lambda _: net(torch.randn(8, 4)).square().mean(), steps=27)
    assert pipeline.counters["caught by a model"].calls == before + 27


@pytest.mark.parametrize("is_applied", [False, True])
def test_logits_that_begin_between_0_and_1_are_no_probabilities(is_applied):
    net = nn.Sequential(nn.Linear(4, 1), *([nn.Sigmoid()] if is_applied else []))
    with torch.no_grad():
        net[0].weight.mul_(0.02)
        net[0].bias.fill_(0.5)
    x = torch.randn(64, 4)
    y = (x[:, :1] > 0).float()
    assert net(x).min() > 0
    assert net(x).max() < 1
    assert ("applied_twice" in found(net, lambda _: binary(net(x), y))) == is_applied


@pytest.mark.parametrize("classes", [3, 40])
def test_a_slow_start_is_no_hint(classes):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, classes))

    def loss(_):
        x, y = batch(64)
        if classes > 3:
            y = (x[:, 0] * 1e4).long() % classes
        return F.cross_entropy(net(x), y)

    assert "not_learning" not in found(net, loss, steps=60, lr=3e-3)
