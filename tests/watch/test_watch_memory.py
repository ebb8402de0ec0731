"""A worker never costs the training program its memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import tensortap as tap
from tensortap.rooms.watch import sink
from tests.live.test_memory_limit import group  # noqa: F401
from tests.watch.notes import Notes

SOURCE = str(Path(__file__).parents[2] / "src")
TRAINING = """
    import pathlib, sys, time
    import numpy as np
    import tensortap as tap
    from tests.watch.notes import Notes

    watcher = tap.watch(None, Notes(sys.argv[1]))
    watcher.catch(np.ones(1000), "first")
    assert watcher.flush(60)
    print(pathlib.Path(f"/proc/{watcher.pid}/oom_score_adj").read_text())
    held = []
    while len(held) < 128 and watcher.alive:  # until 512 MB are nearly full
        held.append(np.ones(1 << 19))
        watcher.catch(held[-1], "x")
        time.sleep(0.03)
    watcher.catch(held[-1], "after")  # the worker may have died with nothing on its way to it
    watcher.close()
    print(watcher.died, watcher.receipt.dropped > 0)
"""


@pytest.mark.slow
@pytest.mark.fault("little memory for training")
def test_worker_goes_before_training(group, tmp_path):  # noqa: F811
    enter = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group)]
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (group.parent / name).exists():
            (group.parent / name).write_text(str(512 << 20))
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{Path(__file__).parents[2]}"}
    done = subprocess.run(
        [*enter, sys.executable, "-c", textwrap.dedent(TRAINING), str(tmp_path / "notes")],
        capture_output=True, text=True, env=env, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1000", "True", "True"]
    assert "worker 'watch' died (it was killed, because memory is short)" in done.stderr


EVERYTHING = """
    import contextlib, json, sys
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    opt = torch.optim.AdamW(model.parameters())

    def step():
        loss = model(torch.randn(64, 64)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    if sys.argv[1] == "plain":
        for _ in range(8):
            step()
        sys.exit()
    import tensortap as tap
    with contextlib.ExitStack() as stack:
        tap.init("runs")
        enter = stack.enter_context
        tracker = enter(tap.track(model, optimizer=opt, alerts=True, analyses=True))
        enter(tap.trace(model, ["*.forward.input"]))
        watcher = enter(tap.watch(model, tap.Recorder(mode=sys.argv[1]), kind="both"))
        with tap.ops(model):
            step()
        for _ in range(8):
            tracker.step(loss=step())
    tap.finish()
    print("complete")
"""


@pytest.mark.slow
@pytest.mark.fault("little memory for training")
def test_everything_at_once_in_one_and_a_half_times_the_memory(group, tmp_path):  # noqa: F811
    """The worker is killed or not started, and says so; training ends as it would without it."""
    version2 = (group / "memory.max").exists()
    enter = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group)]
    env = {**os.environ, "PYTHONPATH": SOURCE}

    def run(mode):
        return subprocess.run(
            [*enter, sys.executable, "-c", textwrap.dedent(EVERYTHING), mode], cwd=tmp_path,
            capture_output=True, text=True, env=env, timeout=200, check=False,
        )  # fmt: skip

    assert run("plain").returncode == 0
    peak = group / ("memory.peak" if version2 else "memory.max_usage_in_bytes")
    limit = group / ("memory.max" if version2 else "memory.limit_in_bytes")
    limit.write_text(str(int(peak.read_text()) * 3 // 2))
    done = run("tsne")  # the mode that needs most
    assert (done.returncode, done.stdout) == (0, "complete\n"), done.stderr
    for line in done.stderr.splitlines():
        assert "memory is short" in line or "too little memory is left" in line, line


@pytest.mark.parametrize(("mode", "needed"), [(None, "96.0 MiB"), ("tsne", "160 MiB")])
def test_worker_is_not_started_without_memory(tmp_path, monkeypatch, caplog, mode, needed):
    monkeypatch.setattr(sink, "available_memory", lambda: 100 << 20)
    recorder = tap.Recorder(tmp_path, mode=mode) if mode else Notes(tmp_path / "notes")
    with tap.watch(None, recorder, rate=None) as watcher:
        for _ in range(3):
            watcher.catch(np.ones(3), "x")
        assert not watcher.alive
    assert f"it needs about {needed}, and too little memory is left" in caplog.text
    assert caplog.text.count("was not started") == 1
    assert (watcher.receipt.captured, watcher.receipt.dropped) == (0, 3)


@pytest.mark.slow
def test_little_waits_where_little_memory_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(sink, "available_memory", lambda: 400 << 20)
    with tap.watch(None, Notes(tmp_path / "notes"), rate=None) as watcher:
        assert watcher.alive
        assert watcher._sink.budget == 50 << 20
