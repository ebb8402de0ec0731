"""What every sink promises behind its queue."""

from __future__ import annotations

import itertools

import pytest

from tensortap.capture.queue import write_to
from tensortap.core.record import Kind, Record
from tests.processes import in_threads

_seq = itertools.count()


def record(name="x", value=1.5, *, step=0, rank=0, kind=Kind.VALUE) -> Record:
    number = next(_seq)
    return Record(name, kind, step, 0, number, rank, 1, number, value=value)


def put(queue, one: Record, nbytes: int = 0):
    """Queue a record as the pipeline does; return its ticket, or None if there is no room."""
    if not queue.admit(nbytes, one.name, one.kind, one.step, one.rank):
        return None
    return write_to([queue], one, nbytes)


class SinkContract:
    """Subclasses provide `queue` and `arrived`; the tests are the same for every sink."""

    @pytest.fixture
    def queue(self):
        """A queue in front of the sink, with a budget of at least a megabyte."""
        raise NotImplementedError

    def arrived(self, queue) -> list[Record]:
        """Return what has arrived at the other end, in order."""
        raise NotImplementedError

    def test_every_record_arrives_once_and_in_order(self, queue):
        sent = [record("ab"[i % 2], i) for i in range(500)]
        tickets = [put(queue, one, 8) for one in sent]
        assert queue.flush(60)
        assert self.arrived(queue) == sent
        assert all(ticket.done and ticket.wait(0) for ticket in tickets)
        assert not any(queue.ledger.reasons().values())

    def test_waiting_for_a_ticket_sends_its_record(self, queue):
        assert put(queue, record("waited")).wait(60)
        assert [r.name for r in self.arrived(queue)] == ["waited"]

    def test_many_threads_write_at_once(self, queue):
        def work(thread):
            for i in range(200):
                put(queue, record(f"thread {thread}", i))

        in_threads(work, range(5))
        assert queue.flush(60)
        arrived = self.arrived(queue)
        for thread in range(5):
            mine = [r.value for r in arrived if r.name == f"thread {thread}"]
            assert mine == list(range(200))

    def test_flushing_an_empty_queue_returns_at_once(self, queue):
        assert queue.flush(0)
        assert queue.flush()

    def test_accepts_until_it_is_closed_and_can_be_closed_twice(self, queue):
        assert queue.accepting
        put(queue, record("last"))
        queue.close(60)
        assert not queue.accepting
        assert [r.name for r in self.arrived(queue)] == ["last"]
        queue.close(1)

    def test_takes_note_of_dropped_values(self, queue):
        queue.sink.note_dropped("x", Kind.VALUE, 3, 0)
        assert self.arrived(queue) == []
