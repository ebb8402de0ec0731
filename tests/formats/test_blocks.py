"""Block formats: bit-equal to torchao and ml_dtypes, with the kernel and without it."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tensortap as tap
from tensortap.core.errors import NotFound
from tensortap.rooms.formats import blocks
from tensortap.rooms.formats.blocks import BLOCK_FORMATS, quantize_error

WIDTH = 64


def hostile(seed: int, rows: int) -> np.ndarray:
    """Any bits, wide ranges, and exact ties, in equal parts; some blocks are zero."""
    rng = np.random.default_rng(seed)
    n = rows * WIDTH
    kinds = (
        rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32),
        (rng.standard_normal(n) * 2.0 ** rng.integers(-140, 120, n)).astype(np.float32),
        rng.standard_normal(n).astype(np.float32) * np.float32(rng.choice([1e-6, 1, 1e4])),
        (rng.integers(-64, 64, n) * 2.0 ** rng.integers(-4, 4, n) / 16).astype(np.float32),
    )
    x = np.concatenate([each.reshape(rows, WIDTH) for each in kinds])
    x[::17] = 0.0
    return x


def torchao_cast(x: np.ndarray, name: str) -> tuple[Any, Any, float]:
    """Return the scales of blocks, the elements, and the scale of the whole tensor."""
    import torch
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2

    given = torch.from_numpy(x)
    if name == "nvfp4":
        whole = nvfp4_tensor.per_tensor_amax_to_scale(given.abs().amax())
        return *nvfp4_tensor.nvfp4_quantize(given, 16, whole), whole
    dtypes = {
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp6_e2m3": DTYPE_FP6_E2M3,
        "mxfp6_e3m2": DTYPE_FP6_E3M2,
        "mxfp4": torch.float4_e2m1fn_x2,
    }
    return *mx_tensor.to_mx(given, dtypes[name], 32), 1.0


def torchao_values(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what torchao makes of finite values, and its scales."""
    import torch

    found, codes, whole = torchao_cast(x, name)
    if name == "nvfp4":
        scale = (found.float() * whole).numpy()
    else:  # torchao stores 2**-127 for the smallest blocks, but divides by 2**-126
        exponents = np.maximum(found.view(torch.uint8).numpy().astype(int), 1) - 127
        scale = np.ldexp(np.float32(1), exponents).astype(np.float32)
    numbers = codes.view(torch.uint8).numpy()
    if BLOCK_FORMATS[name] == "float4_e2m1fn":  # two in a byte
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(x.shape)
    elements = numbers.view(getattr(ml_dtypes, BLOCK_FORMATS[name])).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        return elements * np.repeat(scale, x.shape[-1] // scale.shape[-1], axis=-1), scale


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_values_are_those_of_torchao(name):
    x = hostile(1, 1000)
    x = x[np.isfinite(x).all(axis=1)]
    assert len(x) > 3000
    values, scale = torchao_values(x, name)
    found = quantize_error(x, name)
    assert found.values.tobytes() == values.tobytes()
    assert found.scale.tobytes() == scale.tobytes()


@pytest.mark.parametrize("name", [each for each in BLOCK_FORMATS if each != "nvfp4"])
def test_elements_are_those_of_ml_dtypes(name):
    x = hostile(2, 500)
    x = x[np.isfinite(x).all(axis=1)]
    dtype = getattr(ml_dtypes, BLOCK_FORMATS[name])
    found = quantize_error(x, name)
    scale = np.repeat(found.scale, 32, axis=-1)
    largest = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(over="ignore", under="ignore"):
        cast = np.clip(x / scale, -largest, largest).astype(dtype).astype(np.float32) * scale
    assert found.values.tobytes() == cast.tobytes()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_numpy_and_every_variant_of_the_kernel_agree(name, monkeypatch):
    x = hostile(3, 100)[:, :53]  # the last block is shorter
    kernel = blocks.kernel
    before, found = kernel.variant(), []
    for variant in kernel.variants():
        kernel.use(variant)
        found.append(quantize_error(x, name))
    kernel.use(before)
    monkeypatch.setattr(blocks, "kernel", None)
    found.append(quantize_error(x, name))
    for other in found[1:]:
        nan = np.isnan(found[0].values)
        assert np.array_equal(nan, np.isnan(other.values))
        assert other.values[~nan].tobytes() == found[0].values[~nan].tobytes()
        for column in ("scale", "underflow", "saturated"):
            assert np.array_equal(getattr(other, column), getattr(found[0], column), True)
        np.testing.assert_allclose(other.signal, found[0].signal, rtol=1e-12)
        np.testing.assert_allclose(other.noise, found[0].noise, rtol=1e-12)


def test_losses_of_one_block():
    x = np.zeros(32, np.float32)
    x[:4] = 1.0, 0.1, -7.9, 2.0**-10
    found = tap.viz.quantize_error(x, "mxfp4")
    assert found.scale.tolist() == [1.0]
    assert found.values[:4].tolist() == [1.0, 0.0, -6.0, 0.0]
    assert (found.underflow.tolist(), found.saturated.tolist()) == ([2], [1])
    signal, noise = (x.astype(np.float64) ** 2).sum(), ((found.values - x.astype(float)) ** 2).sum()
    assert found.sqnr[0] == pytest.approx(10 * math.log10(signal / noise), rel=1e-12)


def test_a_nan_or_an_infinity_costs_its_block():
    x = np.ones((2, 64), np.float32)
    x[0, 40], x[1, 3] = np.nan, np.inf
    found = tap.viz.quantize_error(x, "mxfp8_e4m3")
    assert np.isnan(found.values[0, 32:]).all()
    assert np.isnan(found.values).sum() == 32
    assert np.flatnonzero(found.values[1, :32]).tolist() == [3]
    assert found.underflow.tolist() == [[0, 0], [31, 0]]
    assert found.totals()["nan_blocks"] == 1
    clamped = tap.viz.quantize_error(x, "nvfp4").values[1]
    assert clamped == pytest.approx(1.0)  # to the largest finite value


def test_axis_block_and_any_framework():
    import torch

    x = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
    down = tap.viz.quantize_error(torch.from_numpy(x).bfloat16(), "mxfp6_e2m3", axis=0)
    rounded = x.astype(ml_dtypes.bfloat16)
    across = tap.viz.quantize_error(np.ascontiguousarray(rounded.T), "mxfp6_e2m3")
    assert down.scale.shape == (2, 6)
    assert np.array_equal(down.values, across.values.T)
    assert np.array_equal(down.sqnr, across.sqnr.T)
    assert tap.viz.quantize_error(x, "mxfp4", block=2).scale.shape == (40, 3)
    assert down.worst is not None
    assert tap.viz.quantize_error(np.zeros((2, 0)), "nvfp4").worst is None
    assert tap.viz.quantize_error(3.0, "nvfp4").values.tolist() == [3.0]


def test_wrong_arguments_are_named():
    x = np.ones(4)
    with pytest.raises(NotFound, match="no block format is called 'fp4'; there are mxfp8_e4m3"):
        tap.viz.quantize_error(x, "fp4")
    with pytest.raises(ValueError, match="block must be from 1 to 4096, got 0"):
        tap.viz.quantize_error(x, "mxfp4", block=0)
    with pytest.raises(ValueError, match="axis must be one of the 1 axes"):
        tap.viz.quantize_error(x, "mxfp4", axis=1)
    with pytest.raises(TypeError, match="real numbers"):
        tap.viz.quantize_error(np.ones(3, complex), "mxfp4")


def test_a_run_has_no_values_to_judge(tmp_path):
    path = tap.init(tmp_path)
    tap.catch(np.ones(4), "x")
    tap.finish()
    with pytest.raises(NotFound, match=r"needs values: tap.viz.quantize_error\(run.get\(name\)"):
        tap.open(path).formats("mxfp4")
