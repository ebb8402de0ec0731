"""`tensortap run`: programs without a line of tensortap are tracked, and do what they did."""

from __future__ import annotations

import runpy
import subprocess
import sys
import textwrap

import pytest
import torch

import tensortap as tap
from tests.commands import type_in

TRAIN = """
    import sys, torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model{bug}.parameters(), lr=0.1)
    criterion = nn.MSELoss()  # a module that is called, too
    with torch.no_grad():
        model(torch.ones(1, 4))
    for _ in range(5):
        optimizer.zero_grad()
        loss = criterion(model(torch.randn(3, 4)), torch.randn(3, 2))
        loss.backward()
        optimizer.step()
    print("loss", loss.item().hex(), *sys.argv[1:])
"""


@pytest.fixture
def program(tmp_path):
    def write(text, name="train.py", **words):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text).format(**words))
        return path

    return write


def run(tmp_path, *words):
    """Return exit code, both outputs, and the run."""
    code, out, err = type_in("run", "--to", tmp_path / "runs", *words)
    return code, out, err, tap.open(max((tmp_path / "runs").iterdir()))


def recorded_steps(made, name):
    return {record.step for record in made.records(name) if record.kind is tap.Kind.ACTIVATION}


def test_a_program_is_tracked_and_computes_the_same(tmp_path, program, capsys):
    path = program(TRAIN, bug="")
    code, out, err, made = run(tmp_path, path, "--lr", "-m")
    runpy.run_path(str(path))
    alone = capsys.readouterr().out.split()[:2]
    assert (code, out.split()) == (0, [*alone, "--lr", "-m"])
    assert "found a problem" not in err
    assert recorded_steps(made, "0") == recorded_steps(made, "2") == {0, 1, 2, 3, 4}
    assert torch.nn.Module.__call__.__name__ != "first_call"


def test_a_bug_that_raises_no_error_is_named(tmp_path, program):
    code, _, err, made = run(tmp_path, program(TRAIN, bug="[0]"))
    assert code == 0
    assert "● no_optimizer: 2.weight since step 2, and 1 more" in err
    assert {alert.rule for alert in made.alerts()} == {"no_optimizer"}


def test_two_models_of_one_program(tmp_path, program):
    text = """
        import torch
        from torch import nn

        torch.manual_seed(0)
        maker, judge = nn.Linear(2, 2), nn.Linear(2, 1)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (maker, judge)]
        for _ in range(3):
            for optimizer, sign in zip(optimizers, (1, -1)):
                optimizer.zero_grad()
                (sign * judge(maker(torch.randn(4, 2))).mean()).backward()
                optimizer.step()
    """
    code, _, _, made = run(tmp_path, program(text))
    assert code == 0
    assert {"weight", "model2.weight"} <= set(made.names())


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('enough')", 1, "enough"),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
    ],
)
def test_the_exit_code_is_that_of_the_program(tmp_path, program, ends, code, says):
    found, _, err, made = run(tmp_path, program(TRAIN + f"    {ends}\n", bug=""))
    assert found == code
    assert says in err
    assert recorded_steps(made, "0") == {0, 1, 2, 3, 4}


def test_a_program_that_tracks_by_itself_is_left_alone(tmp_path, program):
    begin = "import tensortap as tap\n    own = tap.track(model).__enter__()\n    for _"
    text = TRAIN.replace("for _", begin) + "    own.__exit__(None, None, None)\n"
    _, _, err, _ = run(tmp_path, program(text, bug="[0]"))
    assert "no_optimizer" not in err


def test_a_program_without_a_model(tmp_path, program):
    code, out, err, _ = run(tmp_path, program("print(7)\n"))
    assert (code, out) == (0, "7\n")
    assert "no model was trained" in err


def test_what_is_no_program(tmp_path):
    code, _, err = type_in("run", tmp_path / "missing.py")
    assert code == 2
    assert "no file" in err


@pytest.mark.slow
def test_a_module_in_a_process_of_its_own(tmp_path, program):
    program(TRAIN, name="training.py", bug="[0]")
    words = [sys.executable, "-m", "tensortap", "run", "-m", "training", "--fast"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("--fast\n")
    assert "● no_optimizer: 2.weight" in ended.stderr


@pytest.mark.slow
def test_a_compiled_model_has_one_graph(tmp_path, program):
    text = TRAIN.replace(
        "optimizer = torch.optim",
        "net = model\n    model = torch.compile(model, "
        "backend='eager', fullgraph=True)\n    optimizer = torch.optim",
    )
    _, _, err, made = run(tmp_path, program(text, bug=""))
    assert "found a problem" not in err
    assert recorded_steps(made, "0") == {0, 1, 2, 3, 4}
