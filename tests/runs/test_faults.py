"""Runs outlive kills, truncated files, full disks and a clock that goes backwards."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tensortap.errors import TensortapError
from tensortap.frameworks import rebuild
from tensortap.readers.run import RunReader
from tests.processes import wait_for

ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}

# forks training programs that write a run until they are killed
TRAINERS = """
import os, sys
import numpy as np
import tensortap as tap
from tensortap.provenance import collect
from tensortap.sources import init

def train(folder):
    confirmed = os.open(f"{folder}/confirmed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    tap.init(folder)
    for i in range(1_000_000):
        tap.catch(np.full(5000 if i % 3 else 3, i), "x")
        if i % 7 == 0 and tap.flush(30):
            os.write(confirmed, f"{i}\\n".encode())

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        train(line.strip())
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


@pytest.fixture
def trainers():
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINERS], env={**os.environ, **ENV}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.fault("kill -9 of a program that writes a run")
def test_random_kills_lose_nothing_that_was_confirmed(tmp_path, trainers, rounds):
    chance = random.Random(0)
    for number in range(rounds(5, 200)):
        folder = tmp_path / str(number)
        folder.mkdir()
        print(folder, file=trainers.stdin, flush=True)
        pid = int(trainers.stdout.readline())
        target = chance.randrange(8)  # flushes that are confirmed before
        wait_for(lambda path=folder, n=target: len(confirmed_steps(path)) >= n)
        time.sleep(chance.uniform(0.0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert trainers.stdout.readline() == "gone\n"
        check_killed(folder)
        shutil.rmtree(folder)


def confirmed_steps(folder: Path) -> list[int]:
    """Return the steps after which a program has flushed successfully."""
    file = folder / "confirmed"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def check_killed(folder: Path) -> None:
    """Check what a killed program has left."""
    confirmed = confirmed_steps(folder)
    runs = [path for path in folder.iterdir() if (path / "run.json").exists()]
    if not runs:
        assert not confirmed
        return
    reader = RunReader(runs[0])
    found = [reader.load(head) for head in reader.new_records()]
    assert [record.step for record in found] == list(range(len(found)))  # a prefix without holes
    assert len(found) > max(confirmed, default=-1)
    for record in found:
        assert (rebuild(record.value) == record.step).all()


SMALL_RUN = """
import sys, numpy as np, tensortap as tap
from tensortap.pipeline.pipeline import pipeline
path = tap.init(sys.argv[1])
for i in range(4):
    tap.catch(np.full(2100, i, np.float64), "large")
    tap.catch(i, "small")
assert tap.flush(30)
if sys.argv[2] == "finished":
    tap.finish()
print(path, flush=True)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("state", ["finished", "killed"])
@pytest.mark.fault("truncation at every byte of a run")
def test_truncation_at_every_byte(tmp_path, state, request, record_property):
    done = subprocess.run(
        [sys.executable, "-c", SMALL_RUN, str(tmp_path), state], env={**os.environ, **ENV},
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    run = Path(done.stdout.strip())
    records = read(run)
    assert len(records) == 8
    files = [
        file for file in run.rglob("*") if file.suffix in (".arrows", ".parquet", ".safetensors")
    ]
    stride = 1 if request.config.getoption("markexpr") == "fault" else 211
    tried = 0
    for file in [*files, run / "run.json"]:
        content = file.read_bytes()
        for length in range(0, len(content), stride):
            file.write_bytes(content[:length])
            tried += 1
            try:
                found = read(run)
            except TensortapError as error:
                refused = str(error)
            else:
                refused = ""
                assert {key: records[key] for key in found} == found, (file, length)
            assert len(refused) < 1000
        file.write_bytes(content)
    record_property("tried", tried)
    assert read(run) == records


def read(run: Path) -> dict[tuple[str, int], float]:
    """Return what a run holds: the number in each value, by name and step."""
    reader = RunReader(run)
    values = {}
    for head in reader.new_records():
        value = np.asarray(rebuild(reader.load(head).value))
        assert (value == value.flat[0]).all()
        values[head.name, head.step] = float(value.flat[0])
    return values


# each look at the clock is an hour before the last one
BACKWARDS = """
import itertools, json, sys, time
hours = itertools.count()
time.time_ns = lambda: 1_700_000_000_000_000_000 - next(hours) * 3_600_000_000_000
time.time = lambda: time.time_ns() / 1e9
import numpy as np, tensortap as tap
paths = []
for number in range(3):
    paths.append(str(tap.init(sys.argv[1])))
    for i in range(30):
        tap.catch(np.full(5000, i), "x")
        tap.step()
    tap.finish()
for path in paths:
    run = tap.open(path)
    assert [int(value[0]) for value in run.get_all("x")] == list(range(30)), path
    assert int(run.get("x")[0]) == 29
    assert str(run) and str(tap.receipt())
print(json.dumps(len(set(paths))))
"""


@pytest.mark.slow
@pytest.mark.fault("clock going backwards")
def test_clock_that_goes_backwards(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BACKWARDS, str(tmp_path)], env={**os.environ, **ENV},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == 3
