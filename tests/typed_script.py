"""A program that uses every verb, for `mypy --strict`; tests/test_typing.py checks its types."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import numpy as np
import plotly.graph_objects as go

import tensortap as tap
from tensortap.api.open import RemoteSession
from tensortap.api.run import Run
from tensortap.api.session import Session
from tensortap.capture.ledger import Receipt
from tensortap.core.record import Kind, Record
from tensortap.page.server import Page
from tensortap.rooms.align.digest import Digest
from tensortap.rooms.align.result import Alignment
from tensortap.rooms.bisect.faulty_modules import BisectReport
from tensortap.rooms.blackbox.blackbox import BlackBox
from tensortap.rooms.compare.report import CompareReport
from tensortap.rooms.compare.result import Comparison
from tensortap.rooms.ops.ops import Operations
from tensortap.rooms.trace.trace import Tracer
from tensortap.rooms.track.track import Tracker
from tensortap.rooms.watch.watcher import Watcher

x = np.ones(3)
model = object()


def train_step(batch: float) -> float:
    return batch


tap.catch(x, "x", every=10, first=3, when=lambda value: True, changed=True)
x = tap.catch_grad(x, "x.grad")
assert_type(tap.init("runs"), Path)
assert_type(tap.dump(x, "y"), Path | None)
tap.step()
tap.enable(False)
assert_type(tap.flush(1.0), bool)
assert_type(tap.receipt(), Receipt)
tap.finish()

with tap.track(model, every=10, alerts=[tap.alerts.nan()]) as tracker:
    assert_type(tracker, Tracker)
    tracker.step(loss=1.0)
    assert_type(tracker.records, list[Record])
saver = tap.HDF5("trace.h5")
with tap.trace(model, ["blocks.*.forward.x"], every=2, pre_save_callbacks=[saver]) as tracer:
    assert_type(tracer, Tracer)
assert_type(tap.watch(model, tap.Recorder("videos"), every=2), Watcher)
assert_type(tap.watcher(), Watcher)
assert_type(tap.ops(), Operations)
assert_type(tap.blackbox(train_step, model), BlackBox)
assert_type(tap.align("runs/a", "runs/b"), Alignment)
assert_type(tap.bisect(lambda: None, model, "runs/a"), BisectReport)
try:
    compared = tap.compare("runs/a", "runs/b", rtol=1e-5)
    assert_type(compared, Comparison | CompareReport)
    assert_type(tap.digest(model).record("policy", version=1), Digest)
    with tap.perturbed(model, seed=1):
        pass
    if compared:
        print("the runs agree")
except tap.TensortapError as error:
    print(error)

session = tap.serve()
assert_type(session, Session)
tap.summary()
tap.status(1.0)
tap.help()
print(tap.get("x", step=40), tap.get_all("x", kind=Kind.VALUE))
session.describe("x")
session.close()

run = tap.open(Path("runs/a"))
assert_type(run, Run)
assert_type(tap.open("runs/a"), Run)
assert_type(tap.open(), RemoteSession)
print(run.names(), run.stats(), run.alerts(), run.metrics("loss"))
assert_type(tap.view(run, browser=False), Page)
tap.viz.report(run, "report.html")
assert_type(tap.viz.scalar_global_heatmap(run, scalar_metric="rm2"), go.Figure)
assert_type(tap.viz.scalar_line(run, layer="a"), go.Figure)
assert_type(tap.viz.exp_hist(run, layer="a"), go.Figure)
assert_type(tap.viz.training(run), go.Figure)
assert_type(tap.viz.tensor(x), go.Figure)
raise tap.StopTraining("done", None)
