"""`tensortap serve --save` keeps everything that arrives in a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import tensortap as tap
from tests.runs.conftest import ROOT


@pytest.mark.slow
def test_session_saves_what_it_receives(tmp_path, run_program):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "tensortap", "serve", "--port", "0", "--save", "kept"]
    server = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().split()[3].rstrip(",")
        assert "writing what arrives to kept/" in (line := server.stdout.readline()), line
        for rank in ("0", "1"):
            run_program(
                tmp_path,
                """
                import numpy as np, os, tensortap as tap
                for step in range(20):
                    tap.catch(np.full(10_000, step + 100 * int(os.environ["RANK"])), "x")
                    tap.catch(step, "n")
                assert tap.flush(60)
                """,
                env={"TENSORTAP_SERVER": address, "RANK": rank, "WORLD_SIZE": "2"},
            )
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert server.returncode == 0
    (path,) = (tmp_path / "kept").iterdir()
    run = tap.open(path)
    assert [int(v[0]) for v in run.get_all("x", rank=1)] == list(range(100, 120))
    assert run.get_all("n", rank=0) == list(range(20))
    assert run.reader.info.ended
    assert run.reader.info.world_size == 2
