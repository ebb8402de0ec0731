"""Spectra come from a process of their own, later than the step that they are about."""

import os
import resource
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tap
from tensortap.record import Kind
from tensortap.sources.analyses.spectra import SpectraWorker
from tensortap.stats.spectra import spectrum
from tests.processes import gone, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_errors")]


def workers():
    """The processes that this one has started and that still run, as far as they are ours."""
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                with open(f"/proc/{pid}/cmdline") as file:
                    command = file.read()
                with open(f"/proc/{pid}/stat") as file:
                    parent = int(file.read().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == os.getpid() and "spectra_worker" in command:
                found.append(int(pid))
    return found


def train(dtype=torch.float32, steps=2, between=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    with tap.track(model, optimizer, every=steps, analyses=["spectra"]) as tracker:
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 6, dtype=dtype)).square().mean().backward()
            old = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
            optimizer.step()
            new = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
            states.append((old, new))
            tracker.step()
            if between is not None:
                between(step)
    return tracker, states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spectra_of_weights_and_updates(dtype):
    tracker, states = train(dtype)
    records = [r for r in tracker.records if r.kind is Kind.HEALTH]
    assert {r.step for r in records} == {0}
    found = {r.name: r.value for r in records}
    assert len(found) == 12
    for name in ("0.weight", "2.weight"):
        old, new = (state[name] for state in states[0])
        for prefix, matrix in (("", new), ("update_", new - old)):
            figures = spectrum(np.ascontiguousarray(matrix))
            for quantity, number in zip(
                ("spectral_norm", "stable_rank", "effective_rank"), figures, strict=False
            ):
                assert found[f"{name}.{prefix}{quantity}"] == pytest.approx(number, rel=1e-12)
    assert workers() == []


def test_a_worker_that_dies_does_not_stop_the_training():
    killed = []

    def kill(step):
        if not step:
            wait_for(workers)
            killed.extend(workers())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: all(map(gone, killed)))

    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer, analyses=["spectra"]) as tracker:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            tracker.step()
            kill(step)
    assert killed
    assert "died" in tracker.unseen["spectra"]
    assert workers() == []


def test_a_step_that_comes_too_early_is_left_out(monkeypatch):
    sent = []
    monkeypatch.setattr(
        "tensortap.sources.analyses.spectra.SpectraWorker.compute",
        lambda self, matrices: (self.idle.clear(), sent.append(list(matrices))),
    )
    monkeypatch.setattr("tensortap.sources.analyses.spectra.PATIENCE", 0.0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer, analyses=["spectra"]) as tracker:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            tracker.step()
    assert sent == [["weight"]]
    assert "had not finished" in tracker.unseen["spectra"]


def test_the_end_of_training_does_not_wait_for_a_full_pipe(monkeypatch):
    monkeypatch.setattr("tensortap.sources.analyses.spectra.PATIENCE", 0.0)
    model = nn.Linear(1024, 1024, bias=False)  # larger than the pipe
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.track(model, optimizer, analyses=["spectra"]) as tracker:
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        tracker.step()
    assert "had not finished" in tracker.unseen["spectra"]
    assert workers() == []
    assert not [each for each in threading.enumerate() if "spectra" in each.name]


def test_the_last_results_do_not_yield_to_other_programs():
    """Training has ended; whatever else keeps the processors busy would keep the worker waiting."""
    worker = SpectraWorker()
    wait_for(workers)  # the system knows the command of a new process a little later
    (pid,) = workers()
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE
    assert worker.finish(0)
    limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    may_raise = os.geteuid() == 0 or not 0 <= limit < 20
    assert os.sched_getscheduler(pid) == (os.sched_getscheduler(0) if may_raise else os.SCHED_IDLE)
    worker.close()
