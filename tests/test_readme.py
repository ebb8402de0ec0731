"""The examples in the README run as written; what the documentation names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tensortap as tap

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
DOCUMENTED = README + "".join((ROOT / page).read_text() for page in PAGES)


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_first_screen_works(tmp_path):
    training, session = snippets()
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


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\btap\.(\w+)", DOCUMENTED))))
def test_documented_verbs_exist(name):
    assert getattr(tap, name) is not None


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"[`$] ?tensortap ([a-z][\w-]+)", DOCUMENTED)))
)
def test_documented_commands_exist(command):
    from typer.testing import CliRunner

    from tensortap.cli.main import app

    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_settings_page_lists_exactly_the_settings_in_use():
    named = set(re.findall(r"TENSORTAP_[A-Z_]+", (ROOT / "docs" / "settings.md").read_text()))
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert named == set(re.findall(r"TENSORTAP_[A-Z]+(?:_[A-Z]+)*\b", source))


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", *PAGES])
def test_links_and_pictures_exist(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
