"""A session of the test's own, with a key of its own."""

from __future__ import annotations

import pytest

from tensortap.api import session as live
from tests.server.clients import Good


@pytest.fixture
def server():
    server = live.start("127.0.0.1", 0, "64MB")
    yield server
    server.close()


@pytest.fixture
def bystander(server):
    """A client that is connected all along: after the test it must not have noticed anything."""
    good = Good(server.address)
    assert good.deliver("bystander")
    yield good
    client = server.clients[good.sink.id]
    connection = client.connection
    assert good.deliver("bystander")
    assert not any(good.ledger.reasons().values())
    assert client.connection is connection, "it had to connect again"
    assert server.alive
    good.close()
