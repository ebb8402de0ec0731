"""Figures of statistics: they show what was captured, and keep extremes and NaN."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensortap.alerts import Alert
from tensortap.core.errors import NotFound
from tensortap.core.record import Kind, Record
from tensortap.page.encoding import typed
from tensortap.rooms.figures.figures.exponents import exponents_figure
from tensortap.rooms.figures.figures.heatmap import heatmap_figure
from tensortap.rooms.figures.figures.lines import lines_figure
from tensortap.rooms.figures.figures.parts import decimate
from tensortap.rooms.figures.figures.theme import (
    COLORS,
    DARK,
    dark_colors,
    labels,
    share,
    themed,
    untyped,
)
from tensortap.rooms.figures.figures.training import sparkline, training_figure
from tensortap.rooms.formats.losses import limits, shares
from tensortap.stats import summarize_array
from tensortap.table.columns import exponents
from tensortap.table.table import table_of
from tensortap.values.snapshot import borrow
from tests.figures.conftest import HOSTILE, LAYERS, training, values

ACTIVATION = Kind.ACTIVATION.value


def strings(part):
    """Return all strings in a figure."""
    if isinstance(part, dict):
        return itertools.chain.from_iterable(map(strings, part.values()))
    if isinstance(part, list):
        return itertools.chain.from_iterable(map(strings, part))
    return [part] if isinstance(part, str) else []


def every_figure(table):
    """Yield one figure of each kind, with every element it can have."""
    common = {"kind": ACTIVATION}
    yield lines_figure(table, names=LAYERS, metrics=["rm2", "mean"], step=3, **common)
    yield lines_figure(table, names=LAYERS, metrics=["rm2"], panels="name", col_wrap=2, **common)
    yield heatmap_figure(table, metric="rm2", step=3, **common)
    yield heatmap_figure(table, metric="mean", inc=4, **common)
    for dtype in (None, "float8_e4m3fn"):
        yield exponents_figure(table, name=LAYERS[3], step=4, dtype_annotation=dtype, **common)
    yield exponents_figure(table, name=LAYERS, step=7, dtype_annotation="float8_e5m2", **common)
    yield training_figure(table, step=3)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_figure_is_valid_json_and_valid_plotly(table, theme):
    for figure in every_figure(table):
        json.dumps(themed(figure, theme), allow_nan=False)
        assert go.Figure(themed(figure, theme)).data


@pytest.mark.attack("script in names")
def test_escapes_names(table):
    markup = 0
    for figure in every_figure(table):
        for text in strings({key: figure["layout"].get(key) for key in ("annotations", "title")}):
            assert "<b>" not in text
            assert "<img" not in text
            markup += "&lt;b&gt;" in text
        for trace in figure["data"]:
            assert "<img" not in trace.get("name", "")
            if isinstance(trace.get("y"), list):
                assert not any("<img" in y for y in strings(trace["y"]))
    assert markup >= 4


def test_dark_figures_have_no_light_color(table):
    light = {c for colors in COLORS for c in ((colors,) if isinstance(colors, str) else colors)}
    dark = {c for colors in DARK for c in ((colors,) if isinstance(colors, str) else colors)}
    for figure in every_figure(table):
        found = " ".join(strings(themed(figure, "dark")))
        assert not set(re.findall("#[0-9a-f]{6}", found)) & (light - dark)
    assert len(dark_colors()) == len(light)
    named = {"data": [{"name": COLORS.page, "y": [COLORS.page], "text": COLORS.page}], "layout": {}}
    assert themed(named, "dark") == named  # a name is no color
    with pytest.raises(ValueError, match="theme must be 'light' or 'dark', got 'sepia'"):
        themed(named, "sepia")


# -- decimation ----------------------------------------------------------------------------


@given(
    hnp.arrays(
        np.float64,
        st.integers(1, 3000),
        elements=st.floats(allow_nan=True, allow_infinity=True, width=32),
    ),
    st.integers(5, 60),
)
@pytest.mark.slow
def test_decimation_keeps_extremes_and_gaps(y, width):
    x = np.arange(len(y))
    kept = decimate(x, y, width)
    assert (np.diff(kept) > 0).all()
    assert {0, len(y) - 1} <= set(kept.tolist())
    if len(y) <= 5 * width:
        assert len(kept) == len(y)
        return
    assert len(kept) <= 5 * width
    pixel = np.minimum((x * (width / (len(y) - 1))).astype(int), width - 1)
    for each in np.unique(pixel):
        mine, drawn = y[pixel == each], y[kept[pixel[kept] == each]]
        assert np.isnan(mine).any() == np.isnan(drawn).any()
        if not np.isnan(mine).all():
            assert np.nanmin(mine) == np.nanmin(drawn)
            assert np.nanmax(mine) == np.nanmax(drawn)


def long_run(steps, spike, broken):
    """Return one layer over many steps, with one spike and one step that is not finite."""
    usual = summarize_array(np.ones(4, "f4"))
    high = summarize_array(np.array([1, 1e4], "f4"))
    bad = summarize_array(np.array([1, np.nan], "f4"))
    found = []
    for step in range(steps):
        stats = high if step == spike else bad if step == broken else usual
        found.append(Record("x", Kind.ACTIVATION, step, 0, step, 0, 1, step, stats=stats))
    return table_of(found)


def test_shows_one_spike_and_one_nan_among_many_steps():
    table = long_run(20_000, 7777, 12_345)
    figure = lines_figure(
        table, names=["x"], kind=ACTIVATION, metrics=["max_abs"], width_px=300, log=False
    )
    line, marks = figure["data"]
    assert len(untyped(line["x"])) <= 5 * 300
    assert untyped(line["y"]).max() == 1e4
    assert untyped(line["x"])[untyped(line["y"]).argmax()] == 7777
    assert untyped(marks["x"]).tolist() == [12_345]
    assert untyped(marks["customdata"]).tolist() == [1]


# -- lines ---------------------------------------------------------------------------------


def test_lines_have_the_recorded_statistics(table):
    figure = lines_figure(table, names=["embed"], kind="Gradient", metrics=["rm2", "std"])
    assert [trace["yaxis"] for trace in figure["data"]] == ["y", "y2"]
    for trace, statistic in zip(figure["data"], ("rm2", "std"), strict=True):
        expected = [
            getattr(summarize_array(values(0, s, Kind.GRADIENT)), statistic) for s in range(12)
        ]
        assert untyped(trace["x"]).tolist() == list(range(12))
        assert untyped(trace["y"]).tolist() == expected


def test_panels_share_the_axis_of_steps(table):
    figure = lines_figure(
        table, names=LAYERS, kind=ACTIVATION, metrics=["rm2", "std", "mean"], col_wrap=2, step=4
    )
    layout = figure["layout"]
    assert {trace["xaxis"] for trace in figure["data"]} == {"x", "x2"}
    assert layout["xaxis2"]["matches"] == "x"
    assert [shape["x0"] for shape in layout["shapes"]] == [4, 4]
    assert {"yaxis", "yaxis2", "yaxis3"} <= set(layout)


def test_many_names_get_one_panel_each():
    names = [f"layer{i}" for i in range(9)]
    table = table_of(training(range(3), layers=names))
    figure = lines_figure(table, names=names, kind=ACTIVATION, metrics=["rm2", "std"])
    heads = [note["text"] for note in figure["layout"]["annotations"]]
    assert heads == names
    assert [t["name"] for t in figure["data"] if t["showlegend"]] == ["RMS (rm2)", "std"]


def test_notes_names_without_room():
    names = [f"layer{i}" for i in range(60)]
    table = table_of(training(range(2), layers=names))
    figure = lines_figure(table, names=names, kind=ACTIVATION, metrics=["rm2"])
    assert figure["layout"]["annotations"][-1]["text"] == "the first 48 of 60 names"


def test_draws_one_line_per_rank():
    table = table_of(training(range(3), ranks=2))
    figure = lines_figure(table, names=["embed"], kind=ACTIVATION, metrics=["rm2"])
    assert [trace["name"] for trace in figure["data"]] == ["embed", "embed"]
    assert [trace["showlegend"] for trace in figure["data"]] == [True, False]
    assert "embed · rank 1</extra>" in figure["data"][1]["hovertemplate"]
    one = lines_figure(table, names=["embed"], kind=ACTIVATION, metrics=["rm2"], rank=1)
    assert [trace["name"] for trace in one["data"]] == ["embed"]
    assert untyped(one["data"][0]["y"]).tolist() == untyped(figure["data"][1]["y"]).tolist()


def test_marks_zeros_on_a_logarithmic_axis():
    stats = [summarize_array(np.array([v], "f4")) for v in (1.0, 0.0, 1000.0)]
    table = table_of(
        [Record("x", Kind.WEIGHT, s, 0, s, 0, 1, s, stats=each) for s, each in enumerate(stats)]
    )
    figure = lines_figure(table, names=["x"], kind="Weight", metrics=["rm2"])
    assert figure["layout"]["yaxis"]["type"] == "log"
    line, zeros = figure["data"]
    assert np.isnan(untyped(line["y"])).tolist() == [False, True, False]
    assert (zeros["x"], zeros["customdata"]) == ([1], [0.0])


# -- the heatmap ---------------------------------------------------------------------------


def test_cells_carry_layer_step_and_value(table):
    figure = heatmap_figure(table, kind=ACTIVATION, metric="rm2")
    base = figure["data"][0]
    z, custom = untyped(base["z"]), untyped(base["customdata"])
    assert z.shape == (5, 12)
    assert custom.shape == (5, 12, 3)
    layer, step, value = custom[1, 9]
    assert (figure["layout"]["meta"]["layers"][int(layer)], step) == ("blocks.0.up", 9)
    expected = summarize_array(values(1, 9, Kind.ACTIVATION)).rm2
    assert value == pytest.approx(expected, rel=1e-6)
    assert z[1, 9] == pytest.approx(np.log10(expected), rel=1e-5)


def flagged(figure, word):
    trace = next(t for t in figure["data"] if t["type"] == "heatmap" and t.get("name") == word)
    return np.argwhere(~np.isnan(untyped(trace["z"]))).tolist()


def test_colors_tensors_with_nan_or_inf(table):
    figure = heatmap_figure(table, kind=ACTIVATION, metric="rm2")
    assert flagged(figure, "NaN") == [[2, 7]]
    assert flagged(figure, "Inf") == [[4, 8]]
    shown = [t["name"] for t in figure["data"] if t["type"] == "scatter"]
    assert shown == ["holds NaN", "holds Inf", "alert"]


def test_columns_show_the_labelled_step_and_every_nan(table):
    figure = heatmap_figure(table, kind=ACTIVATION, metric="max_abs", inc=5)
    base = figure["data"][0]
    assert untyped(base["x"]).tolist() == [0, 5, 10]
    custom = untyped(base["customdata"])
    assert custom[0, :, 1].tolist() == [0, 5, 10]  # although the values grow
    assert flagged(figure, "NaN") == [[2, 1]]
    assert custom[2, 1, 1] == 7
    every_third = table_of([
        Record("fc", Kind.WEIGHT, step, 0, step, 0, 1, 0, stats=summarize_array(np.array([step])))
        for step in range(0, 12, 3)
    ])  # fmt: skip
    base = heatmap_figure(every_third, kind="Weight", metric="rm2", inc=2)["data"][0]
    assert untyped(base["x"]).tolist() == untyped(base["customdata"])[0, :, 2].tolist()
    assert untyped(base["x"]).tolist() == [0, 3, 6, 9]


def test_columns_that_share_a_cell_show_the_record_that_matters_most():
    records = [
        Record("fc", Kind.WEIGHT, s, 0, s, 0, 1, 0, stats=summarize_array(np.array([s % 7 + 1.0])))
        for s in range(1000)
    ]
    shown = {}
    for metric in ("max_abs", "min_abs"):
        base = heatmap_figure(table_of(records), kind="Weight", metric=metric)["data"][0]
        shown[metric] = untyped(base["customdata"])[0, 3, 1:].tolist()
    assert shown == {"max_abs": [6, 7], "min_abs": [7, 1]}


def test_many_layers_share_rows():
    names = [f"layers.{i}.weight" for i in range(900)]
    usual, bad = (summarize_array(np.array([value], "f4")) for value in (1.0, np.nan))
    records = [
        Record(name, Kind.WEIGHT, 0, 0, i, 0, 1, 0, stats=bad if i == 321 else usual)
        for i, name in enumerate(names)
    ]
    figure = heatmap_figure(table_of(records), kind="Weight", metric="rm2")
    base = figure["data"][0]
    assert figure["layout"]["meta"]["tile"] == 3
    assert untyped(base["z"]).shape == (300, 1)
    assert len(set(base["y"])) == 300
    assert flagged(figure, "NaN") == [[107, 0]]
    assert untyped(base["customdata"])[107, 0].tolist()[:2] == [321, 0]


def test_marks_alerts(table):
    figure = heatmap_figure(table, kind=ACTIVATION, metric="rm2")
    marks = figure["data"][-1]
    assert marks["x"] == [7]
    assert marks["customdata"][0][:2] == [2, 7]
    assert "3 NaN" in marks["text"][0]
    given = [Alert("r", HOSTILE, Kind.ACTIVATION, 3, 0, "", "<i>what</i>")]
    marks = heatmap_figure(table, kind=ACTIVATION, metric="rm2", alerts=given)["data"][-1]
    assert (marks["x"], "&lt;i&gt;what" in marks["text"][0]) == ([3], True)
    assert not [
        t
        for t in heatmap_figure(table, kind="Gradient", metric="rm2")["data"]
        if t.get("name") == "alert"
    ]


def test_centers_signed_statistics_at_zero(table):
    base = heatmap_figure(table, kind="Gradient", metric="mean")["data"][0]
    assert base["zmin"] == -base["zmax"]


def test_labels_are_distinct():
    long = ["a" * 100 + str(i) + "b" * 100 for i in range(3)]
    found = labels(long)
    assert len(set(found)) == 3
    assert all(len(label) <= 48 for label in found)


# -- exponents -----------------------------------------------------------------------------


def test_bars_and_shares_are_exact(table):
    found = values(1, 3, Kind.ACTIVATION)
    summary = summarize_array(found)
    figure = exponents_figure(
        table, name=LAYERS[1], kind=ACTIVATION, step=3, dtype_annotation="float8_e4m3fn"
    )
    bars = figure["data"][0]
    held = {x: n for x, n in zip(bars["x"], bars["customdata"], strict=True) if n}
    assert held == summary.exponents
    assert sum(bars["y"]) == pytest.approx(100)
    row = table.rows(kind=ACTIVATION, names=[LAYERS[1]], step=3)
    expected = shares(exponents(table, row), limits("float8_e4m3fn"))
    facts = figure["layout"]["annotations"][1]["text"]
    assert f"{share(expected['subnormal'][0])} subnormal" in facts
    assert share(expected["underflow"][0]).removesuffix(" %") in facts
    assert expected["underflow"][0] > 0
    ends = [s["x0"] for s in figure["layout"]["shapes"] if s["type"] == "line"]
    assert ends == [-10, -6, pytest.approx(np.log2(464))]


def test_draws_several_layers_as_small_multiples(table):
    figure = exponents_figure(
        table, name=LAYERS, kind=ACTIVATION, step=7, col_wrap=2, dtype_annotation="float8_e4m3fn"
    )
    assert len(figure["data"]) == 5
    layout = figure["layout"]
    assert layout["xaxis4"]["matches"] == "x"
    assert layout["xaxis"]["domain"] == layout["xaxis3"]["domain"]
    assert any("3 NaN" in note["text"] for note in layout["annotations"])


def test_sums_ranks_of_a_step():
    table = table_of(training(range(2), ranks=2))
    both = exponents_figure(table, name="embed", kind=ACTIVATION, step=1)["data"][0]
    one = exponents_figure(table, name="embed", kind=ACTIVATION, step=1, rank=1)["data"][0]
    assert (sum(both["customdata"]), sum(one["customdata"])) == (512, 256)


def test_explains_missing_exponents(table):
    figure = exponents_figure(table, name="embed", kind=ACTIVATION, step=99)
    assert figure["layout"]["annotations"][0]["text"].startswith("no exponents of embed")
    with pytest.raises(NotFound, match="no float format"):
        exponents_figure(table, name="embed", kind=ACTIVATION, step=1, dtype_annotation="float9")


# -- training ------------------------------------------------------------------------------


def test_draws_the_loss(table):
    figure = training_figure(table, step=5)
    assert untyped(figure["data"][0]["y"]).tolist() == [1 / (1 + s) for s in range(12)]
    assert figure["layout"]["shapes"][0]["x0"] == 5
    nothing = training_figure(table_of([]))
    assert "tracker.step(loss=loss)" in nothing["layout"]["annotations"][0]["text"]


def test_marks_a_loss_that_is_not_finite():
    steps = np.arange(4)
    figure = training_figure({"loss": (steps, np.array([1.0, np.nan, np.inf, 2.0]))})
    line, marks, steps = figure["data"]
    assert line["y"] == [1.0, None, None, 2.0]
    assert "at %{x}" in line["hovertemplate"]  # beside the gap plotly shows a neighbor
    assert marks["x"] == [1, 2]
    assert (steps["name"], steps["x"]) == ("step", [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("given", "path"),
    [([], ""), ([np.nan], ""), ([3.0], "M0 10"), ([1.0, 1.0], "M0 10L96 10")],
)
def test_sparklines(given, path):
    assert sparkline(np.array(given)) == path


def test_sparkline_is_short_and_keeps_a_spike():
    y = np.zeros(100_000)
    y[31_415] = 1.0
    path = sparkline(y, width=50, height=10)
    assert len(path) < 4000
    assert " 0.5" in path


# -- encoding ---------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3),
        np.array([np.nan, 1.0]),
        np.arange(40),
        np.arange(40) * 2**40,
        np.linspace(0, 1, 60).reshape(3, 20),
        np.linspace(0, 1, 60, dtype="f4").reshape(3, 5, 4),
    ],
)
def test_encodes_arrays_exactly(array):
    sent = json.loads(json.dumps(typed(array), allow_nan=False))
    np.testing.assert_array_equal(untyped(sent), array)


def test_tensors_without_statistics_are_not_shown_as_nan():
    def caught(name, step, value):
        return Record(name, Kind.VALUE, step, 0, step, 0, 1, step, value=borrow(value))

    found = [caught("x", step, np.ones((2, 2), "f4")) for step in range(3)]
    found += [caught("loss", s, np.float32(v)) for s, v in enumerate([1.0, np.nan, np.inf])]
    table = table_of(found)
    only = lines_figure(table, names=["x"], kind="Value", metrics=["value"])
    assert only["layout"]["annotations"][0]["text"] == "no Value statistics of x"
    both = lines_figure(table, names=["x", "loss"], kind="Value", metrics=["value"])
    assert [t["x"] for t in both["data"] if t["name"] == "not finite"] == [[1, 2]]
    whole = heatmap_figure(table, kind="Value", metric="value")
    assert whole["layout"]["meta"]["layers"] == ["loss"]
    assert [t["name"] for t in whole["data"]] == ["value", "NaN", "holds NaN", "Inf", "holds Inf"]


def test_axis_of_a_number_that_never_changes():
    made = training_figure({"lr": (np.arange(3), np.full(3, 1e-3))})
    low, high = made["layout"]["yaxis"]["range"]
    assert 0 < low < 1e-3 < high < 2e-3
