"""`viz.interactive`: clicks and choices, as a browser reports them."""

from __future__ import annotations

import dataclasses
import html
import importlib
import json
import sys
import types

import numpy as np
import pandas as pd
import pytest
from ipywidgets.widgets.widget import _instances, _remove_buffers

import tensortap as tap
from tensortap.core.errors import MissingExtra, NotFound
from tensortap.core.history import History
from tensortap.rooms import figures as viz
from tensortap.rooms.figures.explorer import curves_of
from tensortap.rooms.figures.figures.theme import untyped
from tests.figures.conftest import HOSTILE, training


def click(figure, trace, point, x=0):
    """Send the message that plotly's widget gets from a browser for a click."""
    trace %= len(figure.data)
    figure._js2py_pointsCallback = {
        "event_type": "plotly_click",
        "points": {"trace_indexes": [trace], "point_indexes": [point], "xs": [x], "ys": [0]},
        "device_state": {
            "alt": False, "ctrl": False, "meta": False, "shift": False, "button": 0, "buttons": 1
        },
        "selector": None,
    }  # fmt: skip


def heading(figure):
    return figure.layout.annotations[0].text


@pytest.mark.slow
def test_click_on_the_loss_chooses_the_step(run_path):
    run = tap.open(run_path)
    shown = viz.interactive(
        f=viz.exp_hist, df=run.logframe(), layer=["embed", "output"], tt="Activation", step=0,
        train_stats=run.metrics(), col_wrap=3, dtype_annotation="float8_e4m3fn",
    )  # fmt: skip
    before = sum(shown.figure.data[0].customdata)
    assert (shown.figure.layout.meta["step"], before) == (0, 256)
    click(shown.loss, -1, 6, x=6.3)
    assert shown.step.value == 6
    assert shown.figure.layout.meta["step"] == 6
    assert shown.loss.layout.shapes[0].x0 == 6
    direct = viz.exp_hist(run, layer=["embed", "output"], tt="Activation", step=6)
    assert shown.figure.data[1].customdata == direct.data[1].customdata
    assert sum(shown.figure.data[1].customdata) == 256


def test_click_on_the_heatmap_opens_the_histogram(run_path):
    shown = viz.interactive(viz.scalar_global_heatmap, run_path, tt="Activation", inc=2)
    assert shown._lower.children == ()
    click(shown.figure, 0, [3, 4])
    step = untyped(shown.figure.data[0].customdata)[3, 4, 1]
    assert step in (8, 9)
    assert heading(shown.detail) == (
        f"{heading(viz.exp_hist(run_path, layer=HOSTILE, tt='Activation', step=int(step)))}"
    )
    assert shown.detail.data[0].type == "bar"
    assert shown.step.value == step
    assert shown.detail in shown._lower.children
    flags = next(i for i, t in enumerate(shown.figure.data) if t.name == "NaN")
    click(shown.figure, flags, [2, 3])  # a cell with NaN opens as well
    assert "blocks.0.down · Activation · step 7" in heading(shown.detail)
    marks = next(i for i, t in enumerate(shown.figure.data) if t.name == "alert")
    click(shown.figure, marks, 0)
    assert shown.step.value == 7


def test_widgets_change_the_figure(run_path):
    shown = viz.interactive(viz.scalar_line, run_path, layer=["embed"], scalar_metric=["rm2"])
    assert len(shown.figure.data) == 1
    shown.metrics.value = ("rm2", "std")
    assert {trace.yaxis for trace in shown.figure.data} == {"y", "y2"}
    shown.kinds.value = "Gradient"
    assert shown.figure.layout.meta["kind"] == "Gradient"
    shown.layers.value = ("embed", "output")
    assert list(shown.figure.layout.meta["names"]) == ["embed", "output"]
    shown.axis.value = True
    assert shown.figure.layout.yaxis.type == "log"
    click(shown.figure, 0, 0, x=4)
    assert [shape.x0 for shape in shown.figure.layout.shapes] == [4]
    shown.layers.value = ()
    assert "no layer of Gradient is chosen" in heading(shown.figure)


