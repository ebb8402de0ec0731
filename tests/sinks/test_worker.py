"""A worker process and the queue to it: real processes, and every way in which they can end."""

from __future__ import annotations

import functools
import logging
import os
import signal
import time

import pytest

import tensortap as tap
from tensortap.record import Kind
from tensortap.sinks import launch
from tensortap.sinks import worker as workers
from tests.processes import gone, wait_for
from tests.sinks.contract import SinkContract, record
from tests.sources.notes import Notes, Trouble, note, note_the_end


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TENSORTAP_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture
def start(tmp_path):
    """A watcher without targets; what it is given by hand goes to its worker."""
    started = []

    def start(recorder, **options):
        options = {"rate": None, "start_method": "fork", **options}
        started.append(tap.watch(None, recorder, **options))
        return started[-1]

    yield start
    for watcher in started:
        watcher.close(5)


@pytest.fixture
def notes(tmp_path):
    return Notes(tmp_path / "notes")


@pytest.fixture
def trouble(tmp_path):
    return Trouble(tmp_path / "notes")


class TestContract(SinkContract):
    """What every sink promises; one that sees the records after they have been processed."""

    @pytest.fixture
    def queue(self, start, notes):
        self.worker = start(notes)._workers[0]
        return self.worker.queue

    def arrived(self, queue):
        if queue.accepting:  # a ticket says that the worker has it, not that it was processed
            assert self.worker.flush(60)
        else:
            self.worker.close(60)
        return [_Seen(line) for line in queue.sink.task.recorder.records]


class _Seen:
    """A record as it was written down; equal to the one that was sent."""

    def __init__(self, line):
        self.name, self.value = line["name"], line["value"]

    def __eq__(self, other):
        return (self.name, self.value) == (other.name, other.value)


# -- how it is started -----------------------------------------------------------------------


@pytest.mark.parametrize("method", launch.START_METHODS)
def test_every_start_method(start, notes, method):
    watcher = start(notes, start_method=method)
    watcher.catch(3.5, "loss")
    assert watcher.flush(60)
    assert watcher.alive
    (seen,) = notes.records
    assert (seen["name"], seen["value"], seen["pid"]) == ("loss", 3.5, watcher.pids[0])
    assert seen["pid"] != os.getpid()
    watcher.close()
    assert not watcher.alive
    assert notes.closed == [seen["pid"]]
    assert gone(seen["pid"])


def test_plain_functions(start, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    watcher = start(note, on_close=note_the_end, start_method="spawn")
    watcher.catch(1.0, "x")
    watcher.close()
    notes = Notes(tmp_path / "notes")
    assert [r["value"] for r in notes.records] == [1.0]
    assert len(notes.closed) == 1


def test_a_recorder_and_an_end_of_the_users_own_are_both_closed(start, notes):
    watcher = start(notes, on_close=lambda: notes.write(mine=True))
    watcher.close()
    assert len(notes.closed) == 1
    assert {"mine": True} in notes.all


def test_a_lambda_cannot_be_spawned_and_it_says_what_can():
    with pytest.raises(tap.TensortapError, match="function of a module, or start_method='fork'"):
        tap.watch(on_record=lambda record: None)
    with pytest.raises(tap.errors.NotFound, match=r"call tap\.watch"):
        tap.watcher()


def test_a_lambda_can_be_forked(start, notes):
    watcher = start(lambda record: notes(record))
    watcher.catch(2.0, "x")
    assert watcher.flush(60)
    assert [r["value"] for r in notes.records] == [2.0]


def test_no_fork_after_cuda(monkeypatch):
    monkeypatch.setattr(launch, "cuda_is_initialized", lambda: True)
    with pytest.raises(tap.TensortapError, match=r"after CUDA was initialized.*'spawn'"):
        tap.watch(on_record=print, start_method="fork")
    monkeypatch.undo()
    assert not launch.cuda_is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_method": "thread"}, "spawn, fork, forkserver"),
        ({"rate": 0}, "rate=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"processes": 0}, "processes=0"),
        ({"what": "all"}, "outputs, gradients, both"),
        ({"rate": "fast"}, "so many records a second"),
        ({"processes": 1.5}, "a whole number"),
        ({"name": 5}, "by a string"),
        ({"transform": 5}, "a function of a tensor"),
        ({"ranks": 1.5}, "several of them, or 'all'"),
    ],
)
def test_options_that_cannot_be_are_said(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        tap.watch(on_record=print, **options)
    with pytest.raises(TypeError, match="needs a recorder"):
        tap.watch()
    with pytest.raises(TypeError, match="cannot be called"):
        tap.watch(None, "videos")
    with pytest.raises(TypeError, match=r"give one that was made, Recorder\(\.\.\.\)"):
        tap.watch(None, tap.Recorder)


# -- the user's code gets into trouble -------------------------------------------------------


def test_an_exception_is_reported_once_with_its_traceback_and_counted(start, trouble, caplog):
    watcher = start(trouble)
    for _ in range(5):
        watcher.catch(1.0, "raises")
        watcher.catch(1.0, "raises too")  # the same slip: no second traceback
        watcher.catch(2.0, "fine")
    assert watcher.flush(60)
    receipt = watcher.receipt
    assert (receipt.captured, receipt.processed, receipt.reasons["error"]) == (5, 5, 10)
    assert watcher.alive
    wait_for(lambda: caplog.records)
    (message,) = [r.getMessage() for r in caplog.records]
    assert "'raises'" in message
    assert "Traceback" in message
    assert "ValueError: no good: 0" in message
    assert "notes.py" in message
    assert "server/worker_process.py" not in message  # where it was called from is of no interest
    watcher.close()
    assert len(trouble.closed) == 1


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("exits", "exit code 7", ""),
        ("leaves", "exit code 1", "SystemExit: enough"),
        ("crashes", "signal 11", "Segmentation fault"),
    ],
)
def test_a_worker_that_dies_is_noticed_and_reported_once(start, trouble, caplog, name, how, words):
    watcher = start(trouble)
    watcher.catch(1.0, name)
    wait_for(lambda: not watcher.alive)
    wait_for(lambda: caplog.records)
    for _ in range(3):
        watcher.catch(1.0, "after")  # nobody is there, nothing is raised
    (message,) = [r.getMessage() for r in caplog.records]
    assert how in message
    assert "training continues without it" in message
    assert words in message
    if words:
        assert "notes.py" in message  # where it happened
    receipt = watcher.receipt
    assert (receipt.captured, receipt.dropped, receipt.reasons["disconnected"]) == (0, 4, 4)
    assert gone(watcher.pids[0])


