"""Near its limits, a program that `tensortap run` tracks computes and ends as it would alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tensortap as tap
from tensortap.api import session

ROOT = Path(__file__).parents[2]
TRAIN = """
    import sys, torch
    from tests.limits import LEAVE

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(steps):
        for _ in range(steps):
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item().hex()

    held = LEAVE[sys.argv[1]](int(sys.argv[2]))
    print(train(10))
"""


@pytest.mark.slow
@pytest.mark.fault("no room for a connection")
@pytest.mark.parametrize(
    ("limit", "left", "said"),
    [
        ("threads", 0, "not connecting to TENSORTAP_SERVER: can't start new thread"),
        ("threads", 4, "fewer than 32 threads can be started"),
        ("MiB", 20, "less than 64 MiB of address space is left"),
        ("descriptors", 10, "file descriptors are left"),
    ],
)
def test_a_program_near_its_limits(tmp_path, isolated_settings, limit, left, said):
    server = session.start("127.0.0.1", 0, "32MB")
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    env = {
        **os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "TENSORTAP_SERVER": str(server.address),
    }  # fmt: skip

    def run(*words):
        return subprocess.run(
            [sys.executable, *words, "train.py", limit, str(left)], cwd=tmp_path, env=env,
            capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip

    try:
        alone, ours = run(), run("-m", "tensortap", "run")
    finally:
        server.close()
    assert (alone.returncode, alone.stderr) == (0, "")
    assert (ours.returncode, ours.stdout) == (0, alone.stdout), ours.stderr
    assert ours.stderr.count(said) == 1, ours.stderr
    assert " rules, " in ours.stderr
    assert server.history.written == 0
    made = tap.open(next((tmp_path / "runs").iterdir()))
    assert len(made.metrics("loss")) == 10
