"""The queue behind every sink that is slow: its budget, its policies, and that nothing vanishes."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.history import OVERHEAD
from tensortap.pipeline.queue import Background
from tensortap.pipeline.ticket import Ticket, settle
from tensortap.record import Kind
from tests.sinks.contract import SinkContract, record


class Drain:
    """Somewhere for records to go that a test can shut and open."""

    def __init__(self, is_open=True):
        self.accepting = True
        self.sent = []
        self.batches = []
        self.missing = []
        self.flights = []
        self.pending = 0
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
            self.flights.extend(entries)
            self.pending += sum(nbytes for _, _, nbytes in entries)

    def land(self, arrived=True):
        """The fate of all that is under way becomes known."""
        flights, self.flights, self.pending = self.flights, [], 0
        settle(flights, arrived)

    def wait(self, wake, timeout):
        wake.wait(min(timeout, 0.01))

    def hurry(self):
        pass

    def missed(self, name, kind, step, rank):
        self.missing.append((name, kind, step, rank))

    def give_up(self):
        lost, self.flights, self.pending = self.flights, [], 0
        return lost

    def close(self):
        self.closed = True


@pytest.fixture
def make():
    made = []

    def background(is_open=True, budget=1 << 30, overflow="latest"):
        sink = Background(Drain(is_open), budget=budget, overflow=overflow, name="test")
        made.append(sink)
        return sink

    yield background
    for sink in made:
        sink.drain.is_open = True
        sink.close(2)
        assert not sink._thread.is_alive()


def put(sink, one, nbytes=0):
    """As the session does it: room first. None where there is none."""
    if not sink.admit(nbytes):
        return None
    ticket = Ticket(1, sink.hurry)
    sink.write(one, ticket, nbytes)
    return ticket


def names(sink):
    return [(r.name, r.value) for r, _, _ in sink.drain.sent]


class TestBackground(SinkContract):
    @pytest.fixture
    def sink(self, make):
        return make()

    def arrived(self, sink):
        return [r for r, _, _ in sink.drain.sent]


def test_an_unknown_policy():
    with pytest.raises(ValueError, match="overflow is one of latest, newest, block, not 'all'"):
        Background(Drain(), budget=1, overflow="all", name="test")


def test_small_records_are_handed_on_together(make):
    sink = make()
    for i in range(2000):
        put(sink, record("x", i))
    assert sink.flush(10)
    assert len(sink.drain.batches) < 200


def test_over_budget_the_latest_of_each_name_stays(make):
    sink = make(is_open=False, budget=10 * (100 + OVERHEAD))
    tickets = [put(sink, record("abc"[i % 3], i), 100) for i in range(30)]
    assert all(tickets)
    assert sink.dropped == sink.replaced > 0
    sink.drain.is_open = True
    assert sink.flush(10)
    arrived = names(sink)
    assert [value for _, value in arrived] == sorted(value for _, value in arrived)
    assert {("a", 27), ("b", 28), ("c", 29)} <= set(arrived)
    assert len(arrived) + sink.dropped == 30
    assert [t.wait(0) for t in tickets] == [("abc"[i % 3], i) in arrived for i in range(30)]


def test_ranks_and_kinds_do_not_replace_each_other(make):
    sink = make(is_open=False, budget=3 * OVERHEAD)
    put(sink, record("x", 0, rank=0))
    put(sink, record("x", 1, rank=1))
    put(sink, record("x", 2, kind=Kind.GRADIENT))
    assert put(sink, record("x", 3, rank=0)) is None, "all three are the latest of something"
    assert (sink.replaced, sink.turned_away) == (0, 1)


def test_the_newest_is_turned_away(make):
    sink = make(is_open=False, budget=3 * OVERHEAD, overflow="newest")
    tickets = [put(sink, record("x", i)) for i in range(5)]
    assert [t is not None for t in tickets] == [True, True, True, False, False]
    assert (sink.replaced, sink.turned_away) == (0, 2)
    sink.drain.is_open = True
    assert sink.flush(10)
    assert [value for _, value in names(sink)] == [0, 1, 2]


def test_block_waits_for_room_and_loses_nothing(make):
    sink = make(is_open=False, budget=3 * OVERHEAD, overflow="block")
    done = []

    def work():
        done.extend([put(sink, record("x", i)) for i in range(50)])

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    assert len(sink._queue) == 3
    sink.drain.is_open = True
    thread.join(10)
    assert sink.flush(10)
    assert [value for _, value in names(sink)] == list(range(50))
    assert all(done)
    assert sink.dropped == 0


def test_block_does_not_wait_for_a_drain_that_wants_nothing(make):
    sink = make(is_open=False, budget=OVERHEAD, overflow="block")
    put(sink, record())
    threading.Timer(0.1, lambda: setattr(sink.drain, "accepting", False)).start()
    began = time.monotonic()
    assert put(sink, record()) is None
    assert time.monotonic() - began < 3
    assert sink.turned_away == 1


@pytest.mark.parametrize("overflow", ["latest", "newest", "block"])
def test_a_value_larger_than_the_budget_goes_when_nothing_else_is_queued(make, overflow):
    sink = make(is_open=False, budget=1000, overflow=overflow)
    large = put(sink, record("large", 1), 1_000_000)
    assert large is not None
    if overflow != "block":
        assert put(sink, record("other", 2), 10) is None
    sink.drain.is_open = True
    assert large.wait(10)


def test_what_is_under_way_is_part_of_the_budget(make):
    sink = make(budget=4 * OVERHEAD, overflow="newest")
    sink.drain.settles = False
    for _ in range(4):
        put(sink, record())
    deadline = time.monotonic() + 5
    while len(sink.drain.flights) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert sink.drain.pending == 4 * OVERHEAD
    sink.drain.is_open = False
    assert put(sink, record()) is not None  # the queue itself is empty
    assert put(sink, record()) is None
    sink.drain.land()
    assert put(sink, record()) is not None


def test_flush_waits_for_the_fate_and_gives_up_in_time(make):
    sink = make()
    sink.drain.settles = False
    ticket = put(sink, record())
    began = time.monotonic()
    assert not sink.flush(0.2)
    assert 0.15 < time.monotonic() - began < 3
    threading.Timer(0.1, sink.drain.land).start()
    assert sink.flush(10)
    assert ticket.wait(0)


def test_flush_returns_at_once_for_what_is_queued_behind_it(make):
    """Nobody waits for a pause: a flush of one record is quick."""
    sink = make()
    times = []
    for _ in range(20):
        put(sink, record())
        began = time.monotonic()
        assert sink.flush(10)
        times.append(time.monotonic() - began)
    assert sorted(times)[10] < 0.1


def test_forget_says_how_many_were_lost_and_settles_them(make):
    sink = make()
    sink.drain.settles = False
    flying = put(sink, record())
    deadline = time.monotonic() + 5
    while not sink.drain.flights and time.monotonic() < deadline:
        time.sleep(0.005)
    sink.drain.is_open = False
    queued = [put(sink, record()) for _ in range(5)]
    assert len(sink.forget()) == 6
    assert [t.wait(0) for t in (flying, *queued)] == [False] * 6
    assert all(t.done for t in (flying, *queued))
    assert sink.flush(1)
    assert sink.admit(1 << 40), "all room is free again"


def test_an_error_in_the_drain_does_not_end_the_thread(make, caplog):
    caplog.set_level(logging.ERROR, "tensortap")
    sink = make()
    sink.drain.error = RuntimeError("broken")
    put(sink, record("lost"))
    deadline = time.monotonic() + 5
    while "broken" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "met an error and goes on" in caplog.text
    assert put(sink, record("next")).wait(10)


def test_closing_sends_what_is_queued_and_closes_the_drain(make):
    sink = make()
    tickets = [put(sink, record("x", i)) for i in range(100)]
    sink.close(5)
    assert all(t.wait(0) for t in tickets)
    assert sink.drain.closed
    assert not sink.accepting


def test_closing_does_not_wait_for_ever(make):
    sink = make(is_open=False)
    put(sink, record())
    began = time.monotonic()
    sink.close(0.3)
    assert time.monotonic() - began < 3
    assert sink.drain.closed


actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(0, 2000)),
        st.just(("open",)),
        st.just(("shut",)),
        st.just(("land",)),
        st.just(("lose",)),
        st.just(("forget",)),
        st.just(("fly",)),
    ),
    max_size=60,
)


@given(actions, st.sampled_from(["latest", "newest"]), st.integers(600, 8000))
@settings(max_examples=60)
def test_no_record_is_lost_without_being_counted(actions, overflow, budget):
    sink = Background(Drain(), budget=budget, overflow=overflow, name="test")
    drain = sink.drain
    taken, forgotten, refused = [], 0, 0
    try:
        for action, *arguments in actions:
            match action:
                case "put":
                    name, nbytes = arguments
                    ticket = put(sink, record(name, len(taken)), nbytes)
                    if ticket is None:
                        refused += 1
                    else:
                        taken.append(ticket)
                case "open" | "shut":
                    drain.is_open = action == "open"
                case "fly":
                    drain.settles = not drain.settles
                case "land":
                    drain.land()
                case "lose":
                    drain.land(arrived=False)
                case "forget":
                    forgotten += len(sink.forget())
        drain.is_open = True
        drain.settles = True
        deadline = time.monotonic() + 10
        while not sink.flush(0.02):
            drain.land()
            assert time.monotonic() < deadline
        assert sink.turned_away == refused
        assert all(ticket.done for ticket in taken)
        # each that was taken went to the drain, was replaced by a newer one, or was forgotten
        seen = {id(ticket) for _, ticket, _ in drain.sent}
        gone = [ticket for ticket in taken if id(ticket) not in seen]
        assert len(drain.sent) == len(seen)
        assert not any(ticket.wait(0) for ticket in gone)
        in_flight_forgotten = forgotten - (len(gone) - sink.replaced)
        assert in_flight_forgotten >= 0
        assert sink.meter.put == sink.meter.got
    finally:
        sink.close(1)


def test_with_many_threads_and_a_small_budget_it_adds_up(make):
    sink = make(budget=20 * OVERHEAD)
    taken = []

    def work(mark):
        for i in range(1000):
            ticket = put(sink, record(f"{mark} {i % 3}", i))
            if ticket is not None:
                taken.append(ticket)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sink.flush(10)
    assert len(taken) + sink.turned_away == 6000
    assert len(sink.drain.sent) + sink.replaced == len(taken)
    assert sum(ticket.wait(0) for ticket in taken) == len(sink.drain.sent)
    assert sink.meter.put == sink.meter.got


def test_what_an_error_in_the_drain_loses_is_counted_and_settled(make):
    sink = make()
    sink.drain.error = RuntimeError("broken")
    ticket = put(sink, record("lost"))
    assert ticket.wait(5) is False
    assert ticket.done
    assert sink.lost == 1
    assert put(sink, record("next")).wait(5)
    assert sink.lost == 1


def test_what_is_left_at_the_end_is_counted_and_settled(make):
    sink = make()
    sink.drain.is_open = False
    tickets = [put(sink, record()) for _ in range(3)]
    sink.close(0.1)
    assert all(ticket.done and not ticket.wait(0) for ticket in tickets)
    assert sink.lost == 3
