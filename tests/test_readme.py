"""The examples in the README run as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensortap as tap

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_first_screen_works(tmp_path):
    training, session, *_ = snippets()
    where = {"XDG_CONFIG_HOME": str(tmp_path), "TENSORTAP_PORT": "0"}
    script = """
import os, subprocess, sys, time
{session_start}
os.environ["TENSORTAP_SERVER"] = str(server.address)
child = subprocess.run([sys.executable, sys.argv[1]], check=True)
{session_rest}
assert weight.shape == (5, 3) and weight.dtype.is_floating_point, weight
"""
    start, rest = session.split("tap.serve()\n")
    (tmp_path / "train.py").write_text(
        "import torch\nloss = torch.tensor(0.5)\nmodel = torch.nn.Module()\n"
        f"model.lm_head = torch.nn.Linear(3, 5)\n{training}\nassert tap.flush(60)\n"
    )
    program = tmp_path / "session.py"
    filled = {"session_start": f"{start}\nserver = tap.serve()", "session_rest": rest}
    program.write_text(script.format(**filled))
    env = dict(os.environ, PYTHONPATH=str(ROOT / "src"), **where)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "train.py")],
        env=env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "model.lm_head.weight" in done.stdout
    assert "loss" in done.stdout


@pytest.mark.slow
def test_runs_snippets_work(tmp_path, run_program):
    _, _, writing, reading, *_ = snippets()
    code = f"""
import torch, tensortap as tap
hidden, output = torch.zeros(3, 3), torch.ones(2)
for _ in range(4):
    tap.step(40)
{writing}
{reading.replace('"experiments/20261115_181530"', "path")}
assert run.names() == ["hidden", "layer1_output"]
"""
    printed = run_program(tmp_path, code, env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert "layer1_output.pt" in printed


def test_track_snippet_works(tmp_path, monkeypatch):

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    model = torch.nn.Linear(4, 2)
    names = {"tap": tap, "model": model, "opt": torch.optim.AdamW(model.parameters())}
    names["data"] = [torch.randn(3, 4) for _ in range(3)]
    exec(snippets()[4], names)
    frame = names["frame"]
    assert sorted(frame.metadata.step.unique()) == [-1, 0, 1, 2]
    assert "Optimiser_State.exp_avg" in set(frame.metadata.tensor_type)


@pytest.mark.slow
def test_compare_snippet_works(tmp_path, monkeypatch):
    import numpy as np

    monkeypatch.chdir(tmp_path)
    t1, t2 = torch.ones(3), torch.ones(3) + 1e-7
    torch.save(t1, "output.pt")
    np.save("output.npy", t2.numpy())
    runs = []
    for factor in (1, 2):
        runs.append(tap.init(tmp_path))
        tap.catch(t1 * factor, "x")
        tap.finish()
    names = {"tap": tap, "t1": t1, "t2": t2, "run_a": runs[0], "run_b": tap.open(runs[1])}
    exec(snippets()[5], names)
    assert names["report"].first.key.name == "x"


class Net(torch.nn.Module):
    """What the README calls `model`."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        out = {"logits": self.fc(x)}
        return out["logits"]


class Block(torch.nn.Module):
    def forward(self, x):
        scores = x @ x.mT
        return scores.softmax(-1) @ x


def trained(model, steps=3):
    def train():
        for _ in range(steps):
            model(torch.randn(3, 4)).square().mean().backward()

    return train


def test_trace_snippet_works():
    model = Net()
    names = {"tap": tap, "model": model, "train": trained(model)}
    exec(snippets()[6], names)
    assert names["scores"].iterations == [0, 1, 2]
    assert [v.shape for v in names["scores"].values] == [(3, 3)] * 3
    assert set(names["tracer"].results) >= {"forward", "forward.x", "forward.out.logits"}


@pytest.mark.slow
def test_watch_snippet_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Net()
    exec(snippets()[7], {"tap": tap, "model": model, "train": trained(model)})
    films = {path.name.partition("-")[0] for path in (tmp_path / "videos").glob("*.mp4")}
    assert {"fc", "model"} <= films


@pytest.mark.slow
def test_figures_snippet_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Net()
    path = tap.init(tmp_path)
    with tap.track(model) as tracker:
        for _ in range(3):
            trained(model, 1)()
            tracker.step()
    tap.finish()
    exec(snippets()[8], {"run": tap.open(path)})
    assert "float8_e4m3fn" in (tmp_path / "exponents.html").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`tap\.(\w+)", README))))
def test_verbs_in_the_readme_exist(name):
    assert getattr(tap, name) is not None


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`tensortap (\w+)", README))))
def test_commands_in_the_readme_exist(command):
    from typer.testing import CliRunner

    from tensortap.cli.main import app

    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_settings_page_lists_exactly_the_settings_in_use():
    named = set(re.findall(r"TENSORTAP_[A-Z_]+", (ROOT / "docs" / "settings.md").read_text()))
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert named == set(re.findall(r"TENSORTAP_[A-Z]+(?:_[A-Z]+)*\b", source))


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "CONTRIBUTING.md"])
def test_links_and_pictures_exist(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
