"""Spectra, against the singular value decomposition of NumPy."""

import math

import numpy as np
import pytest

from tensortap.stats import spectra
from tensortap.stats.spectra import spectrum


def expected(matrix):
    sizes = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    share = sizes[sizes > 0] / sizes.sum()
    entropy = -(share * np.log(share)).sum()
    return sizes[0], (sizes**2).sum() / sizes[0] ** 2, math.exp(entropy)


@pytest.mark.parametrize("shape", [(2, 2), (40, 7), (7, 300), (64, 64)])
def test_small_matrices_are_exact(shape):
    matrix = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = spectrum(matrix)
    assert found[:3] == pytest.approx(expected(matrix), rel=1e-12)
    assert found.captured == 1


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.5])
def test_large_matrices_are_within_the_stated_bounds(decay, monkeypatch):
    monkeypatch.setattr(spectra, "EXACT", 64)  # as for large ones, in less time
    monkeypatch.setattr(spectra, "SKETCH", 32)
    rng = np.random.default_rng(1)
    left, _ = np.linalg.qr(rng.standard_normal((150, 150)))
    right, _ = np.linalg.qr(rng.standard_normal((150, 150)))
    sizes = np.arange(1, 151) ** -decay
    matrix = left * sizes @ right.T
    largest, stable, effective = expected(matrix)
    found = spectrum(matrix)
    assert found.captured < 1
    factor = math.sqrt(1 + (1 - found.captured) * found.stable_rank)
    slack = 1 + 1e-12
    assert found.largest <= largest * slack
    assert largest <= found.largest * factor * slack
    assert stable <= found.stable_rank * slack
    assert found.stable_rank <= stable * factor**2 * slack
    assert found.effective_rank <= effective
    if decay:  # one direction stands out
        assert found.largest == pytest.approx(largest, rel=1e-6)


def test_nothing_to_decompose():
    assert spectrum(np.zeros((3, 3))) is None
    assert spectrum(np.array([[1.0, np.nan], [0.0, 1.0]])) is None
    assert spectrum(np.zeros((0, 3))) is None