def test_kinds_are_facets(run_path):
    kinds = ["Activation", "Gradient"]
    lines = viz.interactive(viz.scalar_line, run_path, tt=kinds, layer="embed")
    assert [note.text for note in lines.figure.layout.annotations] == kinds
    lines.kinds.value = ("Gradient",)
    assert heading(lines.figure) == "RMS (rm2)"
    lines.kinds.value = ()
    assert "no layer of any kind is chosen" in heading(lines.figure)
    bars = viz.interactive(viz.exp_hist, run_path, tt=kinds, layer="embed", step=3)
    assert [n.text for n in bars.figure.layout.annotations[::2]] == [
        f"embed · {kind}" for kind in kinds
    ]
    with pytest.raises(ValueError, match="one kind of tensor and one statistic"):
        viz.interactive(viz.scalar_global_heatmap, run_path, tt=kinds)


def test_chosen_format_is_drawn(run_path):
    shown = viz.interactive(viz.exp_hist, run_path, layer="embed", tt="Activation")
    assert len(shown.figure.layout.shapes) == 0
    shown.dtype.value = "float8_e5m2"
    assert len(shown.figure.layout.shapes) == 3
    shown.dtype.value = "no format"
    assert len(shown.figure.layout.shapes) == 0


def test_refresh_reads_new_records():
    history = History(1 << 30)
    history.write(training(range(3)))
    shown = viz.interactive(viz.exp_hist, history, layer="embed", tt="Activation")
    assert shown.figure.layout.meta["step"] == 2
    assert not shown.refresh()
    history.write(training(range(3, 5)))
    shown.again.click()
    assert shown.step.options == (0, 1, 2, 3, 4)
    assert shown.figure.layout.meta["step"] == 4  # stays at the newest step
    shown.step.value = 1
    history.write(training(range(5, 6)))
    assert shown.refresh()
    assert (shown.step.value, shown.figure.layout.meta["step"]) == (1, 1)
    assert np.asarray(shown.loss.data[0].x).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "f", [viz.exp_hist, viz.scalar_line, viz.scalar_global_heatmap], ids=lambda f: f.__name__
)
def test_state_for_the_browser_is_json(run_path, f):
    """JSON has no NaN: a front end would get invalid JSON."""
    shown = viz.interactive(f, run_path, tt="Activation")
    shown.step.value = 5
    shown._repr_mimebundle_()
    for widget in (shown.figure, shown.loss):
        state, _, _ = _remove_buffers(widget.get_state())
        json.dumps(state, allow_nan=False)
        # what a front end shows first, and after a reload
        assert len(state["_widget_data"]) == len(widget.data) > 0
        assert state["_widget_layout"]["height"] == widget.layout.height


def test_several_formats_are_one_choice(run_path):
    shown = viz.interactive(
        viz.exp_hist, run_path, layer="embed", dtype_annotation=["float16", "float8_e5m2"],
        train_stats={"steps": [0, 5], "loss": [1.0, 0.5]},
    )  # fmt: skip
    assert shown.dtype.value == "float16, float8_e5m2"
    assert len(shown.figure.layout.shapes) == 6
    click(shown.loss, -1, 1, x=5)  # the second point is step 5, not 1
    assert shown.step.value == 5
    shown.dtype.value = "logged dtype"
    assert "float32" in str(shown.figure.layout.annotations)


def test_reads_training_statistics_from_any_source(run_path, table):
    frame = tap.open(run_path).metrics()
    for stats in (None, frame, frame.set_index("step"), {"step": range(12), "loss": frame["loss"]}):
        steps, values = curves_of(stats, table)["loss"]
        assert steps.tolist() == list(range(12))
        assert values.tolist() == [1 / (1 + s) for s in range(12)]
    assert list(curves_of(tap.open(run_path), None)) == ["loss"]


