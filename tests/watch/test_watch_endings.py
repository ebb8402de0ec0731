"""However a training program ends, its workers process what they were sent, close and exit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.processes import gone, wait_for
from tests.watch.notes import Notes

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture
def notes(tmp_path):
    return Notes(tmp_path / "notes")


@pytest.fixture
def programs(tmp_path, notes):
    """Start programs in process groups of their own, as a terminal does."""
    started = []

    def start(code, *command, **env):
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(code))
        full = {
            **os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{tmp_path}",
            "PYTHONUNBUFFERED": "1", "NOTES": str(notes.path), **env,
        }  # fmt: skip
        started.append(
            subprocess.Popen(
                [sys.executable, *(command or (str(script),))], env=full, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                cwd=tmp_path,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def group_has_ended(process):
    """Return whether the whole process group of a program has ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = path.read_text().rsplit(")", 1)[1].split()[:3]
            if int(group) == process.pid and state not in "ZX":
                return False
    return True


HEAD = """
import os, signal, sys, time
import numpy as np
import tensortap as tap
from tests.watch.notes import Notes

if __name__ == "__main__":
    watcher = tap.watch(
        None, Notes(os.environ["NOTES"], slow=0.02), rate=None,
        start_method=os.environ.get("METHOD", "spawn"),
    )
    for i in range(20):
        watcher.catch(np.full(5000, float(i)), "x")  # large enough for the arena
"""
FLUSHED = """
    assert watcher._queue.flush(60)  # sent, not yet processed
    print(watcher.pid)
    time.sleep(1000)
"""


def check_complete(notes):
    assert [r["value"] for r in notes.records] == [5000.0 * i for i in range(20)]
    assert len(notes.closed) == 1


def test_program_that_ends_waits_for_its_worker(programs, notes):
    process = programs(HEAD + "    raise ValueError('mine')")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1, err
    assert "ValueError: mine" in err
    check_complete(notes)
    assert group_has_ended(process)
    # a busy machine may be told that the end takes long
    said = [line for line in err.splitlines() if "tensortap" in line.replace("tensortap/", "")]
    assert [line for line in said if "records to process; waiting" not in line] == []


def test_ctrl_c_reaches_all_processes_and_records_are_complete(programs, notes):
    process = programs(HEAD + FLUSHED)
    worker = int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    check_complete(notes)
    assert gone(worker)


def test_ctrl_c_while_the_worker_starts(programs, notes):
    process = programs(HEAD + "    print(watcher.pid)\n    time.sleep(1000)")
    assert process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert err.count("KeyboardInterrupt") == 1, err
    check_complete(notes)


@pytest.mark.parametrize(
    ("method", "number"),
    [("spawn", signal.SIGKILL), ("fork", signal.SIGTERM)],
)
def test_killed_program_leaves_no_worker_and_no_torn_file(programs, notes, method, number):
    before = set(os.listdir("/dev/shm"))
    process = programs(HEAD + FLUSHED, METHOD=method)
    worker = int(process.stdout.readline())
    process.send_signal(number)
    process.wait()
    wait_for(lambda: notes.closed)
    check_complete(notes)
    wait_for(lambda: gone(worker))
    wait_for(lambda: group_has_ended(process))
    assert set(os.listdir("/dev/shm")) <= before


def test_worker_exits_although_a_child_outlives_the_program(programs, notes):
    lingering = FLUSHED.replace(
        "    print", "    child = os.fork()\n    if not child: time.sleep(1000)\n    print"
    )
    process = programs(HEAD + lingering)
    worker = int(process.stdout.readline())
    process.kill()
    process.wait()
    wait_for(lambda: gone(worker))
    check_complete(notes)
    assert not group_has_ended(process)  # the child still runs


def test_hanging_worker_of_a_killed_program_exits_within_its_timeout(programs, notes):
    process = programs("""
        import os, time
        import tensortap as tap
        from tests.watch.notes import Trouble

        if __name__ == "__main__":
            watcher = tap.watch(None, Trouble(os.environ["NOTES"]), rate=None, timeout=2.0)
            watcher.catch(1.0, "fine")
            watcher.catch(1.0, "hangs")
            print(watcher.pid)
            time.sleep(1000)
    """)
    worker = int(process.stdout.readline())
    wait_for(lambda: {"hangs": True} in notes.all)
    process.kill()
    process.wait()
    wait_for(lambda: gone(worker))
    assert len(notes.closed) == 1


def test_child_of_multiprocessing_waits_for_its_worker(programs, notes):
    process = programs("""
        import multiprocessing, os
        import tensortap as tap
        from tests.watch.notes import Notes

        def train():
            watcher = tap.watch(None, Notes(os.environ["NOTES"], slow=0.02), rate=None)
            for i in range(5):
                watcher.catch(float(i), "x")

        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=train)
            child.start()
            child.join()
            raise SystemExit(child.exitcode)
    """)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert [r["value"] for r in notes.records] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(notes.closed) == 1


def test_daemon_finishes_after_the_program(programs, notes, tmp_path):
    process = programs("""
        import os
        import tensortap as tap
        from tests.watch.notes import Patient

        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                recorder = Patient(os.environ["NOTES"])
                watcher = tap.watch(
                    None, recorder, rate=None, daemon=True, start_method=method, timeout=100,
                    name=method,
                )
                watcher.catch(1.0, "x")
    """)
    assert process.wait(timeout=100) == 0  # although the worker waits for the file
    assert notes.all == []
    (tmp_path / "go").touch()
    wait_for(lambda: len(notes.closed) == 2)
    assert [r["value"] for r in notes.records] == [1.0, 1.0]
    wait_for(lambda: group_has_ended(process))


# -- the main module -------------------------------------------------------------------------


def test_script_without_a_guard_runs_once(programs, notes):
    process = programs("""
        import os
        import tensortap as tap
        from tests.watch.notes import Notes

        notes = Notes(os.environ["NOTES"])
        notes.write(run=__name__)
        with tap.watch(None, notes, rate=None) as watcher:
            watcher.catch(1.0, "x")
    """)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert [r["value"] for r in notes.records] == [1.0]
    assert [line["run"] for line in notes.all if "run" in line] == ["__main__"]
    assert len(notes.closed) == 1


# -- films -----------------------------------------------------------------------------------
