"""Digests that devices compute are those of the kernel."""

import functools
import itertools

import numpy as np
import pytest
import torch

import tensortap as tap
from tensortap.core.record import Shard
from tensortap.rooms.track import torch as part
from tensortap.rooms.track.digests import shard_digest_of
from tensortap.rooms.track.shard_digest import shard_digest
from tensortap.rooms.track.torch import device_digest as module
from tensortap.stats.shard_digest import add_digests
from tensortap.values.snapshot import borrow
from tensortap.values.view import as_numpy
from tests.values.torch.conftest import waits  # noqa: F401 - a fixture
from tests.values.torch.test_cuda import FakePort

_DTYPES = (
    torch.bool, torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.int32,
    torch.float32, torch.int64, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def drawn(shape, dtype):
    size = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    raw = np.random.default_rng(0).integers(0, 2 if dtype is torch.bool else 256, size, np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def on_device(tensor, shard=None):
    port = FakePort()
    later = module.start_digest(tensor, shard, port)
    port.run()
    return later.resolve()


@pytest.mark.parametrize("dtype", _DTYPES)
def test_operations_of_torch_give_the_digest_of_the_kernel(dtype, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 1000)
    whole = drawn((3, 3001), dtype)
    for each in (whole, whole.T, whole[:, 5:6], whole[0, 0], whole[:0]):
        assert on_device(each) == shard_digest(as_numpy(borrow(each)))
    parts = []
    for rows, columns in itertools.product(((0, 1), (1, 3)), ((0, 700), (700, 3001))):
        part = whole[slice(*rows), slice(*columns)]
        parts.append(on_device(part, Shard((3, 3001), (rows[0], columns[0]))))
    assert add_digests(parts) == shard_digest_of(whole)


def test_does_not_wait_for_the_device(waits):  # noqa: F811
    port = FakePort()
    tensor = torch.arange(12.0)
    with waits():
        later = module.start_digest(tensor, None, port)
        tensor.zero_()  # training continues
        assert not later.ready()
    port.run()
    assert later.ready()
    assert later.resolve() == shard_digest(np.arange(12, dtype=np.float32))


def test_records_wait_for_the_digest(monkeypatch):
    """A tracker does not wait for the device, whose digests come later."""
    port = FakePort()
    monkeypatch.setattr(part, "digest_later", functools.partial(module.start_digest, port=port))
    model = torch.nn.Linear(3, 2)
    with tap.track(model, digests=True, kind="activation") as tracker:
        out = model(torch.ones(1, 3))
        tracker.step()
        port.run()
    (record,) = tracker.records
    assert record.digest == shard_digest(out.detach().numpy())
    assert record.stats.count == 2
