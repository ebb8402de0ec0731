"""`tap.check`: each experiment with the bug and with the fix, and everything is put back."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensortap as tap


def task(model, loss=F.cross_entropy, rate=0.1):
    """Return model, optimizer and step function."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    def step(batch):
        optimizer.zero_grad()
        found = loss(model(batch[0]), batch[1])
        found.backward()
        optimizer.step()
        return found

    return model, optimizer, step


def network(*layers, classes=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), *layers, nn.Linear(32, classes))


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 6, generator=generator)
    return inputs, torch.randint(0, 5, (8,), generator=generator)


def states(made):
    return {each.name: each.state for each in made.experiments}


def message(made, name):
    return next(each.message for each in made.experiments if each.name == name)


def test_a_correct_program_passes(batch):
    made = tap.check(*task(network(nn.BatchNorm1d(32), nn.Dropout(0.1))), batch)
    assert made
    assert states(made) == dict.fromkeys(("initial_loss", "rows", "evaluation", "overfit"), "fine")
    assert str(made).startswith("fine     initial_loss")


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (F.mse_loss, torch.randn(8, 5)),
        (F.l1_loss, torch.randn(8, 5)),
        (F.binary_cross_entropy_with_logits, torch.randint(0, 2, (8, 5)).float()),
        (lambda x, y: F.cross_entropy(x, y, reduction="sum") / 8, torch.arange(8) % 5),
        (lambda x, y: F.nll_loss(F.log_softmax(x, 1), y), torch.arange(8) % 5),
    ],
)
def test_losses_whose_theory_is_known(batch, loss, targets):
    made = tap.check(*task(network(), loss, rate=0.01), (batch[0], targets))
    assert states(made)["initial_loss"] == "fine"


def test_an_initial_loss_above_chance(batch):
    model = network()
    nn.init.normal_(model[-1].weight, std=20)
    made = tap.check(*task(model, rate=1e-4), batch)
    assert not made
    assert "a model that knows nothing has 1.609" in message(made, "initial_loss")


def test_a_squared_error_of_targets_that_are_far_smaller(batch):
    model = network()
    made = tap.check(*task(model, F.mse_loss, rate=0.01), (batch[0], 1e-3 * torch.randn(8, 5)))
    assert states(made)["initial_loss"] == "problem"


def test_a_loss_below_chance_is_a_hint(batch):
    model, optimizer, step = task(network())
    for _ in range(200):
        step(batch)
    made = tap.check(model, optimizer, step, batch)
    assert states(made)["initial_loss"] == "hint"
    assert made or states(made)["overfit"] == "problem"


class Mixing(nn.Module):
    """Normalizes over the batch, or sees no input at all."""

    def __init__(self, mode):
        super().__init__()
        self.layer, self.mode = nn.Linear(6, 5), mode

    def forward(self, x):
        if self.mode == "ignores":
            return self.layer(torch.ones_like(x))
        made = self.layer(x)
        return made - made.mean(0 if self.mode == "batch" else 1, keepdim=True)


def test_rows_that_depend_on_each_other(batch):
    assert "another row" in message(tap.check(*task(Mixing("batch")), batch), "rows")
    assert states(tap.check(*task(Mixing("row")), batch))["rows"] == "fine"


def test_an_output_that_ignores_its_input(batch):
    made = tap.check(*task(Mixing("ignores")), batch)
    assert message(made, "rows") == "the output does not depend on the input"


@pytest.mark.parametrize("training", [True, False])
def test_dropout_by_a_function_in_evaluation(batch, training):
    class Drops(nn.Linear):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.5, self.training or training)

    made = tap.check(*task(Drops(6, 5)), batch)
    assert states(made)["evaluation"] == ("hint" if training else "fine")
    assert made


def test_rows_of_tokens(batch):
    torch.manual_seed(0)
    tokens = torch.randint(0, 9, (4, 7))
    model = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(42, 5))
    assert states(tap.check(*task(model), (tokens, torch.arange(4))))["rows"] == "fine"


