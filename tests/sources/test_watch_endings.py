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
from tests.sources.notes import Notes

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
from tests.sources.notes import Notes

if __name__ == "__main__":
    watcher = tap.watch(
        None, Notes(os.environ["NOTES"], slow=0.02), rate=None,
        start_method=os.environ.get("METHOD", "spawn"),
    )
    for i in range(20):
        watcher.catch(np.full(5000, float(i)), "x")  # large enough for the arena
"""
FLUSHED = """
    assert watcher._workers[0].queue.flush(60)  # sent, not yet processed
    print(watcher.pids[0])
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
    assert "tensortap" not in err.replace("tensortap/", "")


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
    process = programs(HEAD + "    print(watcher.pids[0])\n    time.sleep(1000)")
    assert process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert err.count("KeyboardInterrupt") == 1, err
    check_complete(notes)


@pytest.mark.parametrize(
    ("method", "number"),
    [("spawn", signal.SIGKILL), ("fork", signal.SIGTERM), ("forkserver", signal.SIGKILL)],
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
        from tests.sources.notes import Trouble

        if __name__ == "__main__":
            watcher = tap.watch(None, Trouble(os.environ["NOTES"]), rate=None, timeout=4.0)
            watcher.catch(1.0, "fine")
            watcher.catch(1.0, "hangs")
            print(watcher.pids[0])
            time.sleep(1000)
    """)
    worker = int(process.stdout.readline())
    wait_for(lambda: {"hangs": True} in notes.all)
    process.kill()
    process.wait()
    wait_for(lambda: gone(worker))
    assert len(notes.closed) == 1


def test_nothing_remains_when_program_and_worker_are_killed(programs, notes):
    before = set(os.listdir("/dev/shm"))
    process = programs(HEAD + FLUSHED)
    worker = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    process.wait()
    wait_for(lambda: gone(worker))
    assert group_has_ended(process)
    assert set(os.listdir("/dev/shm")) <= before


def test_child_of_multiprocessing_waits_for_its_worker(programs, notes):
    process = programs("""
        import multiprocessing, os
        import tensortap as tap
        from tests.sources.notes import Notes

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
        import os, time
        import tensortap as tap
        from tests.sources.notes import Notes

        class Patient(Notes):
            def __call__(self, record):
                while not os.path.exists("go"):
                    time.sleep(0.02)
                super().__call__(record)

        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                recorder = Patient(os.environ["NOTES"])
                watcher = tap.watch(
                    None, recorder, rate=None, daemon=True, start_method=method, timeout=100
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

SCRIPT = """
import os
import tensortap as tap
from tests.sources.notes import Notes

notes = Notes(os.environ["NOTES"])

def mine(record):
    notes(record)

def the_end():
    notes.close()

notes.write(run=__name__)
watcher = tap.watch(None, on_record=mine, on_close=the_end, rate=None)
watcher.catch(1.0, "x")
watcher.close()
notes.write(trained=os.getpid())
"""


@pytest.mark.parametrize(
    ("how", "init", "runs"),
    [
        # the worker reads the script up to the first tap.init or tap.watch
        ((), "", ["__main__", "__mp_main__"]),
        (("-m", "train"), "tap.init('runs')\n", ["__main__"]),
    ],
)
def test_script_without_a_guard_trains_once(programs, notes, tmp_path, how, init, runs):
    process = programs(SCRIPT.replace("notes.write(run", f"{init}notes.write(run"), *how)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert [r["value"] for r in notes.records] == [1.0]
    assert len(notes.closed) == 1
    assert [line["trained"] for line in notes.all if "trained" in line] == [process.pid]
    assert [line["run"] for line in notes.all if "run" in line] == runs
    assert len(list(tmp_path.glob("runs/*"))) == bool(init)


def test_script_is_not_read_if_the_worker_needs_nothing_from_it(programs, notes):
    process = programs(SCRIPT.replace("on_record=mine, on_close=the_end", "recorder=notes"))
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert [line["run"] for line in notes.all if "run" in line] == ["__main__"]
    assert len(notes.closed) == 1


@pytest.mark.parametrize("how", [(), ("-m", "train")])
def test_function_of_a_script_in_a_spawned_process(programs, notes, how):
    process = programs("""
        import multiprocessing, os
        import tensortap as tap
        from tests.sources.notes import Notes

        def mine(record):
            Notes(os.environ["NOTES"])(record)

        def train():
            with tap.watch(None, on_record=mine, rate=None) as watcher:
                watcher.catch(1.0, "x")

        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=train)
            process.start()
            process.join()
    """, *how)  # fmt: skip
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert [r["value"] for r in notes.records] == [1.0], err


def test_function_of_a_script_under_torch_spawn(programs, notes):
    process = programs("""
        import os
        import torch
        import torch.multiprocessing as mp
        import tensortap as tap
        from tests.sources.notes import Notes

        def rec(r):
            Notes(os.environ["NOTES"])(r)

        def train(rank):
            m = torch.nn.Linear(3, 2)
            tap.watch({"m": m}, on_record=rec, rate=None)
            for _ in range(5):
                m(torch.full((1, 3), float(rank))).sum().backward()

        if __name__ == "__main__":
            mp.spawn(train, nprocs=2)
            print("trained")
    """)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (0, "trained\n"), err
    assert "Error" not in err
    assert [r["name"] for r in notes.records] == ["m"] * 10, err


def test_reports_a_function_that_is_defined_too_late_in_a_script(programs, notes):
    late = SCRIPT.replace("def mine", "tap.init('runs')\n\ndef mine")
    process = programs(late)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err  # training continued
    assert "define on_record above it" in err
    assert [line["trained"] for line in notes.all if "trained" in line] == [process.pid]


def test_error_for_functions_of_an_interactive_session(programs, notes):
    process = programs("", "-c", textwrap.dedent("""
        import tensortap as tap
        def mine(record): pass
        try:
            tap.watch(None, mine)
        except tap.TensortapError as error:
            print(error)
    """))  # fmt: skip
    out, err = process.communicate(timeout=100)
    assert "put them into a module, or use start_method='fork'" in out, err


def test_forkserver_reports_a_missing_guard(programs, notes):
    process = programs(SCRIPT.replace("rate=None", "rate=None, start_method='forkserver'"))
    _, err = process.communicate(timeout=100)
    assert "if __name__ == '__main__'" in err
    assert len([line for line in notes.all if "trained" in line]) == 1


# -- films -----------------------------------------------------------------------------------

FILMS = """
import os, time
import numpy as np
import tensortap as tap

if __name__ == "__main__":
    watcher = tap.watch(None, tap.Recorder("films", size=(160, 120)), rate=None)
    for step in range(12):
        watcher.catch(np.eye(6, k=step % 6), "fc")
"""


def frames(path):
    import av

    with av.open(str(path)) as film:
        return sum(1 for _ in film.decode(video=0))


def test_film_is_complete_when_the_program_is_killed(programs, tmp_path):
    ending = "    print(watcher._workers[0].queue.flush(60))\n    time.sleep(1000)"
    process = programs(FILMS + ending)
    assert process.stdout.readline() == "True\n"
    process.kill()
    process.wait()
    wait_for(lambda: group_has_ended(process))
    (film,) = (tmp_path / "films").iterdir()
    assert "rank0-cpu" in film.name
    assert frames(film) == 12


def test_film_of_a_killed_worker_plays(programs, tmp_path):
    process = programs(
        FILMS + "    print(watcher.flush(60), watcher.pids[0])\n    time.sleep(1000)"
    )
    done, worker = process.stdout.readline().split()
    assert done == "True"
    os.kill(int(worker), signal.SIGKILL)
    wait_for(lambda: gone(int(worker)))
    (film,) = (tmp_path / "films").iterdir()
    assert frames(film) >= 11  # the duration of the last frame was not known yet