def test_a_worker_that_dies_at_the_end_is_not_said_to_have_been_too_slow(start, trouble, caplog):
    trouble.slow = 0.3
    watcher = start(trouble)
    watcher.catch(1.0, "fine")
    watcher.catch(1.0, "exits")
    watcher.close()
    (message,) = [r.getMessage() for r in caplog.records]
    assert "died (exit code 7); 1 records were not processed" in message
    assert watcher.receipt.reasons["disconnected"] == 1


def test_a_worker_is_started_again_if_asked_but_not_for_ever(start, trouble, caplog):
    watcher = start(trouble, restart=True)
    pids = {watcher.pids[0]}
    for number in range(workers.RESTARTS):
        watcher.catch(1.0, "exits")
        wait_for(lambda: watcher.pids[0] not in pids and watcher.alive)
        pids.add(watcher.pids[0])
        watcher.catch(float(number), "fine")
        assert watcher.flush(60)
    assert [r["value"] for r in trouble.of("fine")] == [0.0, 1.0, 2.0]
    watcher.catch(1.0, "exits")
    wait_for(lambda: len(caplog.records) == workers.RESTARTS + 1)
    assert not watcher.alive
    assert len(pids) == workers.RESTARTS + 1
    receipt = watcher.receipt
    assert (receipt.captured, receipt.processed, receipt.dropped) == (3, 3, 4)


def test_a_killed_worker_is_noticed(start, notes, caplog):
    watcher = start(notes, start_method="spawn")
    watcher.catch(1.0, "x")
    assert watcher.flush(60)
    os.kill(watcher.pids[0], signal.SIGKILL)
    wait_for(lambda: not watcher.alive)
    wait_for(lambda: caplog.records)
    assert "signal 9" in caplog.text


def test_a_function_that_cannot_be_found_in_the_worker_is_said(start, caplog, tmp_path):
    # pickled by name, and gone by the time the worker looks for it
    module = tmp_path / "only_here.py"
    module.write_text("def f(record): pass\n")
    import sys

    sys.path.insert(0, str(tmp_path))
    try:
        import only_here
    finally:
        sys.path.remove(str(tmp_path))
    watcher = start(only_here.f, start_method="spawn")
    wait_for(lambda: not watcher.alive)
    wait_for(lambda: caplog.records)
    assert "No module named 'only_here'" in caplog.text


# -- slow workers ----------------------------------------------------------------------------


