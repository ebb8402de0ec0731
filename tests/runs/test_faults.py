"""Runs outlive kills, truncated files, full disks and a clock that goes backwards."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from tensortap.core.errors import TensortapError
from tensortap.rooms.dump.files import tensors_in
from tensortap.runs.run_reader import RunReader
from tensortap.values import rebuild
from tests.processes import wait_for
from tests.proof import kind_of

ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}

# forks training programs that write a run until they are killed
TRAINERS = """
import os, sys
import numpy as np
import tensortap as tap
from tensortap.rooms.provenance import collect
from tensortap.runs import init, sink
sink._TAIL_ROWS = 50  # tables are sealed meanwhile

def train(folder):
    confirmed = os.open(f"{folder}/confirmed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    tap.init(folder)
    for i in range(1_000_000):
        tap.catch(np.full(5000 if i % 3 else 3, i), "x")
        if i % 7 == 0 and tap.flush(60):
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
import os, signal, sys, numpy as np, tensortap as tap
path = tap.init(sys.argv[1])
for i in range(3):
    tap.catch(np.full(2049, 7), "large")  # equal tensors are stored once
    tap.catch(i, "small")
assert tap.flush(60)
if sys.argv[2] == "finished":
    tap.finish()
print(path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def small_runs(tmp_path_factory):
    """Return the run of a program that has finished it, or that was killed before."""

    @functools.cache
    def make(state: str) -> Path:
        folder = tmp_path_factory.mktemp(state)
        done = subprocess.run(
            [sys.executable, "-c", SMALL_RUN, str(folder), state], env={**os.environ, **ENV},
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        return Path(done.stdout.strip())

    return make


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("state", "file"),
    [
        ("finished", "records/00000/0000.parquet"),
        ("finished", "records/00000/tail.arrows"),
        ("finished", "run.json"),
        ("finished", "tensors/00000/000000.safetensors"),
        ("killed", "records/00000/tail.arrows"),
    ],
)
@pytest.mark.fault("truncation at every byte of a run")
def test_truncation_at_every_byte(small_runs, tmp_path, state, file, request, record_property):
    run = shutil.copytree(small_runs(state), tmp_path / "run")
    path = run / file
    content, whole = path.read_bytes(), read(run, path)
    assert len(whole) == (1 if path.suffix == ".safetensors" else 6)
    few = kind_of(request.config) is None
    lengths = range(len(content) - 1, -1, -997 if few else -1)
    for length in lengths:
        os.truncate(path, length)
        try:
            found = read(run, path)
        except TensortapError:
            continue
        assert list(found.items()) == list(whole.items())[: len(found)], length  # a prefix
    record_property("tried", len(lengths))


def read(run: Path, path: Path) -> dict:
    """Return the number in each value of a run; of a payload file, in each tensor."""
    if path.suffix == ".safetensors":
        found = tensors_in(path).items()
    else:
        reader = RunReader(run)
        heads = reader.new_records()
        found = [((head.name, head.step), reader.load(head).value) for head in heads]
    return {key: the_number(value) for key, value in found}


def the_number(value) -> float:
    array = np.asarray(rebuild(value))
    assert (array == array.flat[0]).all()
    return float(array.flat[0])


# tells what has become of 200 values
FILLS = """
import json, os, sys, time, numpy as np
folder = sys.argv[1]
import tensortap as tap
from tensortap.runs.run_reader import RunReader
from tensortap.runs import init
init._END = 10_000.0  # the end does not wait that long for a disk that is full
path = tap.init(folder)
if sys.argv[2] == "inodes":  # somebody else takes the rest
    try:
        for i in range(1000):
            open(f"{folder}/{i}", "w").close()
    except OSError:
        pass
for i in range(200):
    tap.catch(np.full(10_000, i), "x")  # if it waited for room, the program would not end
    time.sleep(0.001)
tap.flush(0.2)
tap.finish()
receipt = tap.receipt()
reader = RunReader(path)
steps = [head.step for head in reader.new_records()]
right = all((np.asarray(tap.open(path).get("x", step=step)) == step).all() for step in steps)
print(json.dumps({
    "captured": receipt.captured, "dropped": receipt.dropped,
    "steps": steps, "right": right, "missing": len(reader.missing()),
}))
"""


def on_a_small_disk(folder: Path, what: str, options: str) -> dict:
    """Run FILLS on a file system of its own."""
    mount = f'mount -t tmpfs -o {options} tmpfs "$1" && shift && exec "$@"'
    before = ["unshare", "-Urm", "sh", "-c", mount, "sh", str(folder)]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    done = subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(FILLS), str(folder), what],
        env={**os.environ, **ENV}, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "options"),
    [
        pytest.param("bytes", "size=6m", marks=pytest.mark.fault("disk full")),
        pytest.param("inodes", "nr_inodes=60", marks=pytest.mark.fault("inodes full")),
    ],
)
def test_full_disk_stops_nobody_and_is_reported(tmp_path, what, options, record_property):
    told = on_a_small_disk(tmp_path, what, options)
    record_property("tried", 200)
    assert told["right"]
    assert told["steps"] == sorted(set(told["steps"]))
    assert told["captured"] == len(told["steps"]) < 200, told
    assert told["captured"] + told["dropped"] == 200, told
    assert told["missing"] == told["dropped"], told


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
