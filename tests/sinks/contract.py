"""What every sink promises to the session."""

from __future__ import annotations

import itertools
import threading

import pytest

from tensortap.pipeline.ticket import Ticket
from tensortap.record import Kind, Record

_seq = itertools.count()


def record(name="x", value=1.5, *, step=0, rank=0, kind=Kind.VALUE) -> Record:
    number = next(_seq)
    return Record(name, kind, step, 0, number, rank, 1, number, value=value)


class SinkContract:
    """Subclasses give `sink` and `arrived`; the rest is the same for all."""

    @pytest.fixture
    def sink(self):
        """A sink that accepts, with room for at least a megabyte."""
        raise NotImplementedError

    def arrived(self, sink) -> list[Record]:
        """What has come out at the other end, in order."""
        raise NotImplementedError

    def put(self, sink, one: Record, nbytes: int = 8) -> Ticket:
        assert sink.admit(nbytes)
        ticket = Ticket(1, sink.hurry)
        sink.write(one, ticket, nbytes)
        return ticket

    def test_what_is_written_arrives_once_and_in_order(self, sink):
        sent = [record("ab"[i % 2], i) for i in range(500)]
        tickets = [self.put(sink, one) for one in sent]
        assert sink.flush(10)
        assert self.arrived(sink) == sent
        assert all(ticket.done and ticket.wait(0) for ticket in tickets)

    def test_a_ticket_can_be_waited_for(self, sink):
        assert self.put(sink, record("waited")).wait(10)
        assert [r.name for r in self.arrived(sink)] == ["waited"]

    def test_many_threads_write_at_once(self, sink):
        def work(mark):
            for i in range(200):
                self.put(sink, record(f"thread {mark}", i))

        threads = [threading.Thread(target=work, args=(mark,)) for mark in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sink.flush(10)
        for mark in range(5):
            mine = [r.value for r in self.arrived(sink) if r.name == f"thread {mark}"]
            assert mine == list(range(200))

    def test_flushing_nothing_is_done_at_once(self, sink):
        assert sink.flush(0)
        assert sink.flush()

    def test_it_accepts_until_it_is_closed_and_closes_twice(self, sink):
        assert sink.accepting
        self.put(sink, record("last"))
        sink.close(5)
        assert [r.name for r in self.arrived(sink)] == ["last"]
        sink.close(1)

    def test_what_was_not_admitted_can_be_told(self, sink):
        sink.missed("x", Kind.VALUE, 3, 0)
        assert self.arrived(sink) == []
