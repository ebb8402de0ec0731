"""However a training program ends, its workers process what they were sent, close and leave."""

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

ROOT = Path(__file__).parents[2]


@pytest.fixture
def notes(tmp_path):
    return Notes(tmp_path / "notes")


@pytest.fixture
def programs(tmp_path, notes):
    """Start programs as people do, in a process group of their own, as a terminal would."""
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


def nobody_is_left(process):
    """Whether the whole process group of a program has ended."""
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


def all_is_there(notes):
    assert [r["value"] for r in notes.records] == [5000.0 * i for i in range(20)]
    assert len(notes.closed) == 1
    return True


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("", 0, ""),
        ("    sys.exit(3)", 3, ""),
        ("    raise ValueError('mine')", 1, "ValueError: mine"),
        ("    os.kill(os.getpid(), signal.SIGINT); time.sleep(1000)", -2, "KeyboardInterrupt"),
    ],
)
def test_a_program_that_ends_by_itself_waits_for_its_films(programs, notes, ending, code, words):
    process = programs(HEAD + ending)
    _, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert words in err
    assert all_is_there(notes)
    assert nobody_is_left(process)
    assert "tensortap" not in err.replace("tensortap/", "")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ctrl_c_is_for_all_processes_and_films_are_complete(programs, notes, method):
    process = programs(HEAD + FLUSHED, METHOD=method)
    worker = int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert "KeyboardInterrupt" in err
    assert all_is_there(notes)
    assert gone(worker)


def test_ctrl_c_while_the_worker_is_only_starting(programs, notes):
    process = programs(HEAD + "    print(watcher.pids[0])\n    time.sleep(1000)")
    assert process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert err.count("KeyboardInterrupt") == 1, err
    assert all_is_there(notes)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_that_is_killed_leaves_no_worker_and_no_torn_file(
    programs, notes, method, number
):
    before = set(os.listdir("/dev/shm"))
    process = programs(HEAD + FLUSHED, METHOD=method)
    worker = int(process.stdout.readline())
    process.send_signal(number)
    process.wait()
    wait_for(lambda: notes.closed)
    assert all_is_there(notes)  # what had arrived has been processed first
    wait_for(lambda: gone(worker))
    wait_for(lambda: nobody_is_left(process))
    assert set(os.listdir("/dev/shm")) <= before


def test_a_child_that_outlives_the_program_holds_no_worker(programs, notes):
    lingering = FLUSHED.replace(
        "    print", "    child = os.fork()\n    if not child: time.sleep(1000)\n    print"
    )
    process = programs(HEAD + lingering)
    worker = int(process.stdout.readline())
    process.kill()
    process.wait()
    wait_for(lambda: gone(worker))
    assert all_is_there(notes)
    assert not nobody_is_left(process)  # the child is still there


