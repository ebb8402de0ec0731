"""Rules over forward passes, batches and losses: each with the bug, and with the fix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensortap as tap
from tests.alerts.training import model, sgd, train

CLASSES = 3


def trained(batches, loss=None, *, net=None, hints=False, steps=25, after=None, **options):
    """Return the rules that speak up while a model is trained on `batches`."""
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = sgd(net, lr=0.01)
    batches = iter(batches)
    loss = loss or (lambda output: output.square().mean())

    def step():
        optimizer.zero_grad()
        loss(net(next(batches))).backward()
        optimizer.step()
        if after is not None:
            after(net)

    return {rule for rule, _ in train(net, optimizer, step, steps, hints, **options)}


def noise(scale=1.0, shape=(16, 4)):
    while True:
        yield scale * torch.randn(shape)


TARGET = torch.arange(16) % CLASSES


# -- modes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [False, True])
def test_batch_norm_in_evaluation(fixed):
    def evaluate(net):
        net.train(not fixed)
        with torch.no_grad():
            net(torch.randn(16, 4))
        net.train()

    found = trained(noise(), net=model(nn.BatchNorm1d(8)), after=evaluate, hints=True)
    assert found == (set() if fixed else {"batch_norm_in_evaluation"})


@pytest.mark.parametrize("how", ["recorded", "no_grad", "attack"])
def test_gradients_in_evaluation(how):
    def evaluate(net):
        net.eval()
        with torch.set_grad_enabled(how != "no_grad"):
            output = net(torch.randn(16, 4))
        if how == "attack":  # gradients that somebody uses
            torch.autograd.grad(output.sum(), list(net.parameters()))
        net.train()

    found = trained(noise(), after=evaluate, hints=True)
    assert found == ({"gradients_in_evaluation"} if how == "recorded" else set())


class Noisy(nn.Module):
    """Dropout by a function; `fixed` tells it about the mode."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed

    def forward(self, x):
        return F.dropout(x, 0.5, self.training if self.fixed else True)


@pytest.mark.parametrize("how", ["function", "fixed", "module left in train mode"])
def test_random_numbers_in_evaluation(how):
    net = model(nn.Dropout(0.5) if "module" in how else Noisy(how == "fixed"))

    def evaluate(net):
        net.eval()
        net[1].train("module" in how)  # as for estimates of uncertainty
        with torch.no_grad():
            net(torch.randn(16, 4))
        net.train()

    found = trained(noise(), net=net, after=evaluate, hints=True)
    assert found == ({"random_in_evaluation"} if how == "function" else set())


# -- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "found"), [(1, {"same_batch"}), (3, {"same_batch"}), (8, set())])
def test_the_same_batches_again_and_again(count, found):
    few = list(itertools.islice(noise(), count))
    assert trained(itertools.cycle(few), hints=True) == found


class Random(torch.utils.data.Dataset):
    """A dataset whose generator is copied into every worker."""

    def __init__(self, own: bool) -> None:
        self.own = own
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int):
        if self.own and (worker := torch.utils.data.get_worker_info()) is not None:
            self.generator, self.own = np.random.default_rng(worker.seed), False
        return self.generator.standard_normal(4, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_workers_with_the_same_random_numbers(own):
    loader = torch.utils.data.DataLoader(Random(own), 8, num_workers=2)
    found = trained(loader, hints=True, steps=20)
    assert found == (set() if own else {"identical_workers"})


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("seeded", True), ("never seeded", False), ("sampler", True), ("set_epoch", False),
        ("kept", True), ("not to shuffle", False),
    ],
)  # fmt: skip
def test_batches_in_the_same_order_in_every_epoch(how, found):
    data = list(torch.randn(80, 4))
    generator = torch.Generator().manual_seed(0)
    sampler = None
    if how in ("sampler", "set_epoch"):
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)
    shuffle = sampler is None and how != "not to shuffle"
    loader = torch.utils.data.DataLoader(data, 2, shuffle, sampler, generator=generator)

    def batches():
        for epoch in itertools.count():
            if how == "seeded":
                generator.manual_seed(0)
            if how == "set_epoch":
                sampler.set_epoch(epoch)
            yield from loader

    given = itertools.cycle(loader) if how == "kept" else batches()
    expected = {"not_shuffled"} if found else set()
    assert trained(given, steps=2 * len(loader)) == expected


def test_constant_batches():
    def rows():
        while True:
            yield torch.randn(1, 4).expand(16, 4).contiguous()

    ones = (torch.full((16, 4), float(i)) for i in range(1, 100))
    assert trained(rows(), hints=True) == {"constant_input"}
    assert trained(ones, hints=True) == {"constant_input"}
    words = (F.one_hot(torch.randint(0, 5000, (16,)), 5000).float() for _ in itertools.count())
    net = nn.Linear(5000, CLASSES)  # whose inputs are almost all 0
    assert trained(words, net=net, hints=True) == set()
    assert trained(noise(), hints=True) == set()