def test_a_model_that_learns_nothing(batch):
    model, _, _ = task(network())
    other = torch.optim.SGD(network().parameters(), lr=0.1)  # of another model

    def step(batch):
        other.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        other.step()
        return loss

    made = tap.check(model, other, step, batch)
    assert "does the optimizer have the model's parameters?" in message(made, "overfit")


def test_a_loss_with_the_wrong_sign(batch):
    made = tap.check(*task(network(), lambda x, y: -F.cross_entropy(x, y), rate=1e-3), batch)
    assert states(made)["overfit"] == "fine"  # it falls, but it is not a sensible loss
    model, optimizer, _ = task(network())

    def ascends(batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        (-loss).backward()
        optimizer.step()
        return {"loss": loss}

    made = tap.check(model, optimizer, ascends, batch)
    assert "check the learning rate, the sign of the loss" in message(made, "overfit")


def test_a_tiny_learning_rate_is_a_hint(batch):
    made = tap.check(*task(network(), rate=1e-7), batch)
    assert made
    assert states(made)["overfit"] == "hint"


def test_everything_is_put_back(batch):
    model, optimizer, step = task(network(nn.BatchNorm1d(32), nn.Dropout(0.5)))
    step(batch)
    model[0].eval()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    tap.check(model, optimizer, step, batch)
    after = model.state_dict(), optimizer.state_dict()
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert modes == [module.training for module in model.modules()]
    assert drawn[0] == random.getstate()
    assert drawn[1] == np.random.get_state()[1].tolist()  # noqa: NPY002
    assert torch.equal(drawn[2], torch.get_rng_state())


def test_parameters_that_a_step_replaces_are_put_back(batch):
    model, optimizer, step = task(network())
    parameters, groups = list(model.parameters()), [dict(g) for g in optimizer.param_groups]
    values = copy.deepcopy(model.state_dict())

    def changes(batch):
        model[0].requires_grad_(False)
        model[2].weight = nn.Parameter(model[2].weight.detach() + 1)
        optimizer.add_param_group({"params": [model[2].weight]})
        return step(batch)

    tap.check(model, optimizer, changes, batch)
    for one, other in zip(parameters, model.parameters(), strict=True):
        assert one is other
        assert one.requires_grad
    assert [dict(g) for g in optimizer.param_groups] == groups
    assert not optimizer.state
    torch.testing.assert_close(values, model.state_dict(), rtol=0, atol=0)


def test_a_step_that_raises_is_put_back_too(batch):
    model, optimizer, step = task(network())
    before, calls = copy.deepcopy(model.state_dict()), []

    def breaks(batch):
        step(batch)
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("no")
        return step(batch)

    with pytest.raises(ArithmeticError):
        tap.check(model, optimizer, breaks, batch)
    torch.testing.assert_close(before, model.state_dict(), rtol=0, atol=0)


def test_bad_arguments(batch):
    model, optimizer, step = task(network())
    with pytest.raises(TypeError, match="model must be a torch"):
        tap.check(object(), optimizer, step, batch)
    with pytest.raises(ValueError, match="experiments has no 'x'"):
        tap.check(model, optimizer, step, batch, experiments=["x"])
    with pytest.raises(ValueError, match="steps"):
        tap.check(model, optimizer, step, batch, steps=1)
    with pytest.raises(TypeError, match="step_fn must return the loss"):
        tap.check(model, optimizer, lambda batch: None, batch)


class Noisy(torch.utils.data.Dataset):
    """Adds noise from a generator that workers copy, or from NumPy's, which torch seeds."""

    def __init__(self, own):
        self.random = np.random.default_rng(0) if own else None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.random is None:
            return index + np.random.standard_normal(3)  # noqa: NPY002
        return index + self.random.standard_normal(3)


@pytest.mark.slow
def test_workers_that_draw_the_same_random_numbers(batch):
    def check(**options):
        loader = torch.utils.data.DataLoader(batch_size=2, num_workers=2, **options)
        return states(tap.check(*task(network()), batch, loader=loader))["workers"]

    assert check(dataset=Noisy(own=True)) == "problem"
    assert check(dataset=Noisy(own=False)) == "fine"
    assert check(dataset=torch.arange(8)) == "unknown"
