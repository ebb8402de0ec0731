"""Tensors that are summarized or recorded together, against one by one."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap import values as frameworks
from tensortap.capture.pipeline import pipeline
from tensortap.core.record import Kind
from tensortap.rooms.track import batches, observer
from tensortap.rooms.track.batches import ColumnMaker
from tensortap.rooms.track.torch.descriptions import Descriptions
from tensortap.rooms.track.torch.gradients import OutputGradients
from tensortap.rooms.track.torch.outputs import OutputHooks
from tensortap.runs.run_reader import RunReader

pytestmark = pytest.mark.usefixtures("no_errors")

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool,
]  # fmt: skip


class Mixed(nn.Module):
    """Parameters of every dtype, strided, empty, tied and frozen ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 6)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.fc.weight
        self.strided = nn.Parameter(torch.randn(6, 4).t())
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.broken = nn.Parameter(torch.tensor([torch.nan, torch.inf, 0.0, 1e-40]))
        for i, dtype in enumerate(DTYPES):
            value = (torch.randn(9) * 3).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(value, requires_grad=False))
        self.conjugate = nn.Parameter(torch.randn(3, dtype=torch.complex64).conj(), False)
        self.wide = nn.Parameter(torch.randn(5).expand(3, 5), requires_grad=False)

    def forward(self, x):
        return (self.fc(x) + self.tied(x)) @ self.strided.t() * self.scalar


def train(change=lambda model, step: None, optimizer=torch.optim.AdamW, **options):
    model = Mixed()
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = optimizer(trained)
    with tap.track(model, optimizer=opt, **options) as tracker:
        for step in range(3):
            opt.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(5, 4)).square().mean().backward()
            opt.step()
            change(model, step)
            tracker.step()
    return tracker, model


def contents(tracker):
    """Return the records in order, without time and origin in the sequence of all."""
    records = tracker.records
    assert [r.seq for r in records] == sorted({r.seq for r in records})
    return [msgspec.msgpack.encode(msgspec.structs.replace(r, seq=0, time_ns=0)) for r in records]


def replace_parameters(model, step):
    """Replace, resize, reshape, restride and convert parameters between steps."""
    with torch.no_grad():
        if step == 0:
            model.wide.data = torch.ones(2)
            model.strided.data = model.strided.data.clone()
            model.p0.data = model.p0.data.view(3, 3)  # the same memory, another shape
            model.p1.data = model.p1.data[:4]
        elif step == 1:
            model.p0.data = model.p0.data.double()
            model.p1 = nn.Parameter(torch.ones(2, 2), requires_grad=False)
            model.p3.data.mul_(2)  # no version counter sees this
            model.empty.data = torch.ones(2, 3)
            del model.p4


def one_by_one(monkeypatch):
    """Have every tensor summarized by the general way."""
    monkeypatch.setattr(batches, "summarize_tensors", lambda tensors: None)
    monkeypatch.setattr(frameworks, "memory_of", lambda value: None)


@pytest.mark.parametrize("change", [lambda model, step: None, replace_parameters])
@pytest.mark.parametrize("sink", ["memory", "run"])
def test_together_equals_one_by_one(change, sink, tmp_path, monkeypatch):
    def tracked():
        to = tmp_path if sink == "run" else None
        return contents(train(change, to=to)[0])

    together = tracked()
    one_by_one(monkeypatch)
    assert together == tracked()


