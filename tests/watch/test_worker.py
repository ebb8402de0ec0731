"""Worker processes: how they start, fail and end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading

import pytest

import tensortap as tap
from tensortap.core.record import Kind
from tensortap.rooms.watch import watcher as watchers
from tests.capture.sink_contract import SinkContract, record
from tests.processes import gone, wait_for
from tests.watch.notes import Notes, Trouble, note, note_the_end

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TENSORTAP_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture
def start(tmp_path):
    """Start watchers without targets; tests hand values to their workers."""
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
    """The contract of all sinks; `arrived` returns what the worker has processed."""

    @pytest.fixture
    def queue(self, start, notes):
        self.watcher, self.notes = start(notes), notes
        return self.watcher._queue

    def arrived(self, queue):
        if queue.accepting:  # a ticket says that the worker has it, not that it was processed
            assert self.watcher.flush(60)
        else:
            # waits for all of it, although the queue's thread has ended, and not for longer
            self.watcher.close(10_000)
        return [_Seen(line) for line in self.notes.records]


class _Seen:
    """A record as the worker wrote it down; equal to the one that was sent."""

    def __init__(self, line):
        self.name, self.value = line["name"], line["value"]

    def __eq__(self, other):
        return (self.name, self.value) == (other.name, other.value)


# -- starting --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_records_with_every_start_method(start, notes, method):
    watcher = start(notes, start_method=method)
    watcher.catch(3.5, "loss")
    assert watcher.flush(60)
    assert watcher.alive
    (seen,) = notes.records
    assert (seen["name"], seen["value"], seen["pid"]) == ("loss", 3.5, watcher.pid)
    assert seen["pid"] != os.getpid()
    watcher.close()
    assert not watcher.alive
    assert notes.closed == [seen["pid"]]
    assert gone(seen["pid"])


def test_accepts_plain_functions(start, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    watcher = start(note, on_close=note_the_end, start_method="spawn")
    watcher.catch(1.0, "x")
    watcher.close()
    notes = Notes(tmp_path / "notes")
    assert [r["value"] for r in notes.records] == [1.0]
    assert len(notes.closed) == 1


def test_rejects_spawning_a_lambda_with_advice():
    with pytest.raises(tap.TensortapError, match=r"<lambda> cannot be sent .* start_method='fork'"):
        tap.watch(on_record=lambda record: None, start_method="spawn")
    with pytest.raises(tap.core.errors.NotFound, match=r"call tap\.watch"):
        tap.watcher()


def test_forks_with_a_lambda(start, notes):
    watcher = start(lambda record: notes(record), start_method=None)
    watcher.catch(2.0, "x")
    assert watcher.flush(60)
    assert [r["value"] for r in notes.records] == [2.0]


def test_rejects_fork_after_cuda(monkeypatch):
    import torch

    assert not torch.cuda.is_initialized()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(tap.TensortapError, match=r"after CUDA was initialized.*'spawn'"):
        tap.watch(on_record=print, start_method="fork")
    with pytest.raises(tap.TensortapError, match=r"<lambda> cannot be sent .*before CUDA"):
        tap.watch(on_record=lambda record: None)
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_method": "thread"}, "'spawn' or 'fork'"),
        ({"rate": 0}, "rate must be greater than 0, got 0"),
        ({"timeout": 0}, "timeout must be greater than 0, got 0"),
        ({"kind": "all"}, "kind must be 'outputs', 'gradients' or 'both'"),
        ({"rate": "fast"}, "rate must be a number"),
        ({"name": 5}, "name must be a string"),
        ({"transform": 5}, "transform must be a function"),
        ({"rank": 1.5}, "rank must be a rank, several ranks, or 'all'"),
    ],
)
def test_rejects_invalid_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        tap.watch(on_record=print, **options)
    with pytest.raises(TypeError, match="pass either recorder or on_record"):
        tap.watch()
    with pytest.raises(TypeError, match="on_record must be a function"):
        tap.watch(None, "videos")
    with pytest.raises(TypeError, match=r"got a class; pass Recorder\(\.\.\.\)"):
        tap.watch(None, tap.Recorder)


# -- the user's code gets into trouble -------------------------------------------------------


def test_logs_an_exception_once_with_its_traceback(start, trouble, caplog):
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
def test_logs_once_that_a_worker_died(start, trouble, caplog, name, how, words):
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
    assert gone(watcher.pid)


@pytest.fixture
def no_crash_handlers():
    """Undo what `faulthandler` has done, as Lightning does when it restores signal handlers."""
    libc, size = ctypes.CDLL(None), 256  # more than a struct sigaction has
    before = ctypes.create_string_buffer(size)
    assert libc.sigaction(signal.SIGSEGV, None, before) == 0
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    yield
    assert libc.sigaction(signal.SIGSEGV, before, None) == 0


def test_logs_a_crash_although_the_program_has_lost_its_handlers(
    start, trouble, caplog, no_crash_handlers
):
    assert faulthandler.is_enabled()
    watcher = start(trouble)
    watcher.catch(1.0, "crashes")
    wait_for(lambda: not watcher.alive)
    wait_for(lambda: caplog.records)
    assert "Segmentation fault" in caplog.text
    assert "notes.py" in caplog.text


def test_reports_a_worker_that_dies_while_closing_as_dead_not_slow(start, trouble, caplog):
    trouble.slow = 0.3
    watcher = start(trouble)
    watcher.catch(1.0, "fine")
    watcher.catch(1.0, "exits")
    watcher.close()
    # a busy machine may have warned before that closing takes long
    *_, message = [r.getMessage() for r in caplog.records]
    assert "died (exit code 7); 1 records were not processed" in message
    assert watcher.receipt.reasons["disconnected"] == 1


def test_reports_a_function_that_the_worker_cannot_import(start, caplog, tmp_path):
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


@contextlib.contextmanager
def stopped(watcher):
    """Stop the worker of a watcher."""
    os.kill(watcher.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(watcher.pid, signal.SIGCONT)


def test_a_slow_worker_does_not_block_training_and_every_record_is_counted(start, notes):
    notes.slow = 0.001
    watcher = start(notes, rate=1e6, timeout=200)
    watcher.catch(0.0, "first")
    assert watcher.flush(60)
    with stopped(watcher):
        for _ in range(3000):
            watcher.catch(0.0, "x")
        watcher.catch(7.0, "last")
    watcher.close()
    receipt = watcher.receipt
    assert receipt.reasons["over budget"] == receipt.dropped > 0
    assert receipt.processed + receipt.dropped == 3002
    assert receipt.waiting == 0
    assert receipt.processed == len(notes.records)
    # the newest of a name is never the one that is given up
    assert notes.of("x")[-1]["step"] == 2999
    assert [r["value"] for r in notes.of("last")] == [7.0]


@pytest.mark.fault("SIGSTOP of a worker")
def test_a_stopped_worker_costs_at_most_the_budget(start, notes, monkeypatch):
    import numpy as np

    monkeypatch.setenv("TENSORTAP_BUFFER", "4MB")
    watcher = start(notes)
    watcher.catch(0.0, "x")
    assert watcher.flush(60)
    with stopped(watcher):
        array = np.ones(100_000)
        for i in range(200):
            array[0] = i
            watcher.catch(array, "big")
        queue = watcher._queue
        queued = queue.state.put - queue.state.got + queue.sink.pending
        assert queued <= 4e6 + array.nbytes + 1000  # one more when nothing else waits
        assert queue.ledger.reasons()["over budget"] > 150
    watcher.close()
    assert notes.of("big")[-1]["step"] == 199
    assert notes.of("big")[-1]["value"] == 100_000 - 1 + 199


def test_a_worker_that_hangs_while_closing_still_closes_its_files(start, trouble, caplog):
    watcher = start(trouble, timeout=2.0)
    watcher.catch(1.0, "before")
    watcher.catch(1.0, "hangs")
    wait_for(lambda: {"hangs": True} in trouble.all)
    watcher.catch(1.0, "behind")
    watcher.close()
    assert len(trouble.closed) == 1
    assert gone(watcher.pid)
    assert watcher.receipt.reasons["disconnected"] == 2
    assert "did not process 2 records" in caplog.text


def test_warns_when_closing_takes_long(start, notes, caplog, monkeypatch):
    monkeypatch.setattr(watchers, "PATIENCE", 0.1)
    watcher = start(notes, timeout=200)
    watcher.catch(0.0, "x")
    assert watcher.flush(60)
    closing = threading.Thread(target=watcher.close)
    with stopped(watcher):
        for i in range(1, 4):
            watcher.catch(float(i), "x")
        closing.start()
        wait_for(lambda: caplog.records)
    closing.join()
    assert len(notes.records) == 4
    (message,) = [r.getMessage() for r in caplog.records]
    assert "still has" in message
    assert "records to process; waiting" in message


def test_files_are_closed_when_the_user_interrupts_close(start, notes, monkeypatch):
    watcher = start(notes)
    watcher.catch(1.0, "x")

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(watcher._queue, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        watcher.close()
    wait_for(lambda: notes.closed)
    wait_for(lambda: gone(watcher.pid))


def test_closes_files_on_sigterm(start, notes):
    watcher = start(notes)
    watcher.catch(1.0, "x")
    assert watcher.flush(60)
    os.kill(watcher.pid, signal.SIGTERM)
    wait_for(lambda: notes.closed)
    wait_for(lambda: not watcher.alive)


def test_inbox_distinguishes_kinds():
    from tensortap.rooms.watch.worker_process import Inbox

    inbox = Inbox(1 << 20, 2)
    inbox.write([record("x", i) for i in range(5)])
    inbox.write([record("x", 9, kind=Kind.GRADIENT)])
    assert [inbox.take(0).value for _ in range(3)] == [3, 4, 9]
    assert inbox.take(0) is None
    assert (inbox.dropped, inbox.written, inbox.nbytes, len(inbox)) == (3, 6, 0, 0)


def test_inbox_drops_the_most_repeated_name_first():
    from tensortap.rooms.watch.worker_process import Inbox

    inbox = Inbox(5000, 100)
    inbox.write([record("rare", 1)])
    inbox.write([record("often", i) for i in range(20)])
    left = []
    while (found := inbox.take(0)) is not None:
        left.append((found.name, found.value))
    assert left[0] == ("rare", 1)
    assert left[-1] == ("often", 19)
    assert inbox.dropped == 21 - len(left) > 5
