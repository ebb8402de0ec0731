"""Programs in processes of their own, steered from a session."""

from __future__ import annotations

import pytest

from tensortap.api import session as live


@pytest.fixture
def session():
    """A live session in this process, on a port of its own."""
    server = live.start("127.0.0.1", 0, "256MB")
    yield live.Session(server)
    server.close()
