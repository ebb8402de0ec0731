"""`tensortap bisect`: a program of two ranks is judged, and ends after the step."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from tests.bisect.test_bisect import ROOT, program, record
from tests.commands import type_in

_TRAIN = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "src")!r}]
from tests.bisect.test_bisect import program, tap

other = os.fork()
rank = 0 if other else 1
os.environ.update(RANK=str(rank), WORLD_SIZE="2")
model, optimizer, step = program(["activation", "optimizer"] + ["eps"] * rank)
with tap.track(model, optimizer=optimizer) as tracker:
    for number in range(10):
        print("step", number)
        try:
            step()
            tracker.step()
        finally:
            if other and number == 1:
                assert os.waitpid(other, 0)[1] == 0
"""


@pytest.mark.slow
def test_faults_of_all_ranks(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads of two processes would take turns
    run = record(tmp_path, steps=2)
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(_TRAIN))
    command = ["--", sys.executable, file]
    code, out, _ = type_in("bisect", run, "--step", 1, "--json", *command)
    assert code == 1
    found = json.loads(out)
    assert (found["of"], found["step"]) == ("bisect", 1)
    ranks = {each["module"]: each["ranks"] for each in found["faults"]}
    assert ranks == {"blocks.1.mlp.1": [0, 1], "(optimizer)": [0, 1], "blocks.0.norm1": [1]}
    printed = capfd.readouterr().err
    assert "step 1" in printed
    assert "step 2" not in printed


def test_misuse(tmp_path):
    run = record(tmp_path, made=program())
    code, _, err = type_in("bisect", run, "--", "true")
    assert code == 2
    assert "the program ended with 0 before step 0: it has to track its model" in err
    code, _, err = type_in("bisect", run, "--", "no such program")
    assert code == 2
    assert "cannot start no such program: No such file" in err
    code, _, err = type_in("bisect", run, "--step", 5, "--", "true")
    assert code == 2
    assert "no step 5; the nearest captured step is 0" in err
    assert type_in("bisect", tmp_path / "nothing", "--", "true")[0] == 2
