"""Numbers about layers: to 1e-12 against plain formulas, with the kernel and without it."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensortap.rooms.analyses import activations
from tensortap.rooms.analyses.activations import (
    effective_rank,
    layer_moments,
)

CLOSE = 1e-12


def matrix(dtype: Any, rows: int = 301, channels: int = 77, mean: float = 0.0) -> np.ndarray:
    """Return normal values with a heavy tail, an outlier channel and a dead one."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, channels)) ** 3 + mean
    x[:, 5] *= 40
    x[:, 9] = 0
    return x.astype(dtype)


def plain_kurtosis(x: np.ndarray) -> float:
    values = x.astype(np.float64)
    deviations = values - math.fsum(values.ravel()) / values.size
    fourth = math.fsum((deviations**4).ravel()) / values.size
    return fourth / (math.fsum((deviations**2).ravel()) / values.size) ** 2


@pytest.fixture(params=["kernel", "numpy"])
def way(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(activations, "kernel_code", lambda dtype: None)
    elif activations.kernel is None:
        pytest.skip("the kernel was not built")
    return request.param


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_moments_are_those_of_plain_formulas(way, dtype, mean):
    x = matrix(dtype, mean=mean)
    found = layer_moments(x)
    assert found.kurtosis == pytest.approx(plain_kurtosis(x), rel=CLOSE)
    rms = np.sqrt((x.astype(np.float64) ** 2).mean(axis=0))
    np.testing.assert_allclose(found.rms, rms, rtol=CLOSE)
    assert np.flatnonzero(found.dead).tolist() == [9]


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 5), (5, 8), (4, 4099), (0, 4)])
def test_any_shape(way, shape):
    x = np.random.default_rng(0).standard_normal(shape) + 1
    found = layer_moments(x)
    want = plain_kurtosis(x) if x.size > 1 else math.nan
    assert found.kurtosis == pytest.approx(want, rel=CLOSE, nan_ok=True)
    assert len(found.rms) == len(found.dead) == shape[1]


def test_rows_with_gaps_and_columns_in_any_order(way):
    x = matrix(np.float32, 64, 60)
    for view in (x[::2], x[:, ::3], x.T, x[::-1]):
        want = layer_moments(view.copy())
        got = layer_moments(view)
        assert got.kurtosis == pytest.approx(want.kurtosis, rel=CLOSE)
        np.testing.assert_allclose(got.rms, want.rms, rtol=CLOSE)


def test_a_sample_that_misleads_does_not_cost_digits(way):
    x = np.ones((800, 16)) + np.random.default_rng(1).standard_normal((800, 16)) * 1e-4
    x[::100] = 1e6  # the rows from which the mean is guessed
    assert layer_moments(x).kurtosis == pytest.approx(plain_kurtosis(x), rel=CLOSE)


def test_all_variants_of_the_kernel_give_the_same_bits():
    kernel = activations.kernel
    x = matrix(np.float32, 257, 83)
    best, found = kernel.variant(), []
    try:
        for variant in kernel.variants():
            kernel.use(variant)
            kurtosis, rms, _ = layer_moments(x)
            found.append((kurtosis, rms.tobytes()))
    finally:
        kernel.use(best)
    assert len(set(found)) == 1


def test_values_that_are_not_finite_do_not_count(way):
    x = matrix(np.float64)
    bad = x.copy()
    bad[3, 4], bad[5, 6], bad[:, 9] = math.nan, math.inf, math.nan
    kept = bad[np.isfinite(bad)]
    found = layer_moments(bad)
    assert found.kurtosis == pytest.approx(plain_kurtosis(kept), rel=CLOSE)
    assert found.rms[4] == pytest.approx(math.sqrt(np.mean(np.delete(x[:, 4], 3) ** 2)), rel=CLOSE)
    assert not found.dead.any()  # NaN is not 0


@pytest.mark.parametrize("scale", [1e-45, 1e38])  # of float32
def test_sizes_far_from_1(way, scale):
    x = np.random.default_rng(2).standard_normal((40, 7))
    found = layer_moments(x * scale)
    assert found.kurtosis == pytest.approx(plain_kurtosis(x), rel=1e-11)  # of rounded products
    assert not found.dead.any()


def test_equal_values_have_no_kurtosis(way):
    assert math.isnan(layer_moments(np.full((9, 9), np.float32(0.1))).kurtosis)


@pytest.mark.parametrize("shape", [(300, 20), (20, 300), (64, 1500), (1, 9), (5000, 3)])
def test_effective_rank_is_that_of_all_singular_values(shape):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * np.geomspace(1, 1e-3, shape[1])
    rows = x if len(x) <= 32 else x[[i * (len(x) - 1) // 31 for i in range(32)]]
    sizes = np.linalg.svd(rows, compute_uv=False)
    share = sizes / sizes.sum()
    assert effective_rank(x) == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=CLOSE)


@pytest.mark.parametrize("smallest", [0.5, 0.011, 0.009, 1e-6])
def test_effective_rank_of_singular_values_near_each_other_and_far(smallest):
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((n, 32)))[0] for n in (32, 400))
    sizes = np.geomspace(1, smallest, 32)
    share = sizes / sizes.sum()
    want = np.exp(-(share * np.log(share)).sum())
    assert effective_rank((left * sizes) @ right.T) == pytest.approx(want, rel=CLOSE)


def test_effective_rank_of_what_has_none():
    assert effective_rank(np.zeros((4, 4))) == 0.0
    assert math.isnan(effective_rank(np.array([[1.0, math.nan]])))