STEPS, LOSS = [0, 50, 100], [3.0, 2.0, 1.0]


@dataclasses.dataclass
class TrainingStats:  # as other tools define it
    steps: list
    train_loss: list
    val_loss: list | None = None


@pytest.mark.parametrize(
    "stats",
    [
        {"steps": STEPS, "train_loss": LOSS},
        {"step": STEPS[::-1], "train_loss": LOSS[::-1]},
        {"global_step": STEPS, "train_loss": LOSS},
        TrainingStats(STEPS, LOSS),
        pd.DataFrame({"steps": STEPS, "train_loss": LOSS, "note": ["a", "b", "c"]}),
        pd.DataFrame({"train_loss": LOSS, "Iteration": STEPS}),
        pd.DataFrame({"train_loss": LOSS}, index=STEPS),
        pd.Series(LOSS, index=STEPS, name="train_loss"),
    ],
    ids=str,
)
def test_training_statistics_have_their_steps(stats):
    ((name, (steps, values)),) = curves_of(stats, None).items()
    assert name == "train_loss"
    assert (steps.tolist(), values.tolist()) == (STEPS, LOSS)
    assert steps.dtype == np.int64


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        ({"steps": STEPS, "loss": [1.0]}, r"'loss' has the shape \(1,\) for steps of shape \(3,\)"),
        ({"steps": ["a", "b", "c"], "loss": LOSS}, "steps must be whole numbers"),
        ({"steps": [0.5, 1, 2], "loss": LOSS}, "steps must be whole numbers"),
        ({"loss": ["a"]}, "'loss' must be numbers"),
        ({"steps": STEPS}, "no curve"),
        (3.0, "train_stats must be a dict like"),
        (pd.Series(LOSS, index=pd.date_range("2024", periods=3)), "steps must be whole numbers"),
    ],
    ids=str,
)  # fmt: skip
def test_rejects_training_statistics_it_does_not_understand(stats, message):
    with pytest.raises((TypeError, ValueError), match=message):
        curves_of(stats, None)


def test_enables_widgets_in_colab(run_path, monkeypatch):
    calls = []
    output = types.ModuleType("google.colab.output")
    output.enable_custom_widget_manager = lambda: calls.append(True)
    colab = types.ModuleType("google.colab")
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    monkeypatch.setitem(sys.modules, "google.colab.output", output)
    viz.interactive(viz.exp_hist, run_path, layer="embed")
    assert calls  # plotly does it for its widgets


def test_rejects_wrong_arguments(run_path, monkeypatch):
    with pytest.raises(TypeError, match=r"viz\.scalar_line, viz\.scalar_global_heatmap"):
        viz.interactive(print, run_path)
    with pytest.raises(NotFound, match="no Activation layer is called 'embde'"):
        viz.interactive(viz.exp_hist, run_path, layer="embde")
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "tensortap.rooms.figures.explorer")
    with pytest.raises(MissingExtra, match="pip install ipywidgets anywidget"):
        importlib.import_module("tensortap.rooms.figures.explorer")


def test_a_notebook_stores_plotly_once(run_path):
    """A notebook stores the state of every widget that is open, its script included."""
    before = set(_instances)
    for shown in (viz.interactive(run_path), viz.interactive(viz.exp_hist, run_path)):
        shown.step.value = 3
        assert shown.figure.layout.meta
    states = [each.get_state() for key, each in _instances.items() if key not in before]
    scripts = sorted(len(state["_esm"]) for state in states if "_esm" in state)
    assert sum(scripts[:-1]) < 10_000
    assert scripts[-1] < 6_000_000


def test_runs_receipts_and_alerts_are_html_in_a_notebook(run_path):
    run = tap.open(run_path)
    assert str(run.path) in run._repr_html_()
    found = run.alerts()
    assert found[0].message in html.unescape(found._repr_html_())
    assert tap.receipt()._repr_html_().startswith("<pre>tensortap receipt")
