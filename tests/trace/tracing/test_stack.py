"""`stack_padded_tensors`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tensortap as tap
from tensortap.core.errors import TensortapError


def stacked(values):
    values = list(values)
    iterations, ranks = list(range(len(values))), [0] * len(values)
    tap.rooms.trace.stack_padded_tensors("x", values, iterations, ranks)
    if len(values) == 1 and iterations != [0]:
        assert (iterations, ranks) == ([list(range(len(ranks[0])))], [[0] * len(ranks[0])])
    return values


def test_pads_to_the_largest_size():
    (found,) = stacked([torch.ones(2, 1), torch.ones(1, 3), torch.ones(0, 0)])
    assert found.tolist() == [
        [[1, 0, 0], [1, 0, 0]],
        [[1, 1, 1], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 0]],
    ]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int64, torch.uint64, torch.float16, torch.bfloat16,
        torch.float64, torch.complex64, torch.float8_e4m3fn,
    ],
)  # fmt: skip
def test_every_dtype(dtype):
    a, b = torch.ones(2).to(dtype), torch.ones(3).to(dtype)
    (found,) = stacked([a, b])
    assert found.dtype == dtype
    assert found.to(torch.complex128).real.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_numbers():
    assert stacked([1, 2**62])[0].tolist() == [1, 2**62]
    assert stacked([1, 0.5])[0].dtype == torch.float64
    assert stacked([True, False])[0].dtype == torch.bool
    assert stacked([1, 2j])[0].dtype == torch.complex128
    # numbers that no dtype holds exactly stay as they are
    assert stacked([1, 2**70]) == [1, 2**70]
    assert stacked([2**60 + 1, 0.5]) == [2**60 + 1, 0.5]


def test_numpy_scalars_and_arrays():
    (found,) = stacked([np.float32(1), np.float32(2)])
    assert (found.dtype, found.tolist()) == (np.float32, [1, 2])
    (found,) = stacked([np.ones((1, 2), np.int8), np.ones((2, 1), np.int8)])
    assert found.tolist() == [[[1, 1], [0, 0]], [[1, 0], [1, 0]]]


@pytest.mark.parametrize(
    "values", [["a", "b"], [torch.ones(2), "a"], [None, None], [{"a": 1}], [torch.ones(2), 1.0]]
)
def test_other_values_stay_as_they_are(values):
    assert all(a is b for a, b in zip(stacked(values), values, strict=True))


def test_different_dtypes():
    for a, b in (
        (torch.ones(1).long(), torch.ones(1)),
        (np.ones(1), np.ones(1, int)),
    ):
        with pytest.raises(TensortapError, match=r"values are .*float.* and .*int64; convert them"):
            stacked([a, b])


@pytest.mark.parametrize("ones", [torch.ones, np.ones])
def test_missing_dimensions_come_first(ones):
    (found,) = stacked([ones(()), ones(2), ones((2, 1))])
    assert found.tolist() == [[[1, 0], [0, 0]], [[1, 1], [0, 0]], [[1, 0], [1, 0]]]
