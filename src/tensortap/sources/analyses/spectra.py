"""Spectra of weights and updates, computed by a process of their own."""

from __future__ import annotations

import collections
import contextlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.frameworks.analyzing import TrainedParameter, TrainedParameters
from tensortap.record import Kind
from tensortap.sources.analyses import copies
from tensortap.sources.analyses.analysis import Analysis, Give
from tensortap.stats.norms import Movement, movements

PATIENCE = 20.0  # seconds that the end waits for the last results
_START = """
import sys
sys.path[0] = {root!r}
from tensortap.sources.analyses.spectra_worker import main
main({fd})
"""
_ALIGNMENT = 64


class MatrixPlace(NamedTuple):
    """The location of a weight before and after its update, for the worker."""

    name: str
    dtype: str
    rows: int
    columns: int
    old: int
    new: int


class SpectraWorker:
    """A process that shares memory with this one; it computes one job at a time."""

    def __init__(self, places: list[MatrixPlace], nbytes: int) -> None:
        self.places = {place.name: place for place in places}
        self.results: collections.deque[tuple[str, dict[str, float]]] = collections.deque()
        self.idle = threading.Event()
        self.idle.set()
        with _memory_file(nbytes) as fd:
            self._memory = mmap.mmap(fd, nbytes)
            root = str(Path(__file__).parents[3])
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START.format(root=root, fd=fd)], pass_fds=[fd], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        self._yield_to_training()
        self._reader = threading.Thread(target=self._read, name="tensortap-spectra", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            result = json.loads(line)
            if result is None:
                self.idle.set()
            else:
                self.results.append(tuple(result))
        self.idle.set()

    def _yield_to_training(self) -> None:
        """Let training go first from the beginning: imports take longer than anything else."""
        pid = self._process.pid
        try:
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        except (AttributeError, OSError):
            with contextlib.suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, pid, 19)

    def finish(self, timeout: float) -> bool:
        """Wait for the last results; return whether they have come.

        Nothing is left to yield to: on a busy machine, an idle process would wait for the others.
        """
        with contextlib.suppress(AttributeError, OSError):  # some systems allow only less priority
            scheduler, param = os.sched_getscheduler(0), os.sched_getparam(0)
            os.sched_setscheduler(self._process.pid, scheduler, param)
        return self.idle.wait(timeout)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def memory(self, offset: int, like: NDArray[Any]) -> NDArray[Any]:
        """Return an array over the shared memory."""
        return np.frombuffer(self._memory, like.dtype, like.size, offset)

    def compute(self, names: list[str]) -> None:
        """Begin with the matrices of these names; the memory is the worker's until it is idle."""
        assert self._process.stdin is not None
        self.idle.clear()
        job = json.dumps([self.places[name] for name in names])
        try:
            self._process.stdin.write(f"{job}\n")
            self._process.stdin.flush()
        except OSError:  # it has died
            self.idle.set()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # it has died
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self._process.kill()
        self._process.wait()
        self._reader.join()  # what it reads has ended
        self._process.stdout.close()


@contextlib.contextmanager
def _memory_file(nbytes: int) -> Any:
    """Give the descriptor of an anonymous file, closed afterwards."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tensortap-spectra")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
        yield fd
    finally:
        os.close(fd)


class Spectra(Analysis):
    """Gives singular values of weights and updates; a step that comes too early is left out."""

    def __init__(self, give: Give, unseen: dict[str, str]) -> None:
        super().__init__(give, unseen)
        self._worker: SpectraWorker | None = None
        self._died = False  # a worker, which is not started again
        self._copied: dict[str, str] = {}  # matrices whose old value is in memory: placements
        self._sent: tuple[int, dict[str, str]] = (0, {})  # step and placements of the last job

    def before_update(self, found: TrainedParameters) -> None:
        matrices = [each for each in found if _is_matrix(each)]
        if self._worker is not None and not self._worker.idle.is_set():
            return
        self._poll()
        if self._died:
            return
        worker = self._worker
        if worker is None or not all(_fits(worker, each) for each in matrices):
            worker = self._start(matrices)
        moves = []
        for each in matrices:
            if worker is not None and each.name in worker.places:
                place = worker.places[each.name]
                moves.append(Movement(each.value, keep=worker.memory(place.old, each.value)))
                self._copied[each.name] = each.placements
        movements(moves)

    def after_update(self, found: TrainedParameters) -> None:
        worker, moves = self._worker, []
        if worker is None or not self._copied:
            return
        for each in found:
            if each.name in self._copied:
                place = worker.places[each.name]
                moves.append(Movement(each.value, keep=worker.memory(place.new, each.value)))
        movements(moves)

    def end_step(self) -> None:
        self._poll()
        if self._worker is not None and self._copied:
            self._sent = self.current_step(), dict(self._copied)
            self._worker.compute(list(self._copied))
        self._copied.clear()

    def detach(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            if not worker.finish(PATIENCE):
                self.unseen["spectra"] = (
                    f"the worker had not finished {PATIENCE:g} seconds after the end of training"
                )
            self._give_results(worker)
            worker.close()
        super().detach()

    def _start(self, matrices: list[TrainedParameter]) -> SpectraWorker | None:
        """Start a worker for these matrices and those that it had."""
        before, self._worker = self._worker, None
        if before is not None:
            before.close()
        places, at = [], 0
        for each in matrices:
            size = -(-each.value.nbytes // _ALIGNMENT) * _ALIGNMENT
            if at + 2 * size > copies.LARGEST:
                self.unseen["spectra"] = copies.beyond()
                continue
            rows, columns = len(each.value), each.value[0].size
            dtype = each.value.dtype.name
            places.append(MatrixPlace(each.name, dtype, rows, columns, at, at + size))
            at += 2 * size
        if places:
            self._worker = SpectraWorker(places, at)
        return self._worker

    def _poll(self) -> None:
        worker = self._worker
        if worker is not None:
            self._give_results(worker)
            if not worker.alive:
                self._worker, self._died = None, True
                self.unseen["spectra"] = "the process that computes them has died"
                worker.close()

    def _give_results(self, worker: SpectraWorker) -> None:
        step, placements = self._sent
        while worker.results:
            name, numbers = worker.results.popleft()
            self.give(Kind.WEIGHT, name, numbers, placements.get(name, ""), step)


def _is_matrix(each: TrainedParameter) -> bool:
    shape = each.value.shape
    return len(shape) > 1 and shape[0] > 1 and each.value[0].size > 1


def _fits(worker: SpectraWorker, each: TrainedParameter) -> bool:
    """Return whether the worker has a place for a matrix, or had no room for it."""
    place = worker.places.get(each.name)
    if place is None:
        return True
    return (place.rows, place.columns, place.dtype) == (
        len(each.value), each.value[0].size, each.value.dtype.name,
    )  # fmt: skip
