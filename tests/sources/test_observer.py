"""Observations become records: in order, and without waiting for a device."""

import numpy as np
import pytest

import tensortap as tap
from tensortap.frameworks.observing import Observed
from tensortap.frameworks.protocol import PendingSummary
from tensortap.record import Kind
from tensortap.sources.observer import Observer, TrackOptions

pytestmark = pytest.mark.usefixtures("no_errors")

SEEN = Observed("x", Kind.ACTIVATION, dtype="float64", shape=(3,))


class Device:
    """Statistics that come when the test says so."""

    def __init__(self):
        self.done = False
        self.resolved = 0

    def later(self):
        return PendingSummary(lambda: self.done, self.resolve)

    def resolve(self):
        self.resolved += 1
        return tap.summarize(np.arange(3.0))


@pytest.fixture
def observer():
    observer = Observer(TrackOptions())
    observer.begin()
    yield observer
    observer.end()


def test_a_step_does_not_wait_for_a_device(observer):
    device = Device()
    observer.add(SEEN, None, device.later())
    observer.advance()
    assert device.resolved == 0
    assert observer._memory.records == []
    device.done = True
    observer.advance()
    assert device.resolved == 1
    (record,) = observer._memory.records
    assert (record.step, record.stats.max) == (0, 2.0)  # of the step at which it was seen


def test_records_come_in_order_and_asking_for_them_waits(observer):
    slow, quick = Device(), Device()
    observer.add(SEEN._replace(name="slow"), None, slow.later())
    quick.done = True
    observer.add(SEEN._replace(name="quick"), None, quick.later())
    observer.poll()
    assert observer._memory.records == []  # not before what came before it
    records = list(observer.records)
    assert [r.name for r in records] == ["slow", "quick"]
    assert records[0].seq < records[1].seq


def test_what_devices_work_on_at_the_end_is_not_lost():
    observer = Observer(TrackOptions())
    observer.begin()
    observer.add(SEEN, None, Device().later())
    observer.end()
    assert len(list(observer.records)) == 1


def test_a_device_that_failed_costs_one_record(observer, monkeypatch):
    faults = []
    monkeypatch.setattr(
        "tensortap.pipeline.pipeline.pipeline.fault", lambda *fault: faults.append(fault)
    )
    observer.add(SEEN, None, PendingSummary(lambda: True, lambda: 1 / 0))
    observer.add(SEEN._replace(name="y"), None, Device().later())
    assert [r.name for r in observer.records] == ["y"]
    assert faults[0][0] == "x"


def test_what_was_observed_is_billed(observer):
    before = tap.receipt()
    observer.observe(SEEN, np.ones(3))
    after = tap.receipt()
    assert after.tracked == before.tracked + 1
    assert after.activities["tracking"] > before.activities["tracking"]
