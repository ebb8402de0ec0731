"""The ledger adds up, also between threads, and knows why values were dropped."""

from __future__ import annotations

import pytest

from tensortap.capture.fast import QueueState
from tensortap.capture.ledger import BUSY, DISCONNECTED, ERROR, OVER_BUDGET, TOO_LARGE, Ledger
from tensortap.capture.ticket import Ticket
from tensortap.core.history import OVERHEAD
from tests.capture.sink_contract import record
from tests.processes import in_threads


def entry(nbytes=8, **fields):
    return record(), Ticket(1, **fields), nbytes + OVERHEAD


def test_adds_up_what_many_threads_report():
    ledger = Ledger()

    def work(_):
        for _ in range(6000):
            ledger.capture(1000, 1, 2, 3)
            ledger.capture_small(8, 4)
            ledger.track(5)

    in_threads(work, range(4))
    receipt = ledger.receipt(50_000, 0)
    assert (receipt.captured, receipt.tracked, receipt.skipped) == (48_000, 24_000, 2000)
    assert receipt.bytes == 24_000 * 1008
    activities = {name: round(seconds * 1e9) for name, seconds in receipt.activities.items()}
    del activities["skipping"]
    assert activities == {
        "select": 24_000, "queue": 48_000, "copy": 72_000, "small values": 96_000,
        "connecting": 0, "tracking": 120_000,
    }  # fmt: skip
    assert receipt.seconds > 336_000 / 1e9


def test_every_call_is_captured_skipped_or_dropped():
    ledger = Ledger()
    calls = 0
    for report, count in (
        (lambda: ledger.capture(100, 0, 0, 0), 5),
        (ledger.count_unheard, 4),
        (lambda: ledger.drop_values(ERROR, calls=1), 3),
        (lambda: ledger.charge("select", 10), 2),
    ):
        for _ in range(count):
            calls += 1
            report()
    ledger.drop([entry(100)], OVER_BUDGET)
    receipt = ledger.receipt(calls + 7, 1)
    assert (receipt.captured, receipt.skipped, receipt.dropped) == (4, 9, 8)
    assert receipt.reasons == {OVER_BUDGET: 1, DISCONNECTED: 4, ERROR: 3, TOO_LARGE: 0, BUSY: 0}
    assert receipt.bytes == 400


def test_values_that_no_counter_counted_are_not_skipped_calls():
    ledger = Ledger()
    ledger.capture_small(8, 1, calls=0)
    ledger.drop_values(ERROR)
    receipt = ledger.receipt(0, 0)
    assert (receipt.captured, receipt.skipped, receipt.dropped) == (1, 0, 1)


@pytest.mark.parametrize("reason", [OVER_BUDGET, DISCONNECTED, ERROR, TOO_LARGE])
def test_dropped_records_are_settled_and_no_longer_captured(reason):
    ledger = Ledger()
    ledger.capture_small(8, 1)
    dropped = entry()
    ledger.drop([dropped], reason)
    receipt = ledger.receipt(1, 0)
    assert (receipt.captured, receipt.bytes, receipt.dropped) == (0, 0, 1)
    assert dropped[1].done
    assert not dropped[1].wait(0)


def test_dropping_a_tracked_record_changes_no_captured_count():
    ledger = Ledger()
    ledger.capture_small(8, 1)
    ledger.drop([entry(captured=False)], OVER_BUDGET)
    receipt = ledger.receipt(1, 0)
    assert (receipt.captured, receipt.dropped) == (1, 1)


def test_a_record_that_another_sink_has_arrives_without_a_connection():
    ledger = Ledger()
    ledger.capture_small(8, 1)
    shared = entry(sinks=2)
    ledger.drop([shared], DISCONNECTED)
    assert shared[1].wait(0)
    assert ledger.receipt(1, 0).dropped == 0
    ledger.drop([entry(sinks=2)], OVER_BUDGET)
    receipt = ledger.receipt(1, 0)
    assert (receipt.captured, receipt.dropped) == (1, 1)


@pytest.mark.parametrize("reasons", [(DISCONNECTED, ERROR), (ERROR, DISCONNECTED)])
def test_a_record_that_two_sinks_lose_is_dropped_once(reasons):
    ledger = Ledger()
    ledger.capture_small(8, 1)
    one = entry(sinks=2)
    for reason in reasons:
        ledger.drop([one], reason)
    receipt = ledger.receipt(1, 0)
    assert (receipt.captured, receipt.dropped, receipt.reasons[ERROR]) == (0, 1, 1)
    assert receipt.bytes == 0


def test_keeps_the_counts_of_a_closed_queue():
    ledger, state = Ledger(), QueueState()
    ledger.add_queue(state)
    state.captured, state.nbytes, state.spent_ns = 3, 24, 5000
    before = ledger.receipt(3, 0)
    ledger.remove_queue(state)
    ledger.remove_queue(state)
    state.captured = 100
    after = ledger.receipt(3, 0)
    assert (before.captured, before.bytes, before.skipped) == (3, 24, 0)
    assert (after.captured, after.bytes, after.skipped) == (3, 24, 0)
    assert after.activities["small values"] == before.activities["small values"] == 5e-6
