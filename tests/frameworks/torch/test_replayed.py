"""Statistics inside CUDA graphs, which are simulated on the CPU.

A simulated graph records the operations of its first run, with the memory that they read and write,
and repeats them in later runs: no code of the host runs again, and whatever waits raises.
"""

import types

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.effects import with_effects
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tensortap as tap
from tensortap.frameworks.torch import private_compiler, replayed
from tensortap.record import Kind
from tests.frameworks.torch.test_cuda import FakePort

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_errors"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]

ACT, GRAD = Kind.ACTIVATION, Kind.GRADIENT


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "waits for the device"
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors(value):
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


class SimulatedGraph(torch.fx.Interpreter):
    def __init__(self, module, example):
        super().__init__(module)
        self.recorder = None
        self._boxed_call = True

    def __call__(self, boxed):
        args = list(boxed)
        boxed.clear()
        if self.recorder is None:
            self.recorder = Recorder()
            self.inputs = [x if static(x) else x.clone() for x in args]
            fixed.update(x.data_ptr() for x in args if isinstance(x, torch.Tensor) and static(x))
            self.outputs = self.run(*self.inputs)
        else:
            for mine, given in zip(self.inputs, args, strict=True):
                if not static(mine) and mine.data_ptr() != given.data_ptr():
                    mine.copy_(given)
            self.recorder.replay()
        return [x if static(x) else x.clone() for x in self.outputs]

    def call_function(self, target, args, kwargs):
        with self.recorder:
            if target is not with_effects:
                return super().call_function(target, args, kwargs)
            token, operator, *rest = args
            assert operator is torch.ops.tensortap.reduce.default
            replayed._reduce(*rest)
            return token, None


fixed = set()  # addresses of tensors that the graph of a forward pass knows


def static(value):
    """Return whether an input keeps its memory; tokens of effects are None."""
    if not isinstance(value, torch.Tensor) or value.data_ptr() in fixed:
        return True
    return isinstance(value, nn.Parameter) or hasattr(value, "_dynamo_static_input_type")


@pytest.fixture
def device(monkeypatch):
    """Make tensors of the CPU pass for those of a device, whose copies the test runs."""
    port, reduced = FakePort(), []

    def reduce(*args, original=replayed._reduce):
        reduced.append(args)
        original(*args)

    monkeypatch.setattr(replayed, "on_device", lambda tensor: True)
    monkeypatch.setattr(replayed, "cuda", lambda: types.SimpleNamespace(port=port))
    monkeypatch.setattr(replayed, "_in_use", False)
    monkeypatch.setattr(replayed, "_reduce", reduce)
    monkeypatch.setattr(private_compiler, "captures_cuda_graphs", lambda: True)
    torch._dynamo.reset()
    fixed.clear()
    yield types.SimpleNamespace(run=port.run, reduced=reduced)
    torch._dynamo.reset()


def compiled(model):
    backend = aot_autograd(fw_compiler=SimulatedGraph, bw_compiler=SimulatedGraph)
    return torch.compile(model, backend=backend, fullgraph=True)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def seen(tracker):
    found = {}
    for record in tracker.records:
        if record.kind in (ACT, GRAD):
            key = record.name, record.kind, record.step, record.call, *record.tags
            assert key not in found
            found[key] = record
    return found


def check(found, expected):
    assert found.keys() == expected.keys()
    for key, record in expected.items():
        mine = found[key]
        assert (mine.dtype, mine.shape, mine.type) == (record.dtype, record.shape, record.type)
        assert mine.stats.exponents == record.stats.exponents
        assert mine.stats.mean == pytest.approx(record.stats.mean, rel=1e-6, abs=1e-9)
        assert mine.stats.std == pytest.approx(record.stats.std, rel=1e-6)


def train(model, call, run, every=1):
    with tap.track(model, every=every) as tracker:
        for n in range(5):
            torch.manual_seed(n)
            call(torch.randn(3, 4)).square().sum().backward()
            model.zero_grad()
            tracker.step()
            if n == 2:
                known = len(list(tracker.records))
                run()
        run()
    return tracker, known


def test_statistics_are_read_after_replay(device):
    model = mlp()
    tracker, known = train(model, compiled(model), device.run, every=2)
    assert len(device.reduced) == 4 * 2  # only when the graphs were recorded
    assert tracker.unseen == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayed, "on_device", lambda tensor: False)
        plain = mlp()
        expected, _ = train(plain, plain, lambda: None, every=2)
    check(seen(tracker), seen(expected))
    weights = [r for r in tracker.records if r.kind is Kind.WEIGHT and r.step < 3]
    assert known <= 2 * len(weights)  # nothing waited for the device


class Twice(nn.Module):
    """A module that is called several times, and a checkpoint."""

    def __init__(self, times):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.times = nn.Linear(4, 4), times

    def forward(self, x):
        for _ in range(self.times):
            x = self.inner(x).sin()
        return checkpoint(torch.nn.functional.silu, x, use_reentrant=False)


def accumulate(model, call, run):
    with tap.track(model) as tracker:
        for n in range(2):
            for k in range(2):
                call(torch.full((2, 4), n + k + 1.0)).sum().backward()
            model.zero_grad()
            tracker.step()
            run()
    return tracker


def test_gradients_belong_to_their_calls(device):
    model, plain = Twice(3), Twice(3)
    found = accumulate(model, compiled(model), device.run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayed, "on_device", lambda tensor: False)
        expected = accumulate(plain, plain, lambda: None)
    check(seen(found), seen(expected))
    assert {key[3] for key in seen(found) if key[0] == "inner"} == set(range(6))


def test_too_many_calls_are_reported(device):
    model = Twice(replayed.ROWS)
    tracker = accumulate(model, compiled(model), device.run)
    assert "called more than 8 times" in tracker.unseen["inner"]
    kept = [key for key in seen(tracker) if key[0] == "inner"]
    assert [key[3] for key in kept if key[2] == 0] == list(range(8))
    assert {key[1] for key in kept} == {ACT}


def test_knows_whether_cuda_graphs_are_captured():
    found = []

    def note():
        found.append(private_compiler.captures_cuda_graphs())

    note._dynamo_marked_constant = True

    def function(x):
        note()
        return x + 1

    for options in ({"mode": "reduce-overhead"}, {}, {"backend": "eager"}):
        torch._dynamo.reset()
        torch.compile(function, **options)(torch.ones(2))
    assert found == [True, False, False]
    assert not private_compiler.captures_cuda_graphs()
