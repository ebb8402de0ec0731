"""Fallbacks for private interfaces that a release of torch lacks."""

import builtins
import datetime
import importlib.util
import itertools
import types

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tensortap.rooms.trace.torch import timeout_of
from tensortap.rooms.track.torch import internals
from tensortap.values.torch import hidden, private
from tensortap.values.torch.shards import _offsets


def fresh_module():
    """Return the module as another release of torch would import it."""
    spec = importlib.util.find_spec("tensortap.values.torch.private")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without(monkeypatch, *prefixes):
    """Make importing these modules fail."""
    original = builtins.__import__

    def fail(name, *args, **kwargs):
        if name.startswith(prefixes):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)


def test_without_switches_and_counts(monkeypatch):
    for name in (
        "DisableTorchFunction", "_len_torch_dispatch_stack", "_current_graph_task_id",
    ):  # fmt: skip
        monkeypatch.delattr(torch._C, name)
    module = fresh_module()
    assert module.has_dispatch_modes()  # unknown, so modes are turned off
    assert module.backward_pass() == -1
    without(monkeypatch, "torch.utils._python_dispatch")
    with module.without_overrides(), module.without_dispatch_modes():
        assert torch.ones(2).sum() == 2


def test_without_the_compilers_internals(monkeypatch):
    without(monkeypatch, "torch._dynamo", "torch._C._dynamo", "torch._functorch")
    internals.skip_frame(test_without_the_compilers_internals.__code__)
    assert internals.compiled_graphs() == 0
    assert private.traced_caller() is None
    hidden.hide_effects_from_partitioner.__wrapped__()


def test_versions():
    tensor = torch.zeros(3)
    before = private.version_of(tensor)
    tensor += 1
    assert private.version_of(tensor) > before
    with torch.inference_mode():
        assert private.version_of(torch.zeros(3)) == 0
    assert private.version_of(object()) == 0


def test_timeouts_of_groups():
    assert timeout_of(object()) == datetime.timedelta(minutes=30)
    timeout = datetime.timedelta(seconds=7)
    backend = types.SimpleNamespace(options=types.SimpleNamespace(_timeout=timeout))
    assert timeout_of(types.SimpleNamespace(_get_backend=lambda device: backend)) == timeout


@pytest.mark.parametrize("shape", [(7, 5), (1, 3), (0, 4), (13,)])
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 4)])
def test_offsets_of_shards_are_those_of_torch(shape, mesh):
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    dims = range(len(shape))
    placements = [Replicate(), Partial(), *(Shard(dim) for dim in dims)]
    placements += [_StridedShard(dim, split_factor=n) for dim in dims for n in (2, 4)]
    for chosen in itertools.product(placements, repeat=len(mesh)):
        for coordinate in itertools.product(*map(range, mesh)):
            _, theirs = _compute_local_shape_and_global_offset(shape, mesh, coordinate, chosen)
            assert _offsets(shape, mesh, coordinate, chosen) == tuple(map(int, theirs))