def test_inputs_that_are_not_normalized():
    pixels = (255 * x.sigmoid() for x in noise())
    assert trained(pixels, hints=True) == {"not_normalized"}
    assert trained((x.sigmoid() for x in noise()), hints=True) == set()


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_inputs_that_change_scale_in_evaluation(scale):
    def evaluate(net):
        net.eval()
        with torch.no_grad():
            net(scale * torch.randn(16, 4))
        net.train()

    assert trained(noise(), after=evaluate) == ({"input_scale"} if scale > 1 else set())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_have_no_scale(bad):
    def evaluate(net):
        net.eval()
        with torch.no_grad():
            net(torch.full((16, 4), bad))
        net.train()

    inputs = (torch.full((16, 4), bad) for _ in itertools.count())
    found = trained(inputs, after=evaluate, hints=True)
    assert not found & {"input_scale", "not_normalized", "constant_input"}


@pytest.mark.parametrize("fixed", [False, True])
def test_images_that_are_normalized_in_training_only(fixed):
    def evaluate(net):
        net.eval()
        with torch.no_grad():
            net(torch.rand(16, 1, 4, 4) * (2 if fixed else 1) - (1 if fixed else 0))
        net.train()

    pixels = (torch.rand(16, 1, 4, 4) * 2 - 1 for _ in itertools.count())
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, CLASSES))
    found = trained(pixels, net=net, after=evaluate, hints=True)
    assert found == (set() if fixed else {"other_normalization"})


# -- losses ----------------------------------------------------------------------------------


class Blind(nn.Module):
    """A model whose output depends on a bias alone."""

    def __init__(self, blind: bool) -> None:
        super().__init__()
        self.blind, self.layer = blind, nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.layer(x * (0 if self.blind else 1))


@pytest.mark.parametrize("blind", [True, False])
def test_an_output_that_does_not_depend_on_the_input(blind):
    found = trained(noise(), lambda output: F.cross_entropy(output, TARGET), net=Blind(blind))
    assert ("input_ignored" in found) is blind


def test_a_head_that_starts_with_zeros_is_no_bug():
    net = Blind(False)
    nn.init.zeros_(net.layer.weight)
    loss = lambda output: F.cross_entropy(output, TARGET)
    assert "input_ignored" not in trained(noise(), loss, net=net)


@pytest.mark.parametrize("bug", [True, False])
def test_a_loss_that_does_not_depend_on_the_output(bug):
    net = model()

    def loss(output):
        decay = sum(p.square().sum() for p in net.parameters())
        return decay if bug else output.square().mean() + decay

    assert trained(noise(), loss, net=net) == ({"output_ignored"} if bug else set())


LOSSES = {
    "softmax twice": (lambda x: F.cross_entropy(x.softmax(1), TARGET), {"softmax_twice"}),
    "softmax after the model": (
        lambda x: F.cross_entropy(x.softmax(1), TARGET),
        {"softmax_twice"},
    ),
    "sigmoid after the model": (
        lambda x: F.binary_cross_entropy_with_logits(x.sigmoid(), F.one_hot(TARGET).float()),
        {"softmax_twice"},
    ),
    "error of probabilities": (
        lambda x: F.mse_loss(x.sigmoid(), F.one_hot(TARGET).float()),
        set(),
    ),
    "error of a softmax": (lambda x: F.mse_loss(x.softmax(1), F.one_hot(TARGET).float()), set()),
    "positive weight": (
        lambda x: F.binary_cross_entropy_with_logits(
            x, F.one_hot(TARGET).float(), pos_weight=torch.tensor(0.6)
        ),
        set(),
    ),
    "log_softmax twice": (lambda x: F.cross_entropy(x.log_softmax(1), TARGET), set()),
    "right": (lambda x: F.cross_entropy(x, TARGET), set()),
    "of some": (lambda x: F.cross_entropy(x, TARGET.where(TARGET > 0, -100)), set()),
    "smooth": (lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.1), set()),
    "weighted": (lambda x: F.cross_entropy(x, TARGET, torch.tensor([1.0, 2.0, 5.0])), set()),
    "absolute error": (lambda x: F.l1_loss(x + 100, 100 + F.one_hot(TARGET).float()), set()),
    "axis": (lambda x: F.nll_loss(x.log_softmax(0), TARGET), {"loss_gradient"}),
    "no logarithm": (lambda x: F.nll_loss(x, TARGET), {"loss_gradient"}),
    "likelihood": (lambda x: F.nll_loss(x.log_softmax(1), TARGET), set()),
    "focal": (lambda x: ((1 - x.softmax(1)) ** 2 * -x.log_softmax(1))[:, 0].mean(), set()),
    "sigmoid twice": (
        lambda x: F.binary_cross_entropy_with_logits(x.sigmoid(), F.one_hot(TARGET).float()),
        {"softmax_twice"},
    ),
    "signs": (
        lambda x: F.binary_cross_entropy_with_logits(x, 2 * F.one_hot(TARGET).float() - 1),
        {"labels"},
    ),
    "binary": (
        lambda x: F.binary_cross_entropy_with_logits(x, F.one_hot(TARGET).float()),
        set(),
    ),
    "hinge": (lambda x: F.multi_margin_loss(x, TARGET), set()),
    "regression": (lambda x: F.mse_loss(x, F.one_hot(TARGET).float()), set()),
}


