"""What the tests of tracking share: a quiet session, and short ways to look at records."""

from __future__ import annotations

import os

import pytest

from tensortap.record import Kind
from tensortap.session import session


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch, tmp_path_factory):
    """No live session and no settings of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("TENSORTAP_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


@pytest.fixture
def no_errors():
    """Nothing went wrong inside tensortap, unnoticed."""
    before = session.receipt().errors
    yield
    assert session.receipt().errors == before


@pytest.fixture
def errors():
    """How many errors inside tensortap were counted since the test began."""
    before = session.receipt().errors
    return lambda: session.receipt().errors - before


@pytest.fixture
def open_run(tmp_path):
    """A run that is open while the test runs; its path."""
    import tensortap as tap

    path = tap.init(tmp_path / "runs")
    yield path
    tap.finish()


class Found:
    """Records by name and kind."""

    def __init__(self, records):
        self.all = list(records)

    def of(self, kind, name=None, step=None):
        kind = Kind(kind)
        return [
            r
            for r in self.all
            if r.kind is kind
            and (name is None or r.name == name)
            and (step is None or r.step == step)
        ]

    def one(self, kind, name, step=0):
        (found,) = self.of(kind, name, step)
        return found

    def names(self, kind, step=None):
        return [r.name for r in self.of(kind, step=step)]


@pytest.fixture
def found():
    return lambda tracker: Found(tracker.records)
