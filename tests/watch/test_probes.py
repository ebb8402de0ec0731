"""`list_probes`: what of a model can be watched."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tap


class Net(nn.Module):
    """A hard case for hooks: in-place modules, views, tuples, a module that is never called."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.rnn = nn.GRU(6, 5, batch_first=True)
        self.out = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        self.extra = x
        x.mul_(scale)  # changes the caller's tensor
        x = self.drop(self.norm(self.act(self.inp(x))))
        np.random.rand()  # noqa: NPY002  some models do
        random.random()
        x, _ = self.rnn(x[:, None])
        return self.frozen(self.out(x))


def by_name(probes):
    return {probe.name: probe for probe in probes}


def test_lists_outputs_gradients_and_parameters():
    found = by_name(tap.rooms.watch.list_probes(Net(), torch.randn(3, 4)))
    inp = found["inp"]
    assert (inp.type, inp.shape, inp.dtype) == ("Linear", (3, 6), "float32")
    assert inp.output
    assert inp.gradient  # although the next module overwrites the output
    assert found["rnn[0]"].gradient
    assert found["rnn[1]"].output
    assert not found["rnn[1]"].gradient
    assert found["rnn[1]"].note == "got no gradient"
    assert not found["unused"].output
    assert "not called" in found["unused"].note
    assert found["inp.weight"].gradient
    assert found["unused.weight"].note == "got no gradient"
    assert found["frozen.weight"].note == "frozen"
    assert found["Net"].shape == (3, 1, 3)


@pytest.mark.slow
def test_watching_sees_what_was_listed(tmp_path):
    from tests.watch.notes import Notes

    model, x = Net(), torch.randn(3, 4)
    said = tap.rooms.watch.list_probes(model, x)
    notes = Notes(tmp_path / "notes")
    with tap.watch(model, notes, kind="both", rate=None, start_method="fork"):
        model(x.clone()).sum().backward()
    modules = [p for p in said if p.type != "Parameter"]
    assert notes.names == sorted(p.name for p in modules if p.output)
    gradients = {r["name"] for r in notes.records if r["kind"] == "Gradient"}
    assert gradients == {p.name for p in modules if p.gradient}


@pytest.mark.usefixtures("no_errors")
def test_model_and_random_state_are_restored():
    torch.manual_seed(1)
    model = Net()
    model(torch.randn(3, 4)).sum().backward()
    x = torch.randn(3, 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    storages = {name: value.data_ptr() for name, value in model.state_dict().items()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    values = {name: g.clone() for name, g in grads.items() if g is not None}
    extra, given = model.extra, x.clone()
    numpy_state = np.random.get_state
    random_states = torch.get_rng_state(), random.getstate(), numpy_state()[1].tolist()
    tap.rooms.watch.list_probes(model, x, scale=2.0)
    assert torch.equal(x, given)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
        assert value.data_ptr() == storages[name]
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name]
        assert parameter.grad is None or torch.equal(parameter.grad, values[name])
    assert model.training
    assert (model.calls, model.extra is extra) == (1, True)
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]
    assert numpy_state()[1].tolist() == random_states[2]
    assert not any(m._forward_hooks for m in model.modules())


def test_output_without_gradient_and_invalid_model():
    found = by_name(
        tap.rooms.watch.list_probes(nn.Embedding(4, 2).requires_grad_(False), torch.tensor([1]))
    )
    assert found["Embedding"].note == "the model's output requires no gradient"
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        tap.rooms.watch.list_probes("model")


def test_watchers_and_trackers_do_not_see_the_pass(tmp_path):
    from tests.watch.notes import Notes

    model = nn.Sequential(nn.Linear(2, 2))
    notes = Notes(tmp_path / "notes")
    with tap.watch(model, notes, rate=None, start_method="fork"), tap.track(model) as tracker:
        tap.rooms.watch.list_probes(model, torch.ones(1, 2))
    assert notes.records == []
    assert {record.step for record in tracker.records} == {-1}  # the initial weights
