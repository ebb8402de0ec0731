"""`tensortap replay` on a run whose program was killed, with real processes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensortap as tap
from tests.commands import type_in

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KILLED, ASKED = 33, 27
PROGRAM = f"""
import os, signal
from pathlib import Path
import torch
from torch import nn
import tensortap as tap
from tensortap.sources.init import opened

with open("started", "a") as log:
    log.write("once\\n")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
number = -1

def train_step(x, y):
    optimizer.zero_grad()
    hidden = model[1](model[0](x))
    error = model(x) - y
    loss = error.square().mean()
    loss.backward()
    optimizer.step()
    if number == {ASKED}:
        torch.save([error.detach(), model[0].weight.grad], "expected.pt")
    if number == {KILLED}:
        opened().box.flush(60)
        os.kill(os.getpid(), signal.SIGKILL)
    return loss.detach()

tap.init("runs", blackbox=True)
if "TENSORTAP_REPLAY" not in os.environ:
    tap.update_metadata()  # a killed program may not have written the state of git yet
step = tap.blackbox(train_step, model, optimizer, every=10)
for number in range(100):
    x = torch.randn(16, 8)
    step(x, x.sum(1, keepdim=True))
Path("ended").touch()
"""


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a program and its run, which was killed in the middle of a step."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(PROGRAM)
    (folder / ".gitignore").write_text("runs\nstarted\nexpected.pt\nagain\nreplays\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "train"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environment(), timeout=100, check=False
    )
    assert done.returncode == -9
    return folder


def starts(project):
    return (project / "started").read_text().count("once")


@pytest.fixture
def run(project):
    (path,) = (project / "runs").iterdir()
    return path


@pytest.mark.fault("kill -9 with a black box")
def test_a_killed_run_is_replayed(project, run):
    assert tap.open(run).replayable() == [(0, KILLED)]  # and the step in which it died
    probes = ["--probe", "train_step.error", "--probe", "0.weight:gradient", "--probe", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "tensortap", "replay", run, "--step", str(ASKED), *probes, "--yes",
         "--json"],
        cwd=project, env=environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "train.py" in done.stderr  # what is executed
    answer = json.loads(done.stdout)
    assert answer["same"]
    assert (answer["snapshot"], answer["replayed"]) == (20, ASKED - 20 + 2)
    assert "this is the same step: 9 results have the digests stored in the run" in answer["text"]
    assert not (project / "ended").exists()
    assert len(list((project / "runs").iterdir())) == 1  # no run of the replay beside it
    found = tap.open(answer["run"])
    expected = torch.load(project / "expected.pt")
    for name, value in zip(("train_step.error", "0.weight:gradient"), expected, strict=True):
        assert torch.equal(found.get(name, step=ASKED), value)
    assert found.get("2", step=ASKED).shape == (16, 64)


def test_unknown_paths_and_changed_programs(project, run):
    code, _, said = type_in("replay", run, "--step", 30, "--probe", "nothing.x", "--yes",
                            cwd=project, **environment())  # fmt: skip
    assert code == 2
    assert "no value of 'nothing.x' in step 30" in said
    source = (project / "train.py").read_text()
    (project / "train.py").write_text(source.replace(".square()", ".abs()"))
    code, _, said = type_in("replay", run, "--step", 22, "--probe", "2", "--yes", cwd=project,
                            **environment())  # fmt: skip
    (project / "train.py").write_text(source)
    assert code == 1
    assert "this is not the same step: the digest of the result of step 20 is the first" in said


def test_code_of_another_folder_is_run(project, run):
    """The program has changed since; what `tensortap reproduce` restores has not."""
    source = (project / "train.py").read_text()
    (project / "train.py").write_text(source.replace(".square()", ".abs()"))
    code, _, said = type_in("reproduce", run, "--out", "again", cwd=project, **environment())
    assert code == 0, said
    asked = ["replay", run, "--step", 22, "--probe", "2", "--yes"]
    code, _, said = type_in(*asked, "--code", "again", cwd=project, **environment())
    (project / "train.py").write_text(source)
    assert code == 0, said
    assert "this is the same step" in said
    assert (project / "again/project/started").is_file()
    code, _, said = type_in(*asked, "--code", "replays", cwd=project)
    assert code == 2
    assert "replays has no run.sh: make it with `tensortap reproduce" in said


@pytest.mark.attack("program of a hostile run")
def test_nothing_is_started_without_consent(project, run, monkeypatch):
    before = starts(project)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    code, _, said = type_in("replay", run, "--step", 22, "--probe", "2", cwd=project)
    assert code == 1
    assert "this will be executed" in said
    assert "aborted" in said
    code, _, said = type_in("replay", run, "--step", 99, "--probe", "2", "--yes", cwd=project)
    assert code == 2
    assert f"can replay steps 0 to {KILLED}" in said
    assert starts(project) == before


def test_a_program_without_the_step_is_told(project, run):
    source = (project / "train.py").read_text()
    (project / "train.py").write_text("raise SystemExit(7)")
    code, _, said = type_in("replay", run, "--step", 22, "--probe", "2", "--yes", cwd=project)
    (project / "train.py").write_text(source)
    assert code == 2
    assert "ended with status 7 before it called the step of its black box" in said
