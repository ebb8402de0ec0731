"""Records of observations: in order, and without waiting for a device."""

import numpy as np
import pytest

import tensortap as tap
from tensortap.core import rooms
from tensortap.core.record import Kind
from tensortap.rooms.track.observer import Observer, TrackOptions
from tensortap.rooms.track.observing import Observed
from tensortap.rooms.track.packed import PendingSummary

pytestmark = pytest.mark.usefixtures("no_errors")

OBSERVED = Observed("x", Kind.ACTIVATION, dtype="float64", shape=(3,))


class Device:
    """A device that computes statistics when the test says so."""

    def __init__(self):
        self.done = False
        self.resolved = 0

    def pending(self):
        return PendingSummary(lambda: self.done, self.resolve)

    def resolve(self):
        self.resolved += 1
        return tap.viz.summarize(np.arange(3.0))


@pytest.fixture
def observer():
    observer = Observer(TrackOptions())
    observer.begin()
    yield observer
    observer.end()


def test_step_does_not_wait_for_a_device(observer):
    device = Device()
    observer.add(OBSERVED, None, device.pending())
    observer.advance()
    assert device.resolved == 0
    assert observer.sent.memory.records == []
    device.done = True
    observer.advance()
    assert device.resolved == 1
    (record,) = observer.sent.memory.records
    assert (record.step, record.stats.max) == (0, 2.0)  # the step of the observation


def test_records_are_in_order_and_wait_for_devices(observer):
    slow, quick = Device(), Device()
    observer.add(OBSERVED._replace(name="slow"), None, slow.pending())
    quick.done = True
    observer.add(OBSERVED._replace(name="quick"), None, quick.pending())
    observer.settle(wait=False)
    assert observer.sent.memory.records == []  # an earlier record is pending
    records = list(observer.records)
    assert [r.name for r in records] == ["slow", "quick"]
    assert records[0].seq < records[1].seq


def test_device_that_fails_drops_one_record(observer, monkeypatch):
    faults = []
    monkeypatch.setattr(
        "tensortap.capture.pipeline.pipeline.fault", lambda *fault: faults.append(fault)
    )
    observer.add(OBSERVED, None, PendingSummary(lambda: True, lambda: 1 / 0))
    observer.add(OBSERVED._replace(name="y"), None, Device().pending())
    assert [r.name for r in observer.records] == ["y"]
    assert faults[0][0] == "x"


def test_tracking_needs_no_other_room(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(rooms, "rooms", dict)
    model = torch.nn.Linear(2, 1)
    with tap.track(model, alerts=True) as tracker:
        model(torch.ones(1, 2)).sum().backward()
        tracker.step()
    assert tracker.records
    with pytest.raises(TypeError, match="track has no option analyses; its options are alerts"):
        tap.track(model, analyses=True)
