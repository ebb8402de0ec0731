"""The functions of `tensortap.rooms.figures`, on every kind of source."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import plotly.graph_objects as go
import pytest

import tensortap as tap
from tensortap.api import session as live
from tensortap.core.errors import NotFound
from tensortap.rooms import figures as viz
from tests.figures.conftest import HOSTILE, LAYERS, training


@pytest.fixture(scope="module", params=["run", "path", "live", "records", "logframe"])
def source(request, run_path):
    if request.param == "live":
        server = live.start("127.0.0.1", 0)
        server.history.write(training())
        yield server
        server.close()
        return
    run = tap.open(run_path)
    yield {
        "run": run,
        "path": str(run_path),
        "records": training(),
        "logframe": run.logframe() if request.param == "logframe" else None,
    }[request.param]


def test_draws_every_figure_from_every_source(source):
    lines = viz.scalar_line(
        source, tt="Activation", layer="output", scalar_metric=["rm2", "min_abs"]
    )
    heat = viz.scalar_global_heatmap(source, tt="Gradient", scalar_metric="rm2", inc=5)
    bars = viz.exp_hist(
        source, layer="output", tt="Activation", step=3, dtype_annotation="float8_e4m3fn"
    )
    assert [trace.name for trace in lines.data[:2]] == ["output", "not finite"]
    assert np.asarray(heat.data[0].z).shape == (5, 3)
    assert sum(bars.data[0].customdata) == 256
    assert all(isinstance(figure, go.Figure) for figure in (lines, heat, bars))
    by_keyword = viz.exp_hist(df=source, layer="output", tt="Activation", step=3)
    assert by_keyword.data[0].customdata == bars.data[0].customdata


def test_layers_that_lack_a_kind_are_left_out():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with tap.track(model) as tracker:
        model(torch.ones(2, 4)).sum().backward()
        tracker.step()
    layers = tracker.logframe().metadata.name.unique().tolist()
    assert "0.bias" in layers  # a parameter: it has no output
    for source in (tracker, tracker.logframe()):
        lines = viz.scalar_line(df=source, tt="Activation", layer=layers)
        assert {trace.name for trace in lines.data} == {"0", "1", "Sequential"}
        assert len(viz.exp_hist(df=source, tt="Activation", layer=layers, step=0).data) == 3
        lines = viz.scalar_line(df=source, tt=["Activation", "Weight"], layer="0.bias")
        assert [trace.name for trace in lines.data] == ["0.bias"]
        with pytest.raises(NotFound, match=r"no Activation layer is called '0\.bias'"):
            viz.scalar_line(df=source, tt="Activation", layer=["0.bias"])
        with pytest.raises(NotFound, match="no Activation layer is called 'outputs'"):
            viz.scalar_line(df=source, tt="Activation", layer=["0", "outputs"])


def test_kinds_of_tensors_are_facets(run_path):
    kinds = ["Activation", tap.core.record.Kind.GRADIENT]
    lines = viz.scalar_line(
        run_path, tt=kinds, layer="embed", scalar_metric=["rm2", "std"], kind="scatter"
    )
    assert [note.text for note in lines.layout.annotations] == ["Activation", "Gradient"]
    assert {(trace.name, trace.yaxis) for trace in lines.data} == {
        (f"embed · {metric}", axis) for metric in ("RMS (rm2)", "std") for axis in ("y", "y2")
    }
    assert {trace.mode for trace in lines.data} == {"markers"}
    assert sum(trace.showlegend for trace in lines.data) == 2
    bars = viz.exp_hist(run_path, tt=kinds, layer="embed", step=3)
    assert [n.text for n in bars.layout.annotations[::2]] == [
        "embed · Activation", "embed · Gradient",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="kind must be 'line' or 'scatter', got 'bar'"):
        viz.scalar_line(run_path, kind="bar")


def test_number_formats_of_exponent_histograms(run_path):
    def words(formats, **options):
        figure = viz.exp_hist(
            run_path, tt="Activation", layer="output", step=3, dtype_annotation=formats, **options
        )
        return figure, " ".join(note.text for note in figure.layout.annotations or ())

    _, text = words(True)
    assert "float32" in text
    assert "no loss" in text or "0 % underflow" in text
    one, _ = words("float8_e4m3fn")
    assert words(["float8_e4m3fn"])[0].layout.shapes == one.layout.shapes
    assert len(one.layout.shapes) == 3  # lowest number, normal range, largest
    two, text = words(["float8_e4m3fn", "float8_e5m2"])
    assert len(two.layout.shapes) == 6  # three ends of each
    assert re.search("float8_e4m3fn: .*underflow.*<br>float8_e5m2: ", text)
    for none in (None, False, []):
        assert not words(none)[0].layout.shapes
    with pytest.raises(NotFound, match="no float format is called 'int8'"):
        words(["float16", "int8"])


def test_accepts_kinds_and_layers_in_several_spellings(run_path):
    run = tap.open(run_path)
    for tt in ("Activation", "activations", "Act", tap.core.record.Kind.ACTIVATION, None):
        figure = viz.scalar_line(run, tt=tt, layer=re.compile("blocks"))
        assert figure.layout.meta["kind"] == "Activation"
        assert list(figure.layout.meta["names"]) == ["blocks.0.up", "blocks.0.down"]
    assert viz.exp_hist(run, tt="Gradient", layer="embed").layout.meta["step"] == 11
    assert "loss" in viz.training(run).data[0].name


def test_finds_parameters_by_their_module():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with tap.track(model, optimizer=optimizer) as tracker:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        tracker.step(loss=1.0)
    weight = viz.scalar_line(tracker, tt="Weight", layer="0")
    assert list(weight.layout.meta["names"]) == ["0.weight"]
    state = viz.scalar_line(tracker, tt="Optimizer_State.exp_avg", layer="0")
    assert list(state.layout.meta["names"]) == ["0.weight.exp_avg"]
    everything = viz.scalar_line(tracker, tt="Optimiser_State", layer="0")
    assert "0.weight.exp_avg_sq" in everything.layout.meta["names"]
    with pytest.raises(NotFound, match="no state is called 'exp'"):
        viz.scalar_line(tracker, tt="Optimizer_State.exp", layer="0")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tt": "Activatoin"}, "no kind is called 'Activatoin'; did you mean 'Activation'"),
        ({"tt": "Weight"}, "no Weight here; there is Activation and Gradient"),
        ({"layer": "outputs"}, "no Activation layer is called 'outputs'; did you mean 'output'"),
        ({"layer": re.compile("zzz")}, "no Activation has a name that matches 'zzz'"),
        ({"scalar_metric": "rms"}, "no statistic is called 'rms'; did you mean"),
        ({"rank": 3}, "no rank 3; there is 0"),
    ],
)
def test_errors_name_what_exists(run_path, options, words):
    with pytest.raises(NotFound, match=re.escape(words)):
        viz.scalar_line(str(run_path), **{"tt": "Activation", **options})


def test_names_the_nearest_captured_steps(run_path):
    records = [r for r in training() if r.step % 5 == 0]
    with pytest.raises(NotFound, match="nearest captured steps are 5 and 10"):
        viz.exp_hist(records, tt="Activation", layer="embed", step=7)
    with pytest.raises(NotFound, match="nearest captured step is 10"):
        viz.exp_hist(records, tt="Activation", layer="embed", step=70)


def test_rejects_sources_without_statistics(writer):
    with pytest.raises(NotFound, match=r"nothing here has statistics: tap.track\(\) takes them"):
        viz.scalar_line(writer.path)
    with pytest.raises(TypeError, match="pass a run"):
        viz.scalar_line()
    with pytest.raises(TypeError, match="got int"):
        viz.scalar_line(3)


@pytest.mark.slow
def test_explains_how_to_get_statistics_of_caught_tensors(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORTAP_SERVER", "127.0.0.1:1")
    path = tap.init(tmp_path)
    for step in range(3):
        tap.catch(np.full(4, step, "f4"), "x")
        tap.catch(0.5 * step, "loss")
        tap.step()
    tap.finish()
    run = tap.open(path)
    for draw in (viz.scalar_line, viz.exp_hist, viz.scalar_global_heatmap):
        with pytest.raises(NotFound, match=r"run\.logframe\(\) computes them"):
            draw(run, tt="Value", layer="x")
    figure = viz.scalar_line(run.logframe(), tt="Value", layer="x", scalar_metric="max")
    assert figure.data[0].y == (0.0, 1.0, 2.0)
    numbers = viz.scalar_line(run, tt="Value", layer="loss", scalar_metric="value")
    assert numbers.data[0].y == (0.0, 0.5, 1.0)


def test_draws_tensors_of_any_rank():
    torch = pytest.importorskip("torch")
    seven = torch.arange(2**7).reshape((2,) * 7).float()
    figure = viz.tensor(seven, index=(0, 0, 0, 0, 1))
    assert np.asarray(figure.data[0].z).ravel().tolist() == [4.0, 5.0, 6.0, 7.0]
    assert "[0, 0, 0, 0, 1, :, :]" in figure.layout.title.text
    assert viz.tensor(torch.ones(3, dtype=torch.bfloat16)).data[0].y == (1.0,) * 3
    assert "no elements" in viz.tensor(torch.zeros(0, 2, 3)).layout.annotations[0].text
    assert "= 2.5" in viz.tensor(2.5, title="x").layout.annotations[0].text
    with pytest.raises(ValueError, match="index must have 5 numbers"):
        viz.tensor(seven, index=(0,))
    with pytest.raises(ValueError, match="no \\[9, 0, 0, 0, 0\\]"):
        viz.tensor(seven, index=(9, 0, 0, 0, 0))


def test_saves_html_that_loads_nothing(run_path, tmp_path):
    figure = viz.scalar_line(run_path, tt="Activation", layer=HOSTILE)
    path = viz.save(figure, tmp_path / "x.html")
    page = path.read_text()
    assert len(page) > 1_000_000  # the JavaScript of plotly is in it
    assert 'src="http' not in page
    assert "<img src=x onerror" not in page
    with pytest.raises(ValueError, match=r"saved as \.html, \.png, \.svg or \.pdf"):
        viz.save(figure, tmp_path / "x.txt")


@pytest.mark.slow
def test_saves_an_image(run_path, tmp_path):
    figure = viz.exp_hist(run_path, tt="Activation", layer=LAYERS, step=3)
    png = viz.save(figure, tmp_path / "x.png", width=600, scale=1).read_bytes()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == 600


def test_exports_documented_functions():
    assert viz.__all__ == sorted(viz.__all__)
    for name in viz.__all__:
        assert getattr(viz, name).__doc__
        assert callable(getattr(tap.viz, name))
    assert not hasattr(viz, "nothing")


def test_importing_viz_loads_neither_plotly_nor_numpy():
    code = """
import sys; sys.path.insert(0, 'src')
from tensortap import viz
print('plotly' in sys.modules, 'numpy' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
