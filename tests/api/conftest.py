"""A session of the test's own, which the verbs work on."""

from __future__ import annotations

import pytest

from tensortap.api import session as live


@pytest.fixture
def server(monkeypatch):
    server = live.start("127.0.0.1", 0, "64MB")
    monkeypatch.setattr(live, "_server", server)
    yield server
    server.close()
