"""Norms and movements, against NumPy in float64."""

import ml_dtypes
import numpy as np
import pytest

from tensortap.rooms.analyses.numbers import Movement, movements, squares
from tensortap.stats import summarize

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def pair(count, dtype, seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(count).astype(dtype) for _ in range(2)]


def expected(new, old):
    new, old = new.astype(np.float64), old.astype(np.float64)
    return [np.sum(new * new), np.sum((new - old) ** 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [True, False])
def test_sums_are_those_of_float64(dtype, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(summarize, "kernel_code", lambda dtype: None)
    sizes = [0, 1, 7, 1024, 5000, 200_003]
    given = [pair(count, dtype, seed) for seed, count in enumerate(sizes)]
    kept = [np.zeros_like(each[0]) for each in given]
    found = movements([Movement(*each, keep) for each, keep in zip(given, kept, strict=True)])
    for each, sums, keep in zip(given, found, kept, strict=True):
        assert np.allclose(sums, expected(*each), rtol=1e-12)
        assert keep.tobytes() == each[0].tobytes()


def test_the_result_does_not_depend_on_the_variant():
    x, old = pair(300_001, np.float32, 1)
    found = set()
    before = summarize.kernel.variant()
    for variant in summarize.kernel.variants():
        summarize.kernel.use(variant)
        found.add(movements([Movement(x, old)])[0])
    summarize.kernel.use(before)
    assert len(found) == 1


def test_arrays_of_other_layouts():
    x = np.arange(12, dtype=np.float32).reshape(3, 4).T
    old = np.ascontiguousarray(x)[:, ::-1]
    (sums,) = movements([Movement(x, old)])
    assert sums.moved == float(((x - old).astype(np.float64) ** 2).sum())
    assert squares([x]) == [506.0]


def test_a_nan_is_not_hidden():
    assert np.isnan(squares([np.array([1.0, np.nan], np.float32)])[0])


def test_wrong_arguments_of_the_kernel():
    with pytest.raises(ValueError, match="floats at an address"):
        summarize.kernel.movements([(0, 5, 0, 0, 0, 0, 0)], 1)
    with pytest.raises(TypeError):
        summarize.kernel.movements([(0, 5)], 1)
