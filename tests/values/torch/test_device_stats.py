"""Statistics on a device, computed here on the CPU with the same operations of torch."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import tensortap as tap
from tensortap.rooms.doctor.contract import expect_close
from tensortap.rooms.track import packed
from tensortap.rooms.track.torch import device_stats as module
from tensortap.values.torch.cuda import cuda
from tests.values.torch.test_cuda import FakePort

FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
WHOLE = [
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.bool,
]  # fmt: skip


def reduced(tensor):
    vector = module.reduce(tensor)
    name = str(tensor.dtype).removeprefix("torch.")
    return packed.unpack(vector.numpy(), name, tuple(tensor.shape))


def check(tensor):
    expect_close(reduced(tensor), tap.viz.summarize(tensor))


def from_bits(bits, dtype):
    size = dtype.itemsize
    return torch.frombuffer(bytearray(bits), dtype=torch.uint8)[: len(bits) // size * size].view(
        dtype
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE], ids=str)
@given(bits=st.binary(min_size=8, max_size=400))
@example(bits=bytes(8))
@example(bits=bytes(7) + b"\x80")
@example(bits=b"\xff" * 16)
def test_all_dtypes(dtype, bits):
    check(from_bits(bits, torch.uint8) > 99 if dtype is torch.bool else from_bits(bits, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@given(
    values=st.lists(
        st.complex_numbers(max_magnitude=1e30, allow_nan=False) | st.just(complex("nan")),
        min_size=1,
        max_size=20,
    )
)
def test_magnitudes_of_complex_numbers(dtype, values):
    tensor = torch.tensor(values, dtype=dtype)
    found, known = reduced(tensor), tap.viz.summarize(tensor)
    assert (found.count, found.zeros, found.nans) == (known.count, known.zeros, known.nans)
    if known.finite:
        assert found.max_abs == pytest.approx(known.max_abs, rel=1e-5)
        assert found.rm2 == pytest.approx(known.rm2, rel=1e-5)


def test_limits_of_float64():
    check(torch.tensor([5e-324, 1e-310, 1.7e308, -1.7e308, 0.0, math.nan, math.inf, -math.inf]))
    check(torch.tensor([5e-324, 1e-310, 1.7e308, -1.7e308, 0.0], dtype=torch.float64))
    check(torch.tensor([5e-324], dtype=torch.float64))


def test_strided_and_large(monkeypatch):
    torch.manual_seed(0)
    check(torch.randn(300, 200).T[1:, ::3])
    check(torch.randn(50_000) + 1000)
    monkeypatch.setattr(module, "_CHUNK", 100)
    check(torch.randn(1234))


def test_does_not_wait_for_the_device(waits):
    """Reading a value would block training until the device has computed it."""
    port = FakePort()
    tensor = torch.tensor([1.0, -3.0, torch.nan])
    with waits():
        later = module.reduce_later(tensor, port)
        tensor.zero_()  # training continues
        assert not later.ready()
    assert port.calls == ["copy"]
    port.run()
    assert later.ready()
    summary = later.resolve()
    assert summary == tap.viz.summarize(torch.tensor([1.0, -3.0, torch.nan]))
    assert port.calls == ["copy", "synchronize"]


def test_tensors_on_a_device_are_reduced_there(monkeypatch):
    class OnDevice(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(module, "reduce_later", lambda value, port: port)
    tensor = torch.ones(2)
    assert packed.summary_of(tensor) == (tap.viz.summarize(tensor), None)
    assert packed.summary_of(tensor.as_subclass(OnDevice)) == (None, cuda().port)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_rejects_dtypes_without_statistics():
    with pytest.raises(TypeError, match="complex32"):
        module.reduce(torch.zeros(3, dtype=torch.complex32))