def test_a_worker_that_hangs_leaves_within_its_time_when_the_program_is_killed(programs, notes):
    process = programs("""
        import os, time
        import tensortap as tap
        from tests.sources.notes import Trouble

        if __name__ == "__main__":
            watcher = tap.watch(None, Trouble(os.environ["NOTES"]), rate=None, timeout=2.0)
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


def test_nothing_is_left_when_both_are_killed(programs, notes):
    before = set(os.listdir("/dev/shm"))
    process = programs(HEAD + FLUSHED)
    worker = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    process.wait()
    wait_for(lambda: gone(worker))
    assert nobody_is_left(process)
    assert set(os.listdir("/dev/shm")) <= before


def test_a_process_of_multiprocessing_waits_for_its_films(programs, notes):
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


def test_a_daemon_is_not_waited_for_and_finishes_by_itself(programs, notes, tmp_path):
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
    assert process.wait(timeout=100) == 0  # although nobody has said "go"
    assert notes.all == []
    (tmp_path / "go").touch()
    wait_for(lambda: len(notes.closed) == 2)
    assert [r["value"] for r in notes.records] == [1.0, 1.0]
    wait_for(lambda: nobody_is_left(process))


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


@pytest.mark.parametrize("how", [(), ("-m", "train")])
def test_a_script_without_a_guard_trains_once(programs, notes, how):
    process = programs(SCRIPT, *how)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert [r["value"] for r in notes.records] == [1.0]
    assert len(notes.closed) == 1
    assert [line["trained"] for line in notes.all if "trained" in line] == [process.pid]
    # the worker reads it as far as the watching begins, because the function is defined there
    assert [line["run"] for line in notes.all if "run" in line] == ["__main__", "__mp_main__"]


def test_a_run_is_not_begun_twice(programs, notes, tmp_path):
    process = programs(SCRIPT.replace("notes.write(run", "tap.init('runs')\nnotes.write(run"))
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert len(notes.closed) == 1
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_script_is_not_read_if_nothing_of_it_is_needed(programs, notes):
    process = programs(SCRIPT.replace("on_record=mine, on_close=the_end", "recorder=notes"))
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert [line["run"] for line in notes.all if "run" in line] == ["__main__"]
    assert len(notes.closed) == 1


def test_a_function_that_comes_too_late_in_a_script_is_said(programs, notes):
    late = SCRIPT.replace("def mine", "tap.init('runs')\n\ndef mine")
    process = programs(late)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err  # training went on
    assert "define on_record above it" in err
    assert [line["trained"] for line in notes.all if "trained" in line] == [process.pid]


def test_an_interactive_session_is_told_what_to_do(programs, notes):
    process = programs("", "-c", textwrap.dedent("""
        import tensortap as tap
        def mine(record): pass
        try:
            tap.watch(None, mine)
        except tap.TensortapError as error:
            print(error)
    """))  # fmt: skip
    out, err = process.communicate(timeout=100)
    assert "put it into a module, or use start_method='fork'" in out, err


def test_the_fork_server_wants_a_guard_and_says_so(programs, notes):
    process = programs(SCRIPT.replace("rate=None", "rate=None, start_method='forkserver'"))
    _, err = process.communicate(timeout=100)
    assert "if __name__ == '__main__'" in err
    assert len([line for line in notes.all if "trained" in line]) == 1


# -- films -----------------------------------------------------------------------------------

FILMS = """
import os, time
import torch
import tensortap as tap

if __name__ == "__main__":
    assert not torch.cuda.is_available()
    fc = torch.nn.Linear(6, 6)
    watcher = tap.watch({"fc": fc}, tap.Recorder("films", size=(160, 120)), rate=None)
    for _ in range(12):
        fc(torch.randn(6, 6))
"""
FILMS_BY_HAND = """
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


@pytest.mark.parametrize(
    "ending", ["", "    print(watcher._workers[0].queue.flush(60))\n    time.sleep(1000)"]
)
def test_a_film_is_complete_when_the_program_ends_and_when_it_is_killed(programs, tmp_path, ending):
    process = programs((FILMS_BY_HAND if ending else FILMS) + ending)
    if ending:
        assert process.stdout.readline() == "True\n"
        process.kill()
        process.wait()
        wait_for(lambda: nobody_is_left(process))
    else:
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
    (film,) = (tmp_path / "films").iterdir()
    assert "rank0-cpu" in film.name
    assert frames(film) == 12


def test_a_film_plays_up_to_where_its_worker_was_killed(programs, tmp_path):
    process = programs(
        FILMS_BY_HAND + "    print(watcher.flush(60), watcher.pids[0])\n    time.sleep(1000)"
    )
    done, worker = process.stdout.readline().split()
    assert done == "True"
    os.kill(int(worker), signal.SIGKILL)
    wait_for(lambda: gone(int(worker)))
    (film,) = (tmp_path / "films").iterdir()
    assert frames(film) >= 11  # how long the last is shown was not known yet
