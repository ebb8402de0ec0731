"""Fixtures: a session that the verbs use, and runs without provenance."""

from __future__ import annotations

import importlib

import pytest

from tensortap.api import session as live


class NoProvenance:
    """Stands in for the collection of provenance, which takes a second per run."""

    def __init__(self, path, **options) -> None: ...

    def update(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(autouse=True, scope="module")
def no_provenance():
    with pytest.MonkeyPatch.context() as patch:
        collect = importlib.import_module("tensortap.rooms.provenance.keeper")
        patch.setattr(collect, "Keeper", NoProvenance)
        yield


@pytest.fixture
def server(monkeypatch):
    server = live.start("127.0.0.1", 0, "64MB")
    monkeypatch.setattr(live, "_session", live.Session(server))
    yield server
    server.close()
