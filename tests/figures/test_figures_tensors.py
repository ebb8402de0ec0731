"""Figures of a tensor: every value, or tiles that keep extremes and non-finite values."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensortap.rooms.figures.figures.tensors import histogram_figure, tensor_figure
from tensortap.rooms.figures.figures.theme import untyped
from tensortap.rooms.figures.reals import edges, shrink


def message(figure):
    return figure["layout"]["annotations"][0]["text"]


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=40),
        elements=st.floats(width=32),
    ),
    st.integers(1, 12),
    st.integers(1, 12),
)
def test_tiles_keep_extremes_and_what_is_not_finite(matrix, rows, columns):
    found = shrink(matrix, rows, columns, 0.0)
    assert found.shape == (min(rows, len(matrix)), min(columns, matrix.shape[1]))
    down, across = (edges(n, m) for n, m in zip(matrix.shape, found.shape, strict=True))
    for i, j in np.ndindex(found.shape):
        tile = matrix[down[i] : down[i + 1], across[j] : across[j + 1]]
        if np.isnan(tile).any():
            assert np.isnan(found[i, j])
        else:
            assert abs(found[i, j]) == np.abs(tile).max()
            assert found[i, j] in tile


@pytest.mark.slow
def test_shows_one_nan_among_four_million():
    matrix = np.zeros((2048, 2048), "f4")
    matrix[617, 2000] = np.nan
    matrix[2047, 0] = -7.0
    figure = tensor_figure(matrix)
    tile = figure["layout"]["meta"]["tile"]
    names = [trace.get("name") for trace in figure["data"]]
    assert names == [None, "NaN", "NaN"]
    cells = np.argwhere(~np.isnan(untyped(figure["data"][1]["z"])))
    assert cells.tolist() == [[617 * 400 // 2048, 2000 * 400 // 2048]]
    marks = figure["data"][2]  # of a fixed size: a cell may be smaller than a pixel
    assert (len(marks["x"]), len(marks["y"])) == (1, 1)
    assert abs(marks["x"][0] - 2000) <= tile[1]
    z = untyped(figure["data"][0]["z"])
    assert z.shape[0] <= 400
    assert z[-1, 0] == -7.0
    json.dumps(figure, allow_nan=False)


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "int8", "uint8", "bool", "float64", "bfloat16", "complex64"]
)
def test_shows_every_value_of_a_small_matrix(dtype):
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    array = (np.arange(12).reshape(3, 4) % 7).astype(dtype)
    figure = tensor_figure(array, title="x", origin=(10, 20), axes=("token", "feature"))
    z = untyped(figure["data"][0]["z"])
    np.testing.assert_array_equal(z, np.abs(array).astype("f8"))
    assert untyped(figure["data"][0]["x"]).tolist() == [20, 21, 22, 23]
    assert figure["layout"]["yaxis"]["title"]["text"] == "token"
    assert figure["layout"]["meta"]["tile"] == [1, 1]
    go.Figure(figure)


def test_shows_integers_beyond_float64_as_text():
    array = np.array([[2**62 + 1, 3]])
    assert tensor_figure(array)["data"][0]["text"] == [[str(2**62 + 1), "3"]]


def test_colors_nan_and_both_infinities():
    array = np.array([[np.inf, -np.inf], [np.nan, 1.0]], "f4")
    found = {
        t["name"]: np.argwhere(~np.isnan(untyped(t["z"]))).tolist()
        for t in tensor_figure(array)["data"]
        if t["type"] == "heatmap" and "name" in t
    }
    assert found == {"+Inf": [[0, 0]], "−Inf": [[0, 1]], "NaN": [[1, 0]]}


def test_draws_a_vector_as_a_line():
    array = np.sin(np.arange(100_000) / 50).astype("f4")
    array[777] = np.nan
    array[888] = 9.0
    figure = tensor_figure(array, title="v")
    line, nan = figure["data"]
    assert np.nanmax(untyped(line["y"])) == 9.0
    assert len(untyped(line["x"])) < 7000
    assert (nan["x"], nan["name"]) == ([777], "1 NaN")


def test_what_has_no_figure_is_message():
    assert message(tensor_figure(np.zeros((0, 3)))) == "no elements: the shape is (0, 3)"
    assert message(tensor_figure(np.float32(2.5), title="loss")) == "loss = 2.5"
    assert "does not hold numbers" in message(tensor_figure(np.array(["a"])))
    with pytest.raises(ValueError, match="two axes"):
        tensor_figure(np.zeros((1,) * 7))


def test_histogram_counts_every_element():
    array = np.random.default_rng(0).standard_normal(10_000).astype("f4")
    array[:3] = np.nan
    figure = histogram_figure(array, title="h")
    assert sum(figure["data"][0]["y"]) == 9_997
    assert "3 of them not finite" in figure["layout"]["title"]["text"]
    assert sum(histogram_figure(np.full(7, 3))["data"][0]["y"]) == 7
    assert message(histogram_figure(np.full(3, np.nan))) == "none of 3 elements is finite"
    go.Figure(figure)