@pytest.mark.parametrize(
    "options",
    [{"alerts": True}, {"stash": lambda x: {"n": x.numel()}}, {"tensors": "fc"},
     {"digests": True, "tensors": True}, {"name": "a", "every": 2}, {"include": "fc|p1"}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_see_the_same(options, monkeypatch):
    together = train(**options)[0]
    alerts = [str(alert) for alert in together.alerts]
    together = contents(together)
    one_by_one(monkeypatch)
    alone = train(**options)[0]
    assert [str(alert) for alert in alone.alerts] == alerts
    assert contents(alone) == together


def test_a_run_gets_columns_and_the_statistics_of_the_last_step_are_exact(open_run, monkeypatch):
    put, columns = pipeline.put_columns, []
    monkeypatch.setattr(pipeline, "put_columns", lambda c: columns.append(c) or put(c))
    tap.catch(0.0, "connects")  # until then there may be a live session
    assert tap.flush(60)
    before = tap.receipt().tracked
    tracker, model = train()
    per_step = len([c for c in columns if c.step == 2])
    assert per_step
    assert columns[-1].heads is columns[-1 - per_step].heads  # encoded once
    weights = {r.name: r.stats for r in tracker.records if r.kind is Kind.WEIGHT and r.step == 2}
    expected = {k: tap.viz.summarize(p) for k, p in model.named_parameters()}
    assert {k: msgspec.msgpack.encode(s) for k, s in weights.items()} == {
        k: msgspec.msgpack.encode(s) for k, s in expected.items()
    }
    assert tap.receipt().tracked - before == len(tracker.records)


def test_writes_that_no_version_counter_sees_are_recorded():
    layer = nn.Linear(3, 2).requires_grad_(False)
    with tap.track(layer) as tracker:
        for factor in (2, 3, 1):
            version, expected = layer.weight._version, tap.viz.summarize(factor * layer.weight)
            layer.weight.data.mul_(factor)
            assert layer.weight._version == version
            tracker.step()
            last = [r for r in tracker.records if r.name == "weight"][-1]
            assert last.stats == expected


# -- outputs and their gradients ---------------------------------------------------------


class Outputs(nn.Module):
    """Outputs of every sort: strided, several, repeated, in place, checkpointed, of 16 bits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.same = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.GELU()))
        self.turned, self.several, self.none = Turned(), Several(), nn.Identity()
        self.overwritten = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))
        self.again, self.brain = nn.Linear(6, 6), nn.Linear(6, 6)
        self.long = nn.Embedding(40, 1000)

    def forward(self, x):
        x = self.turned(self.same(self.first(self.first(x))))
        x = self.overwritten(sum(self.several(x)["parts"]))
        for reentrant in (True, False):
            x = torch.utils.checkpoint.checkpoint(self.again, x, use_reentrant=reentrant)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.brain(x)
        with torch.no_grad():
            self.none(x)
        return x.float().mean() + self.long(torch.arange(40)).square().mean()


class Turned(nn.Module):
    def forward(self, x):
        return x.t()


class Several(nn.Module):
    def forward(self, x):
        return {"parts": (x, 2 * x), "text": "a"}


def train_outputs(in_step=lambda: None, steps=3, **options):
    model = Outputs()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer=opt, **options) as tracker:
        for _ in range(steps):
            opt.zero_grad()
            loss = model(torch.randn(6, 6, requires_grad=True))
            in_step()
            loss.backward(retain_graph=True)
            loss.backward()
            opt.step()
            tracker.step(loss=loss)
    return tracker


@pytest.mark.parametrize("sink", ["memory", "run"])
def test_outputs_of_a_step_equal_those_that_are_recorded_one_by_one(sink, tmp_path, monkeypatch):
    to = tmp_path if sink == "run" else None
    together = train_outputs(to=to)
    assert together._observer.batch is not None
    monkeypatch.setattr(observer, "ObservedBatch", lambda *args: None)
    alone = train_outputs(to=to)
    assert alone._observer.batch is None
    assert contents(together) == contents(alone)
    kinds = {record.kind for record in together.records}
    assert {Kind.ACTIVATION, Kind.GRADIENT} < kinds
    times = [record.time_ns for record in together.records if record.step >= 0]
    assert times == sorted(times)
    assert len(set(times[:5])) == 5  # when each was observed


def test_python_sees_only_what_is_not_ordinary(monkeypatch):
    seen = []

    def count(cls, name):
        def call(self, *args):
            seen.append(args[0])
            return real(self, *args)

        real = getattr(cls, name)
        monkeypatch.setattr(cls, name, call)

    count(OutputHooks, "_observe")
    count(OutputGradients, "_look")
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh()), Several())
    with tap.track(model) as tracker:
        for _ in range(3):
            del seen[:]
            model(torch.randn(2, 3, requires_grad=True))["parts"][1].sum().backward()
            tracker.step()
    # the first of a step, outputs that are no tensor, the model itself, and their gradients
    names = [place if isinstance(place, str) else place.name for place in seen]
    parts = "2[parts][0]", "2[parts][1]", "Sequential[parts][0]", "Sequential[parts][1]"
    assert names[:3] == ["0", "2", "Sequential"]
    assert sorted(names[3:]) == sorted(["0", *parts])


class Hooked(nn.Module):
    """Returns the output of its child, with another hook on it."""

    def __init__(self, hook):
        super().__init__()
        self.inner, self.hook = nn.Identity(), hook

    def forward(self, x):
        y = self.inner(x * 1)
        y.register_hook(self.hook)
        return y


@pytest.mark.parametrize("factor", [1, 2])
def test_a_gradient_that_changes_between_two_hooks_is_read_again(factor):
    def change(gradient):
        if factor > 1:
            gradient.mul_(factor)

    model = nn.Sequential(Hooked(change))
    with tap.track(model) as tracker:
        for _ in range(2):
            model(torch.ones(2, 3, requires_grad=True)).mul(3).sum().backward()
            tracker.step()
    gradients = [r for r in tracker.records if r.kind is Kind.GRADIENT and r.step == 1]
    found = {r.name: r.stats.max for r in gradients}
    assert found == {"0.inner": 3, "0": 3 * factor, "Sequential": 3 * factor}


def test_a_flush_within_a_step_hands_over_what_was_observed(open_run):
    seen = []

    def look():
        assert tap.flush(60)
        seen.extend(RunReader(open_run).new_records())

    train_outputs(look, steps=1)
    assert {"first", "again", "Outputs"} <= {record.name for record in seen}
    assert {record.kind for record in seen if record.step == 0} == {Kind.ACTIVATION}


def test_records_that_another_thread_asks_for_are_complete(open_run):
    done = threading.Event()

    def ask():
        while not done.is_set():
            pipeline.settle()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        disturbed = train_outputs(steps=5)
    finally:
        done.set()
        thread.join()
    expected = [(r.name, r.kind, r.step, r.call) for r in train_outputs(steps=5).records]
    steps = {step: step - expected[0][2] for *_, step, _ in expected}
    # a second tracker of a run has no initial weights
    found = [(r.name, r.kind, r.step, r.call) for r in disturbed.records if r.step >= 0]
    assert found == [(name, kind, steps[step], call) for name, kind, step, call in expected]


class TestErrors:
    @pytest.fixture(autouse=True)
    def no_errors(self):
        """These tests expect errors."""

    def test_records_that_cannot_be_handed_over_count_as_dropped(self, monkeypatch, errors):
        tracker = train_outputs(steps=1)
        lost = [r for r in tracker.records if r.kind in (Kind.ACTIVATION, Kind.GRADIENT)]

        def columns(*args):
            if len(args) == 5:  # of a batch
                raise RuntimeError("no memory")
            return real(*args)

        real = ColumnMaker.columns
        monkeypatch.setattr(ColumnMaker, "columns", columns)
        tracker = train_outputs(steps=1)
        assert {r.kind for r in tracker.records} == {Kind.METRIC, Kind.WEIGHT, Kind.WEIGHT_GRADIENT}
        assert errors() == len(lost)

    @pytest.mark.parametrize("kind", [Kind.ACTIVATION, Kind.GRADIENT])
    def test_an_error_in_a_hook_costs_its_records(self, kind, monkeypatch, errors):
        def of(self, name, asked, *args):
            if asked is kind and name == "first" and fails:
                raise RuntimeError("no description")
            return real(self, name, asked, *args)

        def names():
            tracker = train_outputs()
            assert tracker.unseen.get("first") == (
                "RuntimeError: no description" if fails else None
            )
            told = [r for r in tracker.records if r.kind is not Kind.ALERT]  # that it was not seen
            return [(r.name, r.kind, r.step, r.call) for r in told]

        fails, real = False, Descriptions.of
        monkeypatch.setattr(Descriptions, "of", of)
        expected = names()
        fails = True
        # without its output, the gradient of a call is not observed either
        lost = {("first", kind), ("first", Kind.GRADIENT)}
        assert names() == [place for place in expected if place[:2] not in lost]
        assert errors() == sum(place[:2] == ("first", kind) for place in expected) > 0
