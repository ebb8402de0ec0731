"""A key of the test's own."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def own_key(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    for name in list(os.environ):
        if name.startswith("TENSORTAP_"):
            monkeypatch.delenv(name)