def test_a_slow_worker_never_makes_training_wait_and_nothing_goes_uncounted(start, notes):
    notes.slow = 0.002
    watcher = start(notes, rate=1e6, timeout=60)
    start_of = time.monotonic()
    for _ in range(3000):
        watcher.catch(0.0, "x")
    assert time.monotonic() - start_of < 3000 * notes.slow / 2
    watcher.catch(7.0, "last")
    watcher.close()
    receipt = watcher.receipt
    assert receipt.reasons["over budget"] == receipt.dropped > 0
    assert receipt.processed + receipt.dropped == 3001
    assert receipt.waiting == 0
    assert receipt.processed == len(notes.records)
    # the newest of a name is never the one that is given up
    assert notes.of("x")[-1]["step"] == 2999
    assert [r["value"] for r in notes.of("last")] == [7.0]


def test_a_stopped_worker_costs_no_more_memory_than_the_budget(start, notes, monkeypatch):
    import numpy as np

    monkeypatch.setenv("TENSORTAP_BUFFER", "4MB")
    watcher = start(notes)
    watcher.catch(0.0, "x")
    assert watcher.flush(60)
    os.kill(watcher.pids[0], signal.SIGSTOP)
    try:
        array = np.ones(100_000)
        for i in range(200):
            array[0] = i
            watcher.catch(array, "big")
        queue = watcher._workers[0].queue
        queued = queue.state.put - queue.state.got + queue.sink.pending
        assert queued <= 4e6 + array.nbytes + 1000  # one more when nothing else waits
        assert queue.ledger.reasons()["over budget"] > 150
    finally:
        os.kill(watcher.pids[0], signal.SIGCONT)
    watcher.close()
    assert notes.of("big")[-1]["step"] == 199
    assert notes.of("big")[-1]["value"] == 100_000 - 1 + 199


def test_a_worker_that_hangs_at_the_end_closes_its_files_and_is_left(start, trouble, caplog):
    watcher = start(trouble, timeout=3.0)
    watcher.catch(1.0, "before")
    watcher.catch(1.0, "hangs")
    wait_for(lambda: {"hangs": True} in trouble.all)
    watcher.catch(1.0, "behind")
    begin = time.monotonic()
    watcher.close()
    assert time.monotonic() - begin < 30
    assert len(trouble.closed) == 1
    assert gone(watcher.pids[0])
    assert watcher.receipt.reasons["disconnected"] == 2
    assert "did not process 2 records" in caplog.text


def test_who_waits_long_is_told_what_for(start, notes, caplog, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.1)
    notes.slow = 0.2
    watcher = start(notes)
    for i in range(4):
        watcher.catch(float(i), "x")
    watcher.close()
    assert len(notes.records) == 4
    (message,) = [r.getMessage() for r in caplog.records]
    assert "still has" in message
    assert "records to process; waiting" in message


def test_an_impatient_user_is_let_go_and_files_are_closed_all_the_same(start, notes, monkeypatch):
    watcher = start(notes)
    watcher.catch(1.0, "x")
    (worker,) = watcher._workers

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(worker.queue, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        watcher.close()
    wait_for(lambda: notes.closed)
    wait_for(lambda: gone(watcher.pids[0]))


def test_sigterm_is_no_reason_to_leave_files_open(start, notes):
    watcher = start(notes)
    watcher.catch(1.0, "x")
    assert watcher.flush(60)
    os.kill(watcher.pids[0], signal.SIGTERM)
    wait_for(lambda: notes.closed)
    wait_for(lambda: not watcher.alive)


def test_what_the_worker_says_is_in_the_log_of_the_training_process(start, caplog):
    watcher = start(functools.partial(divmod, 1))
    with caplog.at_level(logging.WARNING, "tensortap"):
        watcher.catch(1.0, "x")
        assert watcher.flush(60)
        wait_for(lambda: caplog.records)
    assert "TypeError" in caplog.text
    assert watcher.receipt.reasons["error"] == 1


def test_kinds_of_one_name_have_queues_of_their_own():
    from tensortap.server.inbox import Inbox

    inbox = Inbox(1 << 20, 2)
    inbox.write([record("x", i) for i in range(5)])
    inbox.write([record("x", 9, kind=Kind.GRADIENT)])
    assert [inbox.take(0).value for _ in range(3)] == [3, 4, 9]
    assert inbox.take(0) is None
    assert (inbox.replaced, inbox.written, inbox.nbytes, len(inbox)) == (3, 6, 0, 0)


def test_over_the_bound_the_most_repeated_name_gives_way():
    from tensortap.server.inbox import Inbox

    inbox = Inbox(5000, 100)
    inbox.write([record("rare", 1)])
    inbox.write([record("often", i) for i in range(20)])
    left = []
    while (found := inbox.take(0)) is not None:
        left.append((found.name, found.value))
    assert left[0] == ("rare", 1)
    assert left[-1] == ("often", 19)
    assert inbox.replaced == 21 - len(left) > 5
