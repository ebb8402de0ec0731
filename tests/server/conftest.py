"""A session of the test's own, with a key of its own."""

from __future__ import annotations

import os

import pytest

from tensortap.console import live
from tests.server.clients import Good


@pytest.fixture(autouse=True)
def own_key(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    for name in list(os.environ):
        if name.startswith("TENSORTAP_"):
            monkeypatch.delenv(name)


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
    peer = next(peer for peer in server.peers.values() if peer.who.host == "here")
    route = peer.route
    assert good.deliver("bystander")
    assert good.lost == 0
    assert peer.route == route, "it had to connect again"
    assert server.alive
    good.close()
