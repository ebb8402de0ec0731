"""A training program in a control group with little memory, next to a session outside of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tensortap.api import session as live

LIMIT = 1536 << 20
STEPS = 60
ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # versions 1 and 2
TRAINING = """
    import json, sys
    import numpy as np
    import tensortap as tap
    from tensortap.core import limits

    value = np.ones(16 << 20, np.float32)  # 64 MiB
    for step in range(int(sys.argv[1])):
        value[0] = step
        tap.catch(value, "x")
        if step % 20 == 19:
            peak = np.ones(80 << 20)  # the program needs 640 MiB for a moment
            del peak
    tap.flush(60)
    receipt = tap.receipt()
    shown = [limits.total_memory(), receipt.captured, receipt.dropped, receipt.memory]
    print(json.dumps(shown))
"""


@pytest.fixture
def group():
    """Yield a control group without a limit, inside one that has the limit."""
    root = next(root for root in ROOTS if root.is_dir())
    outer = root / f"tensortap-{os.getpid()}"
    inner = outer / "inner"
    try:
        inner.mkdir(parents=True)
        if root == ROOTS[1]:
            (outer / "memory.max").write_text(str(LIMIT))
        else:
            (outer / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        remove(inner, outer)
        pytest.skip(f"no control group can be created: {error}")
    yield inner
    remove(inner, outer)


def remove(*folders: Path) -> None:
    end = time.monotonic() + 60
    for folder in folders:
        while folder.exists() and time.monotonic() < end:
            with contextlib.suppress(OSError):  # its processes are still ending
                folder.rmdir()
                break
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.fault("little memory for training")
def test_training_survives_in_a_small_control_group(group, monkeypatch):
    """It catches 64 MiB per step with default settings, and has peaks of its own."""
    monkeypatch.delenv("TENSORTAP_ARENA")
    server = live.start("127.0.0.1", 0, "256MB")
    code = textwrap.dedent(TRAINING)
    enter = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group)]
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "TENSORTAP_SERVER": str(server.address),
    }
    try:
        done = subprocess.run(
            [*enter, sys.executable, "-c", code, str(STEPS)],
            capture_output=True, text=True, env=env, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"killed after {server.history.written} steps: {done.stderr}"
        memory, captured, dropped, taken = json.loads(done.stdout.splitlines()[-1])
        assert memory == LIMIT
        assert captured + dropped == STEPS
        assert server.history.written == captured > 2
        assert 64 << 20 < taken < LIMIT // 2
    finally:
        server.close()
