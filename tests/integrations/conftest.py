"""Every test has its own key and no live session; the first training of the process is done."""

from __future__ import annotations

import pytest
import torch

import tensortap as tap


@pytest.fixture(autouse=True)
def alone(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.setenv("TENSORTAP_SERVER", "127.0.0.1:1")
    yield
    tap.finish()


@pytest.fixture(scope="session", autouse=True)
def warm():
    """The first backward pass of a process may choose other threads than the later ones."""
    model = torch.nn.Linear(8, 8)
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
