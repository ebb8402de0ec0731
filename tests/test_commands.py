"""Every option of every command, with values that make no sense."""

from __future__ import annotations

import re

import numpy as np
import pytest
import typer

import tensortap as tap
from tensortap.cli import main as command_line
from tensortap.cli import serve, view
from tests.commands import type_in

COMMANDS = typer.main.get_command(command_line.app).commands

# what comes before the option: {run}, {file} and {new} are paths
ARGUMENTS = {
    "align": "{run} {run}",
    "bisect": "{run} true", "check": "{run}", "compact": "{run}", "compare": "{run} {run}",
    "demo": "", "doctor": "",
    "film": "{run} w {new}.gif", "ls": "{folder}",
    "mcp": "{run} --http",
    "probe": "--session 127.0.0.1:9", "probes": "--session 127.0.0.1:9",
    "report": "{run} {new}.html",
    "reproduce": "{run}", "serve": "--port 0", "show": "{run} w", "top": "127.0.0.1:9 --once",
    "view": "{run} --no-browser --port 0", "why": "{run}",
}  # fmt: skip

# by command and option: values, and what the message says beside the option's name
WRONG = {
    "align": {"--noise": "{new} {file}", "--map": "x =x x=", "--html": "{folder} {new}/a.html"},
    "bisect": {
        "--step": "x", "--atol": "x -1 nan", "--rtol": "x -1 nan",
        "--map": "x (=x x=\\9 =",
    },
    "compact": {"--dask": "x tcp://127.0.0.1:9"},
    "compare": {
        "--atol": "x -1 nan", "--rtol": "x -1 nan", "--rules": "{new} {folder} {file}",
        "--map": "x (=x x=\\9 =", "--steps": "x 9:3 1:2:3 99:", "--names": "( zzz",
        "--kinds": "Wight x Weight",
        "--ranks": "x 99", "--rows": "x 0 -1", "--html": "{folder} {new}/a.html",
        "--dask": "x tcp://127.0.0.1:9", "--tolerance": "x", "--noise": "{new} {file}",
    },
    "demo": {"--steps": "x 0 -1 9999999", "--folder": "{file} {file}/a"},
    "doctor": {"--device": "x cuda:99 jax:nothing"},
    "film": {
        "--mode": "x", "--size": "x 0x0 -1x3 99999x99999", "--fps": "x 0 -1 nan",
        "--range": "x 1,x 1,2,3 2,1 nan,1", "--rank": "x 99 -1",
        "--kind": "x Weight", "--steps": "x 9:3 99:",
    },
    "mcp": {"--port": "x -1 70000"},
    "probe": {
        "--every": "x -1", "--steps": "x -1", "--session": "127.0.0.1:9",
    },
    "probes": {"--session": "127.0.0.1:9"},
    "resume-check": {"--steps": "x 0 -1", "--more": "x 0 -1"},
    "reproduce": {"--out": "{folder} {file}", "--repo": "{new}"},
    "serve": {
        "--host": "no.such.host.invalid 999.1.1.1", "--port": "x -1 70000",
        "--memory": "x 0 -1 0% 999% -5GB",
    },
    "show": {"--step": "x 99 -1", "--rank": "x 99 -1", "--kind": "x Weight"},
    "top": {"--interval": "x 0 -1 nan"},
    "view": {
        "--host": "no.such.host.invalid 999.1.1.1", "--port": "x -1 70000", "--name": "a/b ''",
    },
    "why": {"--step": "x", "--rank": "x"},
}  # fmt: skip
OPTIONS = {
    (name, option.opts[0]): option
    for name, command in COMMANDS.items()
    for option in command.params
    if option.param_type_name == "option"
    and not option.is_flag
    and name != "run"  # its options come before the program
}
CASES = [
    (command, option, value)
    for command, option in OPTIONS
    for value in WRONG.get(command, {}).get(option, "").split()
]
# arguments: the message contains the value
ARGUMENTS_WRONG = [
    ("align {run} {run}", "has no tokens"), ("align {new} {run}", "{new}"),
    ("bisect {new} true", "{new}"), ("bisect {run}", "Missing argument"),
    ("bisect {run} true", "has no step of a tracked model"),
    ("compare {new} {run}", "{new}"), ("compare {run} {file}", "{file}"),
    ("compare {run}", "Missing argument"), ("compare {run} {run} {run}", "{run}"),
    ("doctor x:y", "port must be a number"),
    ("film {run} nothing {new}.gif", "nothing"), ("film {run} w {new}.xyz", ".xyz"),
    ("film {new} w {new}.gif", "{new}"), ("ls {new}", "{new}"), ("ls {file}", "{file}"),
    ("report {new} {new}.html", "{new}"), ("report {run} {new}/a.html", "{new}"),
    ("report {run} {folder}", "{folder}"), ("ranks {new}", "{new}"), ("reproduce {new}", "{new}"),
    ("run {new}", "{new}"), ("run", "Missing argument"), ("run --to {file} {file}", "{file}"),
    ("run --every x {file}", "--every"), ("run --every 0 {file}", "--every"),
    ("show {new}", "{new}"),
    ("show {file}", "{file}"), ("show {run} nothing", "nothing"),
    ("top x:y --once", "port must be a number"), ("top a:99999 --once", "99999"),
    ("view {new} --no-browser", "{new}"), ("nothing", "nothing"), ("show --nothing", "--nothing"),
    ("show {run} w --step", "--step"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Return a run with two names, an existing file, a folder that has things, and a new path."""
    folder = tmp_path_factory.mktemp("commands")
    run = tap.init(folder / "runs")
    for step in range(3):
        tap.step(step)
        tap.catch(np.full((2, 3), float(step)), "w")
    tap.finish()
    (folder / "file").write_text("not what you want")
    return {"run": run, "file": folder / "file", "folder": folder, "new": folder / "new"}


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    """End commands that would wait for Ctrl-C: the option was taken for right."""

    def fail(*_):
        raise AssertionError("the command started")

    monkeypatch.setattr(serve, "wait_for_interrupt", fail)
    monkeypatch.setattr(view, "wait_for_interrupt", fail)
    monkeypatch.setattr("tensortap.rooms.demo.command._watched", fail)


def said(places, line, **environment):
    words = [word.replace("''", "") for word in line.split()]
    code, out, err = type_in(*words, cwd=places["folder"], **environment)
    assert code == 2, (out, err)
    *progress, message = err.splitlines()
    assert all(each.startswith("tensortap: checking out") for each in progress), err
    assert message.startswith("tensortap: "), err  # one sentence
    return message


def test_options_that_are_tried_exist():
    tried = {(command, option) for command, options in WRONG.items() for option in options}
    assert tried <= set(OPTIONS)
    # these take any text, of which only a running program knows whether it is right
    told = {("probe", each) for each in ("--kind", "--rules", "--trace")}
    told |= {("resume-check", "--resume")}
    assert set(OPTIONS) - tried == {("serve", "--accept"), *told}  # add others to WRONG


@pytest.mark.parametrize(("command", "option", "value"), CASES)
def test_wrong_value_of_an_option(places, command, option, value):
    values = value.format(**places).split("|")
    arguments = ARGUMENTS.get(command, "{run}").format(**places)
    given = f"{option} {' '.join(values)}" if len(values) > 1 else f"{option}={values[0]}"
    message = said(places, f"{command} {arguments} {given}")
    assert re.search(rf"{option}\b", message), message
    assert not places["new"].exists()


@pytest.mark.parametrize(("line", "named"), ARGUMENTS_WRONG)
def test_wrong_argument(places, line, named):
    assert named.format(**places) in said(places, line.format(**places))
