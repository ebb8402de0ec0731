"""A reader of a live session in another process."""

from __future__ import annotations

import contextlib
import socket

import pytest

from tensortap.api import session as live
from tensortap.core.errors import NotFound, TensortapError
from tensortap.live import keys
from tensortap.live.address import Address
from tensortap.live.reader import LiveReader, open_live
from tests.processes import in_threads, wait_for
from tests.runs.readers.contract import RECORDS, ReaderContract, record

pytestmark = pytest.mark.slow


@pytest.fixture
def server():
    server = live.start("127.0.0.1", 0, "256MB")
    server.history.write(RECORDS)
    yield server
    server.close()


class TestLiveReader(ReaderContract):
    @pytest.fixture
    def reader(self, server):
        with LiveReader(server.address) as reader:
            yield reader


def test_open_by_address(server, monkeypatch):
    with open_live(str(server.address)) as reader:
        assert reader.names()
    monkeypatch.setenv("TENSORTAP_SERVER", str(server.address))
    with open_live() as reader:
        assert reader.names()


def test_overview(server):
    with LiveReader(server.address) as reader:
        seen = reader.overview()
    assert seen.address == str(server.address)
    assert seen.written == len(RECORDS)
    assert [row.head.name for row in seen.names][:2] == ["loss", "weights"]
    assert all(row.head.value is None for row in seen.names)
    assert seen.clients == (), "viewers are not listed as clients"


def test_no_server_is_listening():
    keys.make_key()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", free.getsockname()[1])
    start = rf"on port {address.port}; start one: tap\.serve\(port={address.port}\)"
    with pytest.raises(NotFound, match=start):
        LiveReader(address, timeout=10_000)  # which it does not wait for


def test_asks_only_for_the_records_it_needs(server):
    """A long history of numbers would take seconds to transfer for every `get`."""
    server.history.write([record(n, "long", 1.0) for n in range(1000)])
    with LiveReader(server.address) as reader:
        replies = []
        query = reader.query
        reader.query = lambda *a, **k: replies.append(query(*a, **k)) or replies[-1]
        assert [r.step for r in reader.records("long", last=2)] == [998, 999]
        assert [r.step for r in reader.records("long", step=7)] == [7]
        assert all(len(reply) < 2000 for reply in replies)


@pytest.mark.parametrize(
    "wrong", [{}, {"name": 3}, {"name": "x", "last": 0}, {"name": "x", "kind": 1}]
)
def test_rejects_a_question_with_wrong_arguments(server, wrong, caplog):
    with LiveReader(server.address) as reader:
        with pytest.raises(TensortapError, match="not a valid question"):
            reader.query("heads", **wrong)
        assert reader.names()
    assert not caplog.records


def test_evicted_record_cannot_be_loaded(server):
    with LiveReader(server.address) as reader:
        (head,) = reader.records("nothing")
        gone = type(head)(*[getattr(head, f) for f in head.__struct_fields__[:4]], 999, 0, 1, 5)
        with pytest.raises(NotFound, match="it was evicted"):
            reader.load(gone)
        assert reader.load(head) == RECORDS[-1]


def test_threads_share_a_reader(server):
    wrong = []
    with LiveReader(server.address) as reader:

        def work(_):
            found = [reader.load(reader.records("large")[0]) for _ in range(5)]
            wrong.extend(one for one in found if one != RECORDS[10])

        in_threads(work, range(4))
    assert not wrong


def test_reconnects_to_a_restarted_session(server):
    with LiveReader(server.address, timeout=60.0) as reader:
        assert reader.names()
        server.close()
        with pytest.raises(TensortapError, match=r"has closed|no live session|does not answer"):
            reader.names()
        again = live.start("127.0.0.1", server.address.port, "64MB")
        again.history.write([record(0, "new", 1)])

        def connected():
            with contextlib.suppress(TensortapError):
                return reader.names() == ["new"]

        wait_for(connected)
        again.close()
