"""Isolated settings, warm backward passes, and one tracked run."""

from __future__ import annotations

import pytest
import torch

import tensortap as tap


@pytest.fixture(autouse=True)
def alone(monkeypatch, isolated_settings):
    monkeypatch.setenv("TENSORTAP_SERVER", "127.0.0.1:1")
    monkeypatch.setenv("TENSORTAP_MODIFICATIONS", "0")  # a search of all modules takes seconds
    yield
    tap.finish()


@pytest.fixture(scope="session", autouse=True)
def warm():
    """Run a backward pass: the first one of a process may use other threads than later ones."""
    model = torch.nn.Linear(8, 8)
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()


@pytest.fixture(scope="session")
def tracked(tmp_path_factory):
    """Return the run of a small training, with a caught tensor and a caught number."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORTAP_MODIFICATIONS", "0")
        path = tap.init(tmp_path_factory.mktemp("runs"))
    with tap.track(model, optimizer, stash=lambda tensor: {"numel": tensor.numel()}) as tracker:
        for step in range(4):
            for _ in range(1 + (step == 2)):  # at step 2 every module is called twice
                loss = model(torch.randn(5, 4)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tap.catch(torch.tensor([1.0, float("nan"), 0.0]), "caught")
            tap.catch(step / 2, "half")
            tracker.step(loss=loss)
    tap.finish()
    return tap.open(path)
