"""Grafts: recorded outputs in place of computed ones, gradients as if they had been computed."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tap
from tensortap.core.errors import NotFound

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Parts:
    values: dict
    pair: Pair
    word: str = "same"


class Structured(nn.Module):
    def forward(self, x):
        return Parts({"a": x * 2, "b": [x + 1]}, Pair(x, None))


class Net(nn.Module):
    """A module that returns a structure, and one that is called twice."""

    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.parts = Structured()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        parts = self.parts(self.act(self.fc(x)))
        return self.act(self.fc(parts.values["a"] + parts.values["b"][0] - parts.pair.first))


def recorded(model, x, folder, steps=1, **options):
    """Train a few steps into a run; return it and the gradients of the last step."""
    with tap.track(model, tensors=True, to=folder, **options) as tracker:
        for step in range(steps):
            model.zero_grad()
            (model(x) * (step + 1)).square().sum().backward()
            tracker.step()
    return tracker.path, [p.grad.clone() for p in model.parameters()]


def gradients(model, x):
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return y, [p.grad.clone() for p in model.parameters()]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def test_equal_values_change_no_bit(net, x, tmp_path):
    run, before = recorded(net, x, tmp_path)
    plain = net(x)
    with tap.rooms.bisect.graft(net, run, "") as graft:
        y, after = gradients(net, x)
    assert torch.equal(y, plain)
    assert all(map(torch.equal, before, after))
    # two calls of `fc` and `act`, and each tensor in the structure
    assert graft.replaced == {
        "fc": 2, "act": 2, "Net": 1, "parts[values][a]": 1, "parts[values][b][0]": 1,
        "parts[pair][first]": 1,
    }  # fmt: skip
    assert graft.notes == {}


def test_output_is_the_recorded_one_and_gradients_go_to_the_computed_one(net, x, tmp_path):
    run, _ = recorded(net, x, tmp_path)
    first, second = tap.open(run).get_all("fc", kind="Activation")
    with torch.no_grad():
        net.fc.weight.mul_(-3)
    seen = []
    with tap.rooms.bisect.graft(net, run, "^fc$"):
        # a later hook sees what the rest of the model sees
        handle = net.fc.register_forward_hook(lambda *args: seen.append(args[2].clone()))
        _, found = gradients(net, x)
        handle.remove()
    assert torch.equal(seen[0], first)
    assert torch.equal(seen[1], second)
    # by hand: the rest of the model on the recorded values, the layer on its own weight
    one, two = (value.clone().requires_grad_() for value in (first, second))
    h = net.parts(one.relu())
    middle = h.values["a"] + h.values["b"][0] - h.pair.first
    two.relu().square().sum().backward()
    (at_middle,) = torch.autograd.grad(net.fc(middle), middle, two.grad, retain_graph=True)
    (at_one,) = torch.autograd.grad(middle, one, at_middle, retain_graph=True)
    expected = two.grad.T @ middle.detach() + at_one.T @ x
    torch.testing.assert_close(found[0], expected)


def test_structures_keep_their_types(x, tmp_path):
    model = nn.Sequential(Structured())
    with tap.track(model, tensors=True, to=tmp_path) as tracker:
        model(x)
        tracker.step()
    with tap.rooms.bisect.graft(model, tracker.path, "^0$"):
        found = model(x * 5)
    assert type(found) is Parts
    assert type(found.pair) is Pair
    assert (found.word, found.pair.second) == ("same", None)
    assert torch.equal(found.values["a"], x * 2)
    assert torch.equal(found.values["b"][0], x + 1)
    assert torch.equal(found.pair.first, x)


def test_errors_name_what_is_near(net, x, tmp_path):
    run, _ = recorded(net, x, tmp_path, exclude="parts")
    with pytest.raises(NotFound, match=r"no module 'parst'; did you mean 'parts'"):
        tap.rooms.bisect.graft(net, run, "parst")
    with pytest.raises(NotFound, match=r"no Activation of 'parts' at step 0; did you mean"):
        tap.rooms.bisect.graft(net, run, ["fc", "parts"])
    with pytest.raises(NotFound, match="no step 7; the nearest captured step is 0"):
        tap.rooms.bisect.graft(net, run, "fc", step=7)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module"):
        tap.rooms.bisect.graft("net", run, "fc")
    with tap.track(net, to=tmp_path) as tracker:
        net(x)
    statistics = pytest.raises(NotFound, match=r"only statistics of 'fc'.*tensors=True")
    with statistics, tap.rooms.bisect.graft(net, tracker.path, "fc"):
        net(x)


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_shapes_that_differ_and_calls_too_many_raise_and_leave_nothing_behind(net, x, tmp_path):
    run, _ = recorded(net, x, tmp_path)
    shapes = r"fc: .* \[5, 4\], the recorded one \[3, 4\]"
    with pytest.raises(tap.TensortapError, match=shapes), tap.rooms.bisect.graft(net, run, "fc"):
        net(torch.ones(5, 4))
    assert hooks_of(net) == 0
    calls = "2 calls of 'fc' at step 0, this is call 3"
    with pytest.raises(NotFound, match=calls), tap.rooms.bisect.graft(net, run, "fc"):
        torch.stack([net(x), net(x)])
    with pytest.raises(ZeroDivisionError), tap.rooms.bisect.graft(net, run, "fc") as graft:
        _ = 1 / 0
    assert hooks_of(net) == 0
    with pytest.raises(RuntimeError, match="has ended"), graft:
        pass


def test_cast_is_stated(net, x, tmp_path, caplog):
    run, _ = recorded(net, x, tmp_path)
    net = net.double()
    with tap.rooms.bisect.graft(net, run, "^fc$") as graft:
        assert net(x.double()).dtype is torch.float64
    assert graft.notes == {"fc": "recorded as float32, cast to float64"}
    assert "fc: recorded as float32, cast to float64" in caplog.text


def test_steps_follow_the_program_and_names_are_mapped(x, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    with tap.track(model, tensors=True, to=tmp_path) as tracker:
        for step in range(3):
            model(x + step)
            tracker.step()
    wanted = [model(x + step) for step in range(3)]
    other = nn.Module()
    other.layers = nn.ModuleList([nn.Linear(4, 4)])
    other.forward = other.layers[0].__call__
    with tap.rooms.bisect.graft(other, tracker.path, r"layers\.0", mapping=[r"layers\.(\d)=\1"]):
        for step in range(3):
            tap.step(step)
            assert torch.equal(other.layers[0](x), wanted[step])
    with tap.rooms.bisect.graft(
        other, tracker.path, r"layers\.0", step=2, mapping=[r"layers\.(\d)=\1"]
    ):
        assert torch.equal(other.layers[0](x), wanted[2])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gets_the_same_values(net, x, tmp_path, reentrant):
    run, _ = recorded(net, x, tmp_path)
    with torch.no_grad():
        net.fc.weight.mul_(-3)

    def step(run_block):
        net.zero_grad()
        with tap.rooms.bisect.graft(net, run, "fc|act|parts"):
            run_block(x.clone().requires_grad_()).square().sum().backward()
        return [p.grad.clone() for p in net.parameters()]

    plain = step(net)
    again = step(lambda x: checkpoint(net, x, use_reentrant=reentrant))
    assert all(map(torch.equal, plain, again))


def test_compiled_model_runs_eagerly_meanwhile(net, x, tmp_path):
    run, _ = recorded(net, x, tmp_path)
    wanted = net(x)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    with torch.no_grad():
        net.fc.weight.zero_()
    with tap.rooms.bisect.graft(compiled, run, ""):
        assert torch.equal(compiled(x), wanted)


def test_inputs_are_recorded_before_they_change_in_place(net, x, tmp_path):
    run, _ = recorded(net, x, tmp_path, kind="all")
    found = tap.open(run)
    pairs = {"fc.input[0]": 2, "act.input[0]": 2, "parts.input[0]": 1, "Net.input[0]": 1}
    assert {n: len(list(found.records(n))) for n in found.names() if ".input" in n} == pairs
    (before, _), (after, _) = (
        found.get_all(f"act{each}", kind="Activation") for each in (".input[0]", "")
    )
    assert (before < 0).any()
    assert torch.equal(before.relu(), after)
    assert [r.call for r in found.records("act.input[0]")] == [0, 1]
