"""Every console line of the README and the documentation runs as written."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy
import pytest
import torch

import tensortap as tap
from tests.environments import environment, shell

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(?:console|bash|sh|shell)\n(.*?)^```", re.DOTALL | re.MULTILINE)

# Lines that cannot run here, each with the reason.
CANNOT = {
    "make demo": "installs; live/test_demo.py runs tensortap demo",
    "make check": "runs the tests, this one among them",
    "make test": "runs the tests, this one among them",
    "make engines": "builds llama.cpp, which takes minutes",
    "make sweep": "tracks hundreds of models, a dozen of which tests/sweep tracks",
    "make lint": "runs beside the tests",
    "make docs": "runs beside the tests",
    ".ci/run": "runs the tests, this one among them",
    "tensortap bisect runs/reference -- python train.py": "test_bisect_command.py runs it",
    "tensortap resume-check -- python train.py": "tests/resume runs it",
}
# The installation has a test of its own.
INSTALLING = ["pip install '.[all]'", "tensortap doctor"]
# Runs that the pages name, and those that stand for them here.
SAME = {
    "20261118_042904": "a", "20261118_043040": "bad", "20261118_043136": "a", "good": "a",
    "new": "b", "resumed": "b", "straight": "a",
}  # fmt: skip
ENDLESS = {"view": "press Ctrl-C to end", "top": "caught"}  # what to wait for before Ctrl-C


def console_lines():
    """Return the commands, each once, without comments and without what they print."""
    found = {}
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for block in BLOCK.findall(page.read_text()):
            lines = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
            assert lines, f"{page}: a block of commands needs lines that start with '$ '"
            found |= dict.fromkeys(re.sub(r"\s+# .*", "", line) for line in lines)
    return list(found)


COMMANDS = [line for line in console_lines() if line not in CANNOT and line not in INSTALLING]


def test_every_line_is_known():
    assert [line for line in (*CANNOT, *INSTALLING) if line not in console_lines()] == []
    assert {line.split()[0] for line in COMMANDS} == {"tensortap"}
    assert not re.search(r"[|<>;&$*`]", "".join(COMMANDS))  # nothing for a shell to do


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.attn(x)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the lines name, and a live session; yields the folder and its settings."""
    folder = tmp_path_factory.mktemp("console")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("TENSORTAP_MODIFICATIONS", "0")
        for name in ("a", "b", "a1", "a2"):
            torch.manual_seed(0)
            model = Net()
            path = tap.init(folder / "runs")
            with tap.track(model, tensors=True) as tracker:
                for step in range(12):
                    model(torch.full((2, 4), float(step + (name == "b")))).sum().backward()
                    tap.catch(model.attn.weight, "caught")
                    tracker.step(loss=1.0)
            tap.finish()
            path.rename(folder / "runs" / name)
        path = tap.init(folder / "runs")
        with tap.ops():
            torch.log(torch.zeros(2))
        tap.finish()
        path.rename(folder / "runs" / "bad")
        for name, same in SAME.items():
            shutil.copytree(folder / "runs" / same, folder / "runs" / name)
        torch.save(torch.ones(3), folder / "output.pt")
        numpy.save(folder / "output.npy", numpy.ones(3, "float32"))
        (folder / "rules.toml").write_text('[[rule]]\nnames = "attn"\natol = 1e-3\n')
        (folder / "train.py").write_text(
            "import torch\nmodel = torch.nn.Linear(2, 1)\n"
            "optimizer = torch.optim.SGD(model.parameters())\n"
            "model(torch.ones(3, 2)).mean().backward()\noptimizer.step()\n"
        )
        from tensortap.api import session

        server = session.start("127.0.0.1", 0, "32MB")
        env = {
            **os.environ, "PYTHONPATH": str(ROOT / "src"), "BROWSER": "true", "COLUMNS": "120",
            "TENSORTAP_SERVER": str(server.address),
        }  # fmt: skip
        tap.catch(torch.ones(2), "caught", server=str(server.address))
        assert tap.flush(60)
        yield folder, env, str(server.address)
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_line_runs(line, place, starter):
    folder, env, session = place
    for written, meant in {"RUN": "runs/a", "NAME": "caught", "gpu7:2875": session}.items():
        line = re.sub(rf"\b{written}\b", meant, line)
    screen, terminal = os.openpty()
    typed = f"import sys; sys.argv = {shlex.split(line)}\nsys.modules['tensortap.cli.main'].main()"
    process = starter.start(typed, env, folder, [terminal, os.dup(terminal), os.dup(terminal)])
    said, verb, interrupted = "", shlex.split(line)[1], False
    with open(screen, "rb", buffering=0) as shown, contextlib.suppress(OSError):  # EIO: its end
        while text := shown.read(65536):
            said += text.decode(errors="replace")
            if not interrupted and verb in ENDLESS and ENDLESS[verb] in said:
                interrupted = True
                os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) in ((0, 1) if verb in ("check", "compare", "ranks") else (0,)), said
    for option, name in zip(shlex.split(line), shlex.split(line)[1:], strict=False):
        if option == "--html":
            assert (folder / name).stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_installation(tmp_path):
    """In an environment that has what the package declares, and nothing else."""
    clone = f"git clone --quiet {shlex.quote(str(ROOT))} tensortap && cd tensortap"
    script = "\n".join([clone, *INSTALLING])
    settings = {
        "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
    }  # fmt: skip
    venv = environment(tmp_path / "venv", "all")
    unchanged = 'test -z "$(git status --porcelain --ignored)"'  # by the installation
    said = shell(
        f"{script}\n{unchanged}\ncommand -v tensortap",
        # test_dist.py compiles
        tmp_path, PATH=f"{venv}/bin:{os.environ['PATH']}", CC="/bin/false", **settings,
    )  # fmt: skip
    assert said.endswith(f"{venv}/bin/tensortap\n"), said
    assert "statistics kernel" in said
