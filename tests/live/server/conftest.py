"""Fixtures: a server with its own key, and a client that must not be disturbed."""

from __future__ import annotations

import pytest

from tensortap.api import session as live
from tests.live.server.clients import RealClient


@pytest.fixture(autouse=True)
def small_arenas(monkeypatch, isolated_settings):
    monkeypatch.setenv("TENSORTAP_ARENA", "1MB")  # each of many clients prepares its own


@pytest.fixture
def server():
    server = live.start("127.0.0.1", 0, "64MB")
    yield server
    server.close()


@pytest.fixture
def bystander(server):
    """A client that stays connected; the test must not disturb it."""
    real = RealClient(server.address)
    assert real.deliver("bystander")
    yield real
    client = server.clients[real.sink.id]
    connection = client.connection
    assert real.deliver("bystander")
    assert not any(real.ledger.reasons().values())
    assert client.connection is connection, "it had to reconnect"
    assert server.alive
    real.close()
