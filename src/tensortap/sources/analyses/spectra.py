"""Spectra of weights and updates, computed by a process of their own."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensortap.frameworks.analyzing import TrainedParameter, TrainedParameters
from tensortap.record import Kind
from tensortap.sources.analyses.analysis import Analysis, Give
from tensortap.sources.analyses.copies import Copies, beyond
from tensortap.stats.norms import Movement, movements

PATIENCE = 20.0  # seconds that the end waits for the last results
_PIPE = 1 << 20  # bytes that the pipe holds, if possible: fewer threads wake up
_START = """
import sys
sys.path[0] = {root!r}
from tensortap.sources.analyses.spectra_worker import main
main()
"""


class SpectraWorker:
    """A process that reads matrices from a pipe and computes one job at a time."""

    def __init__(self) -> None:
        self.results: collections.deque[tuple[str, dict[str, float]]] = collections.deque()
        self.idle = threading.Event()
        self.idle.set()
        self._writer: threading.Thread | None = None
        root = str(Path(__file__).parents[3])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(root=root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or too many pipes
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE)
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

    def compute(self, matrices: Mapping[str, NDArray[Any]]) -> None:
        """Begin with matrices, each before and after its update, and return at once.

        They must not change until the worker is idle.
        """
        self.idle.clear()
        self._writer = threading.Thread(
            target=self._write, args=(dict(matrices),), name="tensortap-spectra-writer", daemon=True
        )
        self._writer.start()

    def _write(self, matrices: Mapping[str, NDArray[Any]]) -> None:
        with contextlib.suppress(OSError):  # the worker has died
            for name, both in matrices.items():
                rows, columns = both.shape[1], both[0, 0].size
                head = json.dumps([name, both.dtype.name, rows, columns])
                self._send(memoryview(f"{head}\n".encode()))
                self._send(both.reshape(-1).view(np.uint8).data)
            self._send(memoryview(b"null\n"))

    def _send(self, data: memoryview) -> None:
        """Write to the pipe itself: at the end of the program, nobody may wait for a buffer."""
        while data:
            data = data[os.write(self._pipe.fileno(), data) :]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdout is not None
        if not self.idle.is_set():
            self._process.kill()  # it would read all matrices first
        if self._writer is not None:
            self._writer.join()
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self._process.kill()
        self._process.wait()
        self._reader.join()  # what it reads has ended
        self._process.stdout.close()


class Spectra(Analysis):
    """Gives singular values of weights and updates; a step that comes too early is left out.

    Weights are copied before and after the update, into memory of this process: it is faster than
    shared memory the first time. A thread passes them on.
    """

    def __init__(self, give: Give, unseen: dict[str, str]) -> None:
        super().__init__(give, unseen)
        self._worker: SpectraWorker | None = None
        self._died = False  # a worker, which is not started again
        self._copies = Copies(times=2)
        self._begun: set[str] = set()  # matrices whose old value is copied
        self._copied: dict[str, NDArray[Any]] = {}  # those with both values
        self._placements: dict[str, str] = {}
        self._sent: tuple[int, dict[str, str]] = (0, {})  # step and placements of the last job

    def before_update(self, found: TrainedParameters) -> None:
        if self._worker is not None and not self._worker.idle.is_set():
            return
        self._poll()
        if self._died:
            return
        moves = []
        for each in found:
            if _is_matrix(each):
                both, _ = self._copies.of(each.name, each.value)
                if both is None:
                    self.unseen["spectra"] = beyond()
                    continue
                moves.append(Movement(each.value, keep=both[0]))
                self._begun.add(each.name)
        movements(moves)

    def after_update(self, found: TrainedParameters) -> None:
        moves = []
        for each in found:
            if each.name in self._begun:
                both, known = self._copies.of(each.name, each.value)
                if both is not None and known:
                    moves.append(Movement(each.value, keep=both[1]))
                    self._copied[each.name] = both
                    self._placements[each.name] = each.placements
        movements(moves)

    def end_step(self) -> None:
        self._poll()
        if self._copied and not self._died:
            self._sent = self.current_step(), dict(self._placements)
            if self._worker is None:
                self._worker = SpectraWorker()
            self._worker.compute(self._copied)
        self._begun.clear()
        self._copied.clear()
        self._placements.clear()

    def detach(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            if not worker.finish(PATIENCE):
                self.unseen["spectra"] = (
                    f"the worker had not finished {PATIENCE:g} seconds after the end of training"
                )
            self._give_results(worker)
            worker.close()
        self._copies.clear()
        super().detach()

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