class Ends(nn.Module):
    """A model that ends with what a loss would apply to the output of another one."""

    def __init__(self, end) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(4, CLASSES), end

    def forward(self, x):
        return self.end(self.layer(x))


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    loss, expected = LOSSES[name]
    net = None
    if "twice" in name:  # in the model, where it is usually forgotten
        end = {"softmax twice": nn.Softmax(1), "sigmoid twice": nn.Sigmoid()}
        net = Ends(end.get(name, nn.LogSoftmax(1)))
        binary = name == "sigmoid twice"

        def loss(x):
            if binary:
                return F.binary_cross_entropy_with_logits(x, F.one_hot(TARGET).float())
            return F.cross_entropy(x, TARGET)

    assert trained(noise(), loss, net=net) == expected


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (nn.LogSoftmax(0), "the softmax over dimension 0"),
        (nn.Softmax(1), "apply log_softmax"),
        (nn.LogSoftmax(1), ""),
    ],
)
def test_the_end_of_a_model_whose_loss_is_a_likelihood(end, message):
    torch.manual_seed(0)
    net = Ends(end)
    optimizer = sgd(net, lr=0.01)
    with tap.track(net, optimizer=optimizer, alerts=True) as tracker:
        for _ in range(11):
            optimizer.zero_grad()
            F.nll_loss(net(torch.randn(16, 4)), TARGET).backward()
            optimizer.step()
            tracker.step()
    assert [alert.rule for alert in tracker.alerts] == (["loss_gradient"] if message else [])
    assert not message or message in tracker.alerts[0].message


@pytest.mark.parametrize(
    ("axis", "dtype"), [(2, torch.float32), (1, torch.float32), (2, torch.bfloat16)]
)
def test_tokens(axis, dtype):
    target = torch.arange(8 * 6).remainder(CLASSES)

    def loss(x):
        return F.nll_loss(x.float().log_softmax(axis).flatten(0, 1), target)

    net = nn.Sequential(nn.Linear(4, CLASSES)).to(dtype)
    batches = (x.to(dtype) for x in noise(shape=(8, 6, 4)))
    assert trained(batches, loss, net=net) == (set() if axis == 2 else {"loss_gradient"})


def test_many_classes_are_sampled():
    net = Ends(nn.Softmax(-1))
    net.layer = nn.Linear(4, 5000)
    target = torch.arange(600)
    loss = lambda x: F.cross_entropy(x, target)
    assert trained(noise(shape=(600, 4)), loss, net=net, steps=11) == {"softmax_twice"}


def test_both_sides_of_a_contrastive_loss_are_classes():
    class Pairs(nn.Linear):
        def forward(self, x):
            made = F.normalize(super().forward(x), dim=1)
            return 5 * made @ made.roll(1, 0).T

    loss = lambda x: F.cross_entropy(x.T, torch.arange(16))
    assert trained(noise(), loss, net=Pairs(4, 8)) == set()


@pytest.mark.parametrize(
    "options", [{}, {"weight": torch.tensor([1.0, 2.0, 5.0])}, {"label_smoothing": 0.2}, "scaled"]
)
@pytest.mark.parametrize("divided", [True, False])
def test_accumulation_of_means(divided, options):
    net = nn.Linear(4, CLASSES)
    optimizer = sgd(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=options == "scaled")
    options = {} if options == "scaled" else options

    def step():
        optimizer.zero_grad()
        for _ in range(4):
            with torch.autocast("cpu", torch.float16, enabled=scaler.is_enabled()):
                loss = F.cross_entropy(net(torch.randn(16, 4)), TARGET, **options)
            scaler.scale(loss / 4 if divided else loss).backward()
        scaler.step(optimizer)
        scaler.update()

    found = {rule for rule, _ in train(net, optimizer, step, hints=True)}
    assert found == (set() if divided else {"not_divided"})


def test_two_losses_of_one_pass_are_no_accumulation():
    net = nn.Linear(4, CLASSES)
    optimizer = sgd(net, lr=1e-3)

    def step():
        optimizer.zero_grad()
        output = net(torch.randn(16, 4))
        output.square().mean().backward(retain_graph=True)
        F.cross_entropy(output, TARGET).backward()
        optimizer.step()

    assert train(net, optimizer, step, hints=True) == set()


def test_gradients_that_are_never_zeroed_are_no_accumulation():
    net = nn.Linear(4, CLASSES)
    optimizer = sgd(net, lr=1e-3)

    def step():
        F.cross_entropy(net(torch.randn(16, 4)), TARGET).backward()
        optimizer.step()

    assert train(net, optimizer, step, hints=True) == set()  # an alert says what is wrong
