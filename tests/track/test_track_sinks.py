"""Tracked records in a run and in memory."""

import pandas as pd
import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.core.errors import NotFound
from tensortap.core.record import Kind
from tensortap.rooms.track.memory import MemorySink

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_errors")]


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.Adam(model.parameters())


def train(steps=3, poison=None, **options):
    model, opt = model_and_optimizer()
    with tap.track(model, optimizer=opt, **options) as tracker:
        for n in range(steps):
            opt.zero_grad()
            x = torch.full((5, 4), float(n + 1))
            if n == poison:
                x[0, 0] = torch.nan
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            tracker.step(loss=loss, lr=0.001)
    return tracker


def test_run_and_tracker_have_the_same_records(open_run):
    tracker = train(tensors="^0$", alerts=True, poison=2)
    records = tracker.records
    assert len(records) == len(tracker.records)
    assert records[0].seq < records[-1].seq
    assert tracker._observer.sent.memory.records == []  # only in the run
    tap.flush()
    run = tap.open(open_run)
    assert sorted(r.seq for r in records) == [r.seq for r in records]
    pd.testing.assert_frame_equal(run.logframe(), tracker.logframe())
    pd.testing.assert_frame_equal(run.metrics(), tracker.metrics())
    assert run.alerts() == tracker.alerts != []
    assert run.metrics()["step"].tolist() == [0, 1, 2]
    assert run.get("0", step=1, kind="Activation").shape == (5, 8)
    assert run.missing() == []
    frame = run.logframe()
    assert tap.viz.validate_logframe(frame) is not None
    assert len(frame) == 4 + 3 * (4 + 4 + 4 + 4 + 12)  # 4: the initial weights


def test_a_tracker_without_a_run_keeps_the_latest_records(monkeypatch, caplog):
    monkeypatch.setattr(MemorySink.__init__, "__defaults__", (100_000, None))
    tracker = train(steps=50, tensors=True)
    records = list(tracker.records)
    everything = 4 + 50 * (4 + 4 + 4 + 4 + 12 + 2)
    assert len(records) + tracker.evicted == everything
    assert 20 < len(records) < everything / 10
    assert {r.step for r in records} >= {49}
    assert sum("evicts older ones" in r.getMessage() for r in caplog.records) == 1


def test_second_tracker_of_a_run_continues_the_steps(open_run):
    first, second = train(2), train(2)
    third = train(1, init_step=100)
    assert [sorted({r.step for r in t.records}) for t in (first, second, third)] == [
        [-1, 0, 1], [2, 3], [100],
    ]  # fmt: skip
    tap.flush()
    assert tap.open(open_run).metrics()["step"].tolist() == [0, 1, 2, 3, 100]


def test_two_trackers_at_once_have_the_same_steps():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    with tap.track(one) as a, tap.track(two, every=2) as b:
        for _ in range(4):
            two(one(torch.ones(1, 2))).sum().backward()
            a.step()
            b.step()
    assert sorted({r.step for r in a.records}) == [-1, 0, 1, 2, 3]
    assert sorted({r.step for r in b.records}) == [-1, 0, 2]


def test_tap_step_owns_the_clock_if_called_first():
    model = nn.Linear(2, 2)
    tap.step(40)
    with tap.track(model) as tracker:
        for n in range(3):
            model(torch.ones(1, 2)).sum().backward()
            tracker.step()
            tap.step(41 + n)
    assert sorted({r.step for r in tracker.records}) == [40, 41, 42]
    assert not tracker.alerts


def test_a_tracker_without_steps_beside_tap_step_says_so(caplog):
    model = nn.Linear(2, 2)
    with tap.track(model) as tracker:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            tap.step()
    assert {r.step for r in tracker.records} <= {-1, 0}
    assert "for tracker.step(): call it at the end of each step, also beside tap" in caplog.text


def test_tracker_writes_its_own_run(tmp_path):
    model = torch.nn.Linear(2, 1)
    with tap.track(model, to=tmp_path / "out") as tracker:
        model(torch.ones(1, 2)).sum().backward()
        tracker.step(loss=0.5)
        path = tracker.path
    assert path.parent == tmp_path / "out"
    run = tap.open(path)
    assert len(list(run.records())) == len(list(tracker.records)) > 3
    assert run.metrics()["loss"].tolist() == [0.5]
    with pytest.raises(NotFound, match="no run is open"):
        tap.rooms.provenance.update_metadata()  # it ended with the tracker
    tap.init(tmp_path / "runs")
    with pytest.raises(tap.TensortapError, match=r"to='x': the run .* is open"):
        tap.track(model, to="x").__enter__()
    tap.finish()
    assert tap.track(model).path is None


def test_tensor_with_stashed_statistics(open_run):
    train(1, stash=lambda t: {"l1": 2.5}, tensors="^0$")
    tap.flush()
    run = tap.open(open_run)
    from tensortap.text.records import record_details, record_line

    record = next(r for r in run.records("0") if r.kind is Kind.ACTIVATION)
    assert record_line(record).endswith("; l1=2.5")
    assert "['tensor']  [5, 8] f32" in record_details(record)
    assert run.get("0", kind="Activation").shape == (5, 8)  # the tensor itself


def test_warns_once_about_a_tracker_that_was_not_entered(caplog):
    model, opt = model_and_optimizer()
    tracker = tap.track(model, optimizer=opt)
    for _ in range(3):
        tracker.step(loss=1.0)
    (message,) = caplog.messages
    assert "has not begun: with tap.track(...) as tracker" in message
    caplog.clear()
    with tracker:
        tracker.step(loss=1.0)
    assert not caplog.messages
    ended = train(steps=1)
    ended.step(loss=1.0)
    assert "has ended" in caplog.text


def test_get_of_a_record_with_only_statistics_raises(open_run):
    train(2, tensors="^2$")
    tap.catch(None, "nothing")
    tap.flush()
    run = tap.open(open_run)
    assert run.get("nothing") is None
    assert run.get("2", kind="Activation").shape == (5, 2)
    with pytest.raises(
        tap.TensortapError, match=r"only statistics of '0' \(Activation, step 1\) were"
    ):
        run.get("0", kind="Activation")
    with pytest.raises(tap.TensortapError, match="only statistics"):
        run.get_all("0", kind="Activation")
