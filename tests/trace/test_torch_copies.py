"""Copies of tensors are bit-exact for every dtype, size and layout."""

import numpy as np
import pytest
import torch

import tensortap as tap
from tensortap.rooms.trace.results import copied, expanded, fingerprint
from tensortap.rooms.trace.torch import keyed_copy

DTYPES = [
    torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.float8_e4m3fn, torch.complex64,
]  # fmt: skip
SHAPES = [(), (1,), (3, 4), (100, 50), (200, 400)]  # kept as bytes, and as tensors


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def any_bits(dtype, shape):
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(0).integers(0, 2 if dtype is torch.bool else 256, count, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_are_bit_exact(dtype, shape):
    value = any_bits(dtype, shape)
    copied(value)  # looks up the adapter
    key, kept = keyed_copy(value)
    found = expanded(kept)
    assert (found.dtype, found.shape, bits(found)) == (dtype, torch.Size(shape), bits(value))
    assert keyed_copy(value.clone())[0] == key
    before = bits(found)
    value.view(-1).view(torch.uint8)[0] ^= 1
    assert bits(found) == before
    assert keyed_copy(value)[0] != key


def test_layouts_and_views_are_compared_by_content():
    def traced(x):
        y = x
        return y, None

    same = torch.arange(6.0).reshape(2, 3)
    other = torch.tensor([[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]])  # transposed: the bytes of `same`
    large = torch.randn(300, 400)
    values = [
        same, same.T.contiguous().T, other.T.contiguous().T, other, same.requires_grad_() * 1,
        large, large.T.contiguous().T, large.clone(),
    ]  # fmt: skip
    with tap.trace(traced, ["y"]) as tracer:
        for value in values:
            traced(value)
        assert len(tracer.results["y"].values) == 4  # results are available before the end
    kept = tracer.results["y"]
    assert kept.iterations == [0, 2, 4, 5]
    for value, found in zip([same, other, same, large], kept.values, strict=True):
        assert torch.equal(value, found)
        assert not found.requires_grad


@pytest.mark.parametrize("size", [4, 100_000])
def test_keys_agree_with_fingerprints(size):
    """Values of one path may be compared by either of them."""
    value = torch.arange(float(size))
    assert fingerprint(value) == fingerprint(value.clone())
    if size > 4096:
        assert keyed_copy(value)[0] == fingerprint(value)
    assert keyed_copy(value.resolve_conj()) is not None
    assert keyed_copy(torch.zeros(size, dtype=torch.complex64).conj()) is None
    assert keyed_copy(torch.empty(0)) is None
    assert keyed_copy(torch.empty(size, device="meta")) is None
    assert keyed_copy(torch.eye(3).to_sparse()) is None


def test_modes_do_not_see_copies():
    from torch.overrides import TorchFunctionMode

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    value = torch.ones(3)
    copied(value)
    with Mode():
        assert keyed_copy(value) is None
        assert torch.equal(copied(value), value) is True
    assert [f for f in seen if f is not torch.equal] == []
