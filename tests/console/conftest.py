"""A session of the test's own, which the verbs work on."""

from __future__ import annotations

import os

import pytest

from tensortap.console import live


@pytest.fixture(autouse=True)
def own_key(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    for name in list(os.environ):
        if name.startswith("TENSORTAP_"):
            monkeypatch.delenv(name)


@pytest.fixture
def server(monkeypatch):
    server = live.start("127.0.0.1", 0, "64MB")
    monkeypatch.setattr(live, "_server", server)
    yield server
    server.close()
