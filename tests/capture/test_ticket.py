"""Tickets: waiting for a record to arrive."""

from __future__ import annotations

import threading

from tensortap.capture import ticket as tickets
from tensortap.capture.ticket import SKIPPED, Ticket, settle


def entry(ticket):
    return (None, ticket, 0)


def test_a_skipped_value_never_arrives():
    assert SKIPPED.done
    assert SKIPPED.wait(0) is False
    assert SKIPPED.wait(None) is False


def test_arrives_when_every_sink_has_the_record():
    ticket = Ticket(2)
    assert not ticket.done
    settle([entry(ticket)], True)
    assert not ticket.done
    assert ticket.wait(0) is False
    settle([entry(ticket)], True)
    assert ticket.done
    assert ticket.wait(0) is True


def test_fails_if_one_sink_drops_the_record():
    for fates in ((True, False), (False, True), (False, False)):
        ticket = Ticket(2)
        for fate in fates:
            settle([entry(ticket)], fate)
        assert ticket.done
        assert ticket.wait(0) is False


def test_wait_hurries_the_sink():
    hurried = []
    ticket = Ticket(1, lambda: hurried.append(1))
    ticket.wait(0.01)
    assert hurried == [1]
    settle([entry(ticket)], True)
    ticket.wait(0.01)
    assert hurried == [1]


def test_wakes_all_waiting_threads():
    for _ in range(20):
        waited = [Ticket(1) for _ in range(8)]
        found = []
        threads = [
            threading.Thread(target=lambda t=t, found=found: found.append(t.wait(60)))
            for t in waited
        ]
        for thread in threads:
            thread.start()
        settle([entry(t) for t in waited[:4]], True)
        settle([entry(t) for t in waited[4:]], False)
        for thread in threads:
            thread.join()
        assert sorted(found) == [False] * 4 + [True] * 4
    assert tickets._settled.waiting == 0
