"""Every command that prints an answer prints it as JSON, with the fields that its help names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import typer

import tensortap as tap
from tensortap.alerts.alert import Alert, record_of
from tensortap.capture.pipeline import pipeline
from tensortap.cli import main as command_line
from tensortap.cli import serve, view
from tensortap.core.record import Kind
from tests.commands import type_in

COMMANDS = typer.main.get_command(command_line.app).commands
# what they type beside --json, and how they may end; tests/bisect types bisect, which runs programs
LINES = {
    "align": ("{run} {run}", 0),
    "check": ("{run}", 1), "compact": ("{run}", 0), "compare": ("{run} {run}", 0),
    "doctor": ("127.0.0.1:1", 0), "film": ("{run} w {new}.gif --size 160x120", 0),
    "ls": ("{folder}", 0), "ranks": ("{run}", 0), "report": ("{run} {new}.html", 0),
    "reproduce": ("{run} --out {new}", 0), "serve": ("--port 0", 0), "show": ("{run}", 0),
    "view": ("{run} --no-browser --port 0", 0), "why": ("{run}", 0),
}  # fmt: skip
# those that print no answer, and those with tests of their own
OTHERS = {"bisect", "demo", "mcp", "probe", "probes", "resume-check", "run", "top"}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Return a run with tensors, a NaN, an alert and a verdict."""
    folder = tmp_path_factory.mktemp("json")
    run = tap.init(folder / "runs")
    model = torch.nn.Linear(2, 2)
    with tap.track(model, alerts=True) as tracker:
        for step in range(3):
            tap.catch(np.full((2, 3), float(step)), "w")
            tap.catch(np.full((1, 3), -1.0), "logprobs", tokens=[[1, 2, step]])
            model(torch.tensor([[1.0, float("nan")]])).sum().backward()
            tracker.step(loss=float("nan"))
    pipeline.put(record_of(Alert("why", "w", Kind.OP, 2, 0, "m", "é"), seq=99, time_ns=0))
    tap.finish()
    return {"run": run, "folder": folder / "runs", "new": folder / "new"}


def fields(found):
    return set((found[0] if isinstance(found, list) else found).keys())


def documented(command):
    """Return the fields that the help names: those of a run, then those of other things."""
    (option,) = (each for each in COMMANDS[command].params if "--json" in each.opts)
    words = option.help.removeprefix("Print JSON: ").removeprefix("a list of ").rstrip(".")
    parts = re.sub(r" \([^)]*\)", "", words).split("; of ")
    named = [{word.strip() for word in part.split(":")[-1].split(",")} for part in parts]
    if command == "compare":
        named[0] |= named[1]  # what runs have beyond files
    return named


def strictly(text):
    """Parse JSON as other languages do: without NaN."""

    def fail(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=fail)


def test_every_command_is_typed():
    assert set(LINES) | OTHERS >= set(COMMANDS)


@pytest.mark.parametrize("command", LINES)
def test_prints_what_its_help_names(places, command, monkeypatch):
    for module in (serve, view):  # they wait for Ctrl-C
        monkeypatch.setattr(module, "wait_for_interrupt", lambda *_: None)
    line, expected = LINES[command]
    code, out, err = type_in(command, *line.format(**places).split(), "--json")
    assert code == expected, err
    found, named = fields(strictly(out)), documented(command)
    assert found == named[0], err


def test_one_value(places):
    code, out, _ = type_in("show", places["run"], "w", "--values", "--json")
    found = strictly(out)
    assert (code, found["value"], found["shape"]) == (0, [[2.0] * 3] * 2, [2, 3])
    assert fields(found) <= documented("show")[1]
    loss = strictly(type_in("show", places["run"], "loss", "--values", "--json")[1])
    assert loss["value"] == "NaN"
    latest = strictly(type_in("show", places["run"], "Linear", "--kind", "Activation", "--json")[1])
    assert latest["statistics"]["nans"] == 2


def test_top(places):
    session = tap.serve(port=0)
    try:
        code, out, _ = type_in("top", session.server.address, "--json")
        assert (code, fields(strictly(out))) == (0, documented("top")[0])
    finally:
        session.close()


@pytest.mark.slow
def test_run(tmp_path):
    """What the program prints goes to stderr, also that of processes that it starts."""
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import subprocess, torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            print("step", step)
        subprocess.run(["echo", "of a child"])
        raise SystemExit(3)
        """)
    )
    ended = subprocess.run(
        [sys.executable, "-m", "tensortap", "run", "--json", "train.py"], cwd=tmp_path,
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    found = strictly(ended.stdout)
    assert (ended.returncode, found["exit_code"]) == (3, 3), ended.stderr
    assert fields(found) == {"run", "exit_code", "not_seen", "rules"}
    assert "step 3" in ended.stderr
    assert "of a child" in ended.stderr
    assert {row["rule"] for row in found["rules"]} >= {"nan", "no_optimizer"}
