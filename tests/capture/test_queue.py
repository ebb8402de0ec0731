"""The queue: its budget, its overflow policies, and that no record vanishes uncounted."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.capture.ledger import Ledger
from tensortap.capture.queue import Queue
from tensortap.capture.sink import Sink
from tensortap.capture.ticket import settle
from tensortap.core.history import OVERHEAD
from tensortap.core.record import Kind
from tests.capture.sink_contract import SinkContract, put, record
from tests.processes import in_threads, wait_for


class Gate(Sink):
    """A sink that a test can open and shut."""

    accepting = True
    unreachable = False
    pending = 0

    def __init__(self, is_open=True):
        self.ledger = Ledger()
        self.sent = []
        self.batches = []
        self.dropped = []
        self.in_flight = []
        self.closed = False
        self.error = None
        self.settles = True
        self.is_open = is_open

    def room(self):
        return 1 << 40 if self.is_open else 0

    def send(self, entries):
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.batches.append(len(entries))
        self.sent.extend(entries)
        if self.settles:
            settle(entries, True)
        else:
            self.in_flight.extend(entries)
            self.pending += sum(nbytes for _, _, nbytes in entries)

    def land(self, arrived=True):
        """Settle everything in flight."""
        entries, self.in_flight, self.pending = self.in_flight, [], 0
        settle(entries, arrived)

    def wait(self, wake, timeout):
        wake.wait(min(timeout, 0.01))

    def note_dropped(self, name, kind, step, rank):
        self.dropped.append((name, kind, step, rank))

    def give_up(self):
        lost, self.in_flight, self.pending = self.in_flight, [], 0
        return lost

    def close(self):
        self.closed = True


@pytest.fixture
def make():
    made = []

    def make(is_open=True, budget=1 << 30, overflow="latest"):
        made.append(Queue(Gate(is_open), budget=budget, overflow=overflow, name="test"))
        return made[-1]

    yield make
    for queue in made:
        queue.sink.is_open = queue.sink.settles = True  # else it would wait for what is pending
        queue.sink.land()
        queue.close(60)
        assert not queue._thread.is_alive()


@pytest.fixture
def endless_pauses(monkeypatch):
    """Let the thread of a queue pause until somebody wakes it."""
    for name in ("PAUSE", "LONG_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(f"tensortap.capture.queue.{name}", 3600.0)


def dropped(queue, reason="over budget"):
    return queue.ledger.reasons()[reason]


def values(queue):
    return [r.value for r, _, _ in queue.sink.sent]


class TestContract(SinkContract):
    @pytest.fixture
    def queue(self, make):
        return make()

    def arrived(self, queue):
        return [r for r, _, _ in queue.sink.sent]


def test_rejects_an_unknown_policy():
    with pytest.raises(ValueError, match="one of latest, newest, block, got 'all'"):
        Queue(Gate(), budget=1, overflow="all", name="test")


def test_hands_small_records_over_together(make, endless_pauses):
    queue = make()
    for i in range(2000):
        put(queue, record("x", i))
    assert queue.flush(60)
    assert len(queue.sink.batches) < 5


def test_latest_keeps_the_latest_of_each_name(make):
    queue = make(is_open=False, budget=10 * (100 + OVERHEAD))
    tickets = [put(queue, record("abc"[i % 3], i), 100) for i in range(30)]
    assert all(tickets)
    assert dropped(queue) > 0
    queue.sink.is_open = True
    assert queue.flush(60)
    arrived = values(queue)
    assert arrived == sorted(arrived)
    assert {27, 28, 29} <= set(arrived)
    assert len(arrived) + dropped(queue) == 30
    assert [t.wait(0) for t in tickets] == [i in arrived for i in range(30)]


def test_latest_distinguishes_ranks_and_kinds(make):
    queue = make(is_open=False, budget=3 * OVERHEAD)
    put(queue, record("x", 0, rank=0))
    put(queue, record("x", 1, rank=1))
    put(queue, record("x", 2, kind=Kind.GRADIENT))
    assert put(queue, record("y", 3, step=8)) is None
    assert dropped(queue) == 1
    assert queue.sink.dropped == [("y", Kind.VALUE, 8, 0)]


def test_latest_replaces_the_only_record_of_a_name(make):
    queue = make(is_open=False, budget=2 * OVERHEAD)
    tickets = [put(queue, record(name, i)) for i, name in enumerate("abb")]
    assert all(tickets)
    assert [ticket.done for ticket in tickets] == [False, True, False]


def test_newest_drops_the_value_that_found_no_room(make):
    queue = make(is_open=False, budget=3 * OVERHEAD, overflow="newest")
    tickets = [put(queue, record("x", i)) for i in range(5)]
    assert [t is not None for t in tickets] == [True, True, True, False, False]
    assert dropped(queue) == 2
    queue.sink.is_open = True
    assert queue.flush(60)
    assert values(queue) == [0, 1, 2]


def test_block_waits_for_room_and_drops_nothing(make):
    queue = make(is_open=False, budget=3 * OVERHEAD, overflow="block")
    done = []

    def work():
        done.extend([put(queue, record("x", i)) for i in range(50)])

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(lambda: queue._progress.waiting)
    assert queue.waiting == 3
    queue.sink.is_open = True
    thread.join(60)
    assert queue.flush(60)
    assert values(queue) == list(range(50))
    assert all(done)
    assert dropped(queue) == 0


def test_block_does_not_wait_for_a_sink_that_wants_nothing(make):
    queue = make(is_open=False, budget=OVERHEAD, overflow="block")
    put(queue, record())
    threading.Timer(0.1, lambda: setattr(queue.sink, "accepting", False)).start()
    assert put(queue, record()) is None
    assert dropped(queue) == 1


@pytest.mark.parametrize("overflow", ["latest", "newest", "block"])
def test_admits_a_value_larger_than_the_budget_while_nothing_else_is_queued(make, overflow):
    queue = make(is_open=False, budget=1000, overflow=overflow)
    large = put(queue, record("large", 1), 1_000_000)
    assert large is not None
    if overflow != "block":
        assert put(queue, record("other", 2), 10) is None
    queue.sink.is_open = True
    assert large.wait(60)


@pytest.mark.slow
def test_unsettled_records_count_towards_the_budget(make):
    queue = make(budget=4 * OVERHEAD, overflow="newest")
    queue.sink.settles = False
    for _ in range(4):
        put(queue, record())
    wait_for(lambda: len(queue.sink.in_flight) == 4)
    assert queue.sink.pending == 4 * OVERHEAD
    queue.sink.is_open = False
    assert put(queue, record()) is not None  # the queue itself is empty
    assert put(queue, record()) is None
    queue.sink.land()
    assert put(queue, record()) is not None


def test_flush_waits_until_records_are_settled_or_time_is_up(make):
    queue = make()
    queue.sink.settles = False
    ticket = put(queue, record())
    began = time.monotonic()
    assert not queue.flush(0.2)
    assert time.monotonic() - began > 0.19
    threading.Timer(0.1, queue.sink.land).start()
    assert queue.flush(60)
    assert ticket.wait(0)


def test_flush_does_not_pause(make, endless_pauses):
    queue = make()
    for _ in range(20):
        put(queue, record())
        assert queue.flush(60)


@pytest.mark.slow
def test_drop_all_settles_and_counts_what_waits_or_flies(make):
    queue = make()
    queue.sink.settles = False
    flying = put(queue, record())
    wait_for(lambda: queue.sink.in_flight)
    queue.sink.is_open = False
    queued = [put(queue, record()) for _ in range(5)]
    queue.drop_all()
    assert dropped(queue, "disconnected") == 6
    assert [t.wait(0) for t in (flying, *queued)] == [False] * 6
    assert all(t.done for t in (flying, *queued))
    assert queue.flush(60)
    assert put(queue, record(), 1 << 40), "all room is free again"


def test_an_unreachable_sink_drops_what_waits_and_reports_the_change(make):
    changes = []
    queue = make(is_open=False)
    queue.on_change = lambda: changes.append(queue.accepting)
    ticket = put(queue, record())
    queue.sink.accepting, queue.sink.unreachable = False, True
    wait_for(lambda: ticket.done)
    assert dropped(queue, "disconnected") == 1
    wait_for(lambda: changes == [False])
    queue.sink.accepting, queue.sink.unreachable = True, False
    wait_for(lambda: changes == [False, True])


def test_an_error_in_the_sink_is_counted_and_does_not_end_the_thread(make, caplog):
    caplog.set_level(logging.ERROR, "tensortap")
    queue = make()
    queue.sink.error = RuntimeError("broken")
    ticket = put(queue, record("lost"))
    assert ticket.wait(60) is False
    assert ticket.done
    assert put(queue, record("next")).wait(60)
    assert dropped(queue, "error") == 1
    assert "error in a background thread, which continues" in caplog.text
    assert "broken" in caplog.text


def test_close_gives_up_after_its_timeout_and_counts_what_is_left(make):
    queue = make(is_open=False)
    tickets = [put(queue, record()) for _ in range(3)]
    began = time.monotonic()
    queue.close(0.3)
    assert time.monotonic() - began > 0.29
    assert queue.sink.closed
    assert all(ticket.done and not ticket.wait(0) for ticket in tickets)
    assert dropped(queue, "disconnected") == 3


actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(0, 2000)),
        st.sampled_from([("open",), ("shut",), ("land",), ("lose",), ("drop",), ("fly",)]),
    ),
    max_size=60,
)


@given(actions, st.sampled_from(["latest", "newest"]), st.integers(600, 8000))
@settings(max_examples=60)
def test_every_record_arrives_or_is_counted_as_dropped(actions, overflow, budget):
    queue = Queue(Gate(), budget=budget, overflow=overflow, name="test")
    sink = queue.sink
    taken, rejected = [], 0
    try:
        for action, *arguments in actions:
            match action:
                case "put":
                    name, nbytes = arguments
                    ticket = put(queue, record(name, len(taken)), nbytes)
                    if ticket is None:
                        rejected += 1
                    else:
                        taken.append(ticket)
                case "open" | "shut":
                    sink.is_open = action == "open"
                case "fly":
                    sink.settles = not sink.settles
                case "land":
                    sink.land()
                case "lose":
                    sink.land(arrived=False)
                case "drop":
                    queue.drop_all()
        sink.is_open = True
        sink.settles = True
        wait_for(lambda: queue.flush(0.02) or sink.land())
        assert len(sink.dropped) == rejected
        assert all(ticket.done for ticket in taken)
        # each record was sent, replaced by a newer one, or dropped with everything else
        sent = {id(ticket) for _, ticket, _ in sink.sent}
        unsent = [ticket for ticket in taken if id(ticket) not in sent]
        assert len(sink.sent) == len(sent)
        assert not any(ticket.wait(0) for ticket in unsent)
        replaced = dropped(queue) - rejected
        assert dropped(queue, "disconnected") >= len(unsent) - replaced >= 0
        assert queue.state.put == queue.state.got
    finally:
        queue.close(60)


def test_counts_add_up_with_many_threads_and_a_small_budget(make):
    queue = make(budget=20 * OVERHEAD)
    taken = []

    def work(thread):
        for i in range(1000):
            ticket = put(queue, record(f"{thread} {i % 3}", i))
            if ticket is not None:
                taken.append(ticket)

    in_threads(work, range(6))
    assert queue.flush(60)
    assert len(taken) + len(queue.sink.dropped) == 6000
    assert len(queue.sink.sent) + dropped(queue) == 6000
    assert sum(ticket.wait(0) for ticket in taken) == len(queue.sink.sent)
    assert queue.state.put == queue.state.got


def test_a_patient_sink_is_woken_by_values_only(make):
    queue = make(budget=OVERHEAD * 1600 - 1)
    queue.sink.patience = 3600.0
    queue.sink.wait = lambda wake, timeout: wake.wait(timeout)
    put(queue, record("first"), 8)
    wait_for(lambda: queue.state.asleep)
    for number in range(90):  # statistics and numbers about steps
        put(queue, record("loss", number))
    time.sleep(0.05)
    assert len(queue.sink.sent) == 1
    put(queue, record("value"), 8)
    wait_for(lambda: len(queue.sink.sent) == 92)
    assert put(queue, record("loss")).wait(60)
    for number in range(100):  # a sixteenth of the budget
        put(queue, record("loss", number))
    wait_for(lambda: len(queue.sink.sent) == 193)
