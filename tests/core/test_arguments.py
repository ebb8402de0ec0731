"""Arguments are checked at the call, and errors name the argument and what was given."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tensortap as tap
from tensortap import alerts
from tensortap.api import session
from tensortap.core.arguments import parse_steps
from tensortap.rooms import figures as viz


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A model, the run of its training, and a live session with one value."""
    folder = tmp_path_factory.mktemp("given")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        patch.setenv("TENSORTAP_MODIFICATIONS", "0")
        model = torch.nn.Sequential(torch.nn.Linear(4, 3))
        path = tap.init(folder)
        with tap.track(model, tensors=True) as tracker:
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
                tracker.step(loss=1.0)
        tap.finish()
        server = session.start("127.0.0.1", 0, "32MB")
        patch.setattr(session, "_session", session.Session(server))
        server.history.write(list(tap.open(path).records("loss")))
        yield SimpleNamespace(model=model, run=tap.open(path), folder=folder)
        server.close()


# what is called, with which arguments, and what it says
CALLS = [
    # the live session
    (lambda g: tap.get(0), "name must be a string, got 0"),
    (lambda g: tap.get("loss", "last"), "index must be a whole number, got 'last'"),
    (lambda g: tap.get("loss", step=1.5), "step must be a whole number, got 1.5"),
    (lambda g: tap.get_all("loss", rank="all"), "rank must be a whole number, got 'all'"),
    (lambda g: tap.status("long"), "seconds must be a number, got 'long'"),
    (lambda g: tap.status(-1), "seconds must be at least 0 seconds, got -1"),
    (lambda g: tap.serve(host=3), "host must be a string, got 3"),
    (lambda g: session.start(port=[1]), "port must be a whole number, got [1]"),
    (lambda g: session.start(port=-1), "port must be a number from 0 to 65535, got -1"),
    (lambda g: session.start(memory="much"), "memory must look like '8GB', '512MB' or '50%', got"),
    (lambda g: tap.open(3), "where must be a string or a path, got 3"),
    (lambda g: tap.flush("soon"), "timeout must be a number, got 'soon'"),
    # runs
    (lambda g: list(g.run.records(3)), "name must be a string, got 3"),
    (lambda g: g.run.get("0", rank=[0]), "rank must be a whole number or a string, got [0]"),
    (lambda g: g.run.film("0", 3), "target must be a string or a path, got 3"),
    (lambda g: g.run.film("0", "f.gif", steps=3), "steps must be a pair of whole numbers, got 3"),
    (lambda g: list(g.run.follow("x")), "timeout must be a number, got 'x'"),
    (lambda g: g.run.logframe(3), "exponents must be a pair of whole numbers, got 3"),
    (lambda g: g.run.formats(["float16"]), "dtype must be a string, got ['float16']"),
    (lambda g: tap.init(None), "to must be a string or a path, got None"),
    (lambda g: tap.HDF5(None), "path must be a string or a path, got None"),
    (lambda g: tap.viz.read_logframe(3), "path must be a string or a path, got 3"),
    (
        lambda g: tap.rooms.dump.register_format(int, 3, print, print),
        "suffix must be a string, got 3",
    ),
    # comparing
    (lambda g: tap.compare(1.0, 2.0, atol="x"), "atol must be a number, got 'x'"),
    (lambda g: tap.compare(g.run, g.run, kinds="Weight"), "kinds must be a list of strings, got"),
    (lambda g: tap.compare(g.run, g.run, ranks=0), "ranks must be a list of whole numbers, got 0"),
    # sources
    (lambda g: tap.track(g.model, every=-1), "every must be at least 0, got -1"),
    (lambda g: tap.track(g.model, init_step=-1), "init_step must be at least 0, got -1"),
    (lambda g: tap.track(g.model, stash=3), "stash must be a function, got 3"),
    (lambda g: tap.track(module=g.model), "no option module; instead of module, pass the model"),
    (lambda g: tap.track(g.model, stash_value=len, use_wandb=True), "instead of stash_value, use"),
    (lambda g: tap.track(g.model, alerts=3), "alerts must be a function or a list of them, got 3"),
    (lambda g: tap.track(g.model, alerts=True, on_alert=3), "on_alert must be a function or a"),
    (lambda g: tap.trace(g.model, 3), "paths must be a path like 'forward.x' or several, got 3"),
    (lambda g: tap.trace(g.model, "x", post_trace_callbacks=3), "post_trace_callbacks must be"),
    (lambda g: tap.watch([], print), "targets must not be empty"),
    (lambda g: tap.watch(g.model, print, rank=[]), "rank must not be empty"),
    (lambda g: tap.watch(g.model, print, rate=0), "rate must be greater than 0, got 0"),
    (lambda g: tap.watcher(), "no watcher is running: call tap.watch(...) first"),
    (lambda g: tap.Recorder(None), "folder must be a string or a path, got None"),
    (lambda g: tap.Recorder(legend_color=3), "legend_color: a color is three numbers"),
    (lambda g: alerts.exploding(factor=0), "factor must be greater than 0, got 0"),
    (lambda g: alerts.vanishing(floor="x"), "floor must be a number, got 'x'"),
    (lambda g: alerts.constant(kinds=3), "kinds must be a list of Kinds, got 3"),
    # figures and pages
    (lambda g: viz.scalar_line(g.run, layer=3), "layer must be a string, a compiled pattern or a"),
    (lambda g: viz.scalar_line(g.run, layer=[]), "layer must not be empty: leave it out for all"),
    (lambda g: viz.scalar_line(g.run, col_wrap=0), "col_wrap must be at least 1, got 0"),
    (lambda g: viz.scalar_line(g.run, panels="x"), "panels must be 'metric' or 'name', got 'x'"),
    (lambda g: viz.scalar_line(["x"]), "expected records, got 'x'"),
    (lambda g: viz.scalar_global_heatmap(g.run, inc=0), "inc must be at least 1, got 0"),
    (
        lambda g: viz.scalar_global_heatmap(g.run, scalar_metric=3),
        "scalar_metric must be a string, got 3",
    ),
    (lambda g: viz.interactive(viz.exp_hist, g.run, tt=[3]), "tt must be a string or a list of"),
    (lambda g: viz.exp_hist(g.run, dtype_annotation=3), "dtype_annotation must be True or"),
    (lambda g: viz.training(g.run, theme="x"), "theme must be 'light' or 'dark', got 'x'"),
    (lambda g: viz.tensor(np.ones((2, 2)), index=0), "index must be a list of whole numbers"),
    (lambda g: viz.save(3, "a.html"), "figure must be a plotly figure, got 3"),
    (lambda g: viz.save(viz.training(g.run), None), "path must be a string or a path, got None"),
    (lambda g: viz.report(g.run, ""), "path must not be empty"),
    (lambda g: tap.view(3, browser=False), "run must be a run, a folder of runs or a live session"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_error_names_the_argument(call, message, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError, tap.TensortapError), match=re.escape(message)):
        call(given)
    assert list(tmp_path.iterdir()) == []  # before anything starts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": 3}, "name must be a string, got 3"),
        ({"name": ["x"]}, "name must be a string, got ['x']"),
        ({"name": ""}, "name must not be empty"),
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"every": -1}, "every must be at least 1, got -1"),
        ({"every": 1.5}, "every must be a whole number, got 1.5"),
        ({"first": "x"}, "first must be a whole number, got 'x'"),
        ({"server": 3}, "server must be 'host' or 'host:port', got 3"),
        ({"shard": 3}, "shard must be a Shard, got 3"),
    ],
)
def test_catch_raises_only_if_it_may(options, message, open_run, monkeypatch, caplog, errors):
    del open_run  # the value has somewhere to go
    named = {"name": f"the value of {message}", **options}
    for _ in range(2):
        tap.catch(1.0, **named)
    assert [message in record.getMessage() for record in caplog.records] == [True]  # logged once
    assert errors() == 2
    monkeypatch.setattr(tap.capture.pipeline.pipeline, "strict", True)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        tap.catch(1.0, **named)


def test_step_that_is_no_number_does_not_stop_training(caplog, errors):
    tap.step(7)
    assert tap.step("next") == 7
    assert errors() == 1
    assert "number must be a whole number, got 'next'" in caplog.text


def test_numbers_of_frameworks_are_numbers(given):
    assert given.run.get("loss", step=np.int64(1), rank=torch.tensor(0)) == 1.0
    assert viz.scalar_global_heatmap(given.run, inc=np.int32(2), rank=np.int8(0)) is not None


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (None, None), ("", None), ("10:20", (10, 20)), ("10:", (10, None)), (":20", (None, 20)),
        (":", (None, None)), ("-3", (-3, -3)),
    ],
)  # fmt: skip
def test_parses_steps(text, steps):
    assert parse_steps(text) == steps


@pytest.mark.parametrize(
    ("text", "message"),
    [("ten", "steps must be like 10:20, got 'ten'"), ("5:2", "the first is after the last")],
)
def test_rejects_malformed_steps(text, message):
    with pytest.raises(tap.TensortapError, match=message):
        parse_steps(text)
