"""Memory that a session touches before payloads arrive."""

from __future__ import annotations

import gc
import resource
import sys

import numpy as np
import pytest

from tensortap.core.history import History
from tensortap.core.record import Kind, Record, TensorData
from tensortap.live import reserve as module
from tensortap.live.reserve import Reserve, TouchedPiece
from tests.processes import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="touches memory on Linux")

MIB = 1 << 20


def faults_of(memory: np.ndarray) -> int:
    """Return how many page faults it takes to fill memory."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory[:] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(start <= address < end for start, end in spans)


@pytest.fixture
def history():
    return History(1 << 30)


@pytest.fixture
def reserve(history):
    reserve = Reserve(history)
    reserve.start()
    wait_for(lambda: len(reserve._ready) == module._READY)
    yield reserve
    reserve.close()


def test_memory_is_touched_in_advance(reserve):
    taken = [reserve.empty(MIB) for _ in range(32)]
    assert sum(map(faults_of, taken)) < 32 * 256 // 4  # of as many pages
    for number, memory in enumerate(taken):
        memory[:] = number
    assert [set(memory[::4096].tolist()) for memory in taken] == [{n} for n in range(32)]
    reserve.empty(MIB)
    wait_for(lambda: len(reserve._ready) == module._READY)  # replaced


def test_memory_is_freed_with_its_last_view():
    piece = TouchedPiece()
    taken = piece.take(MIB)
    address, view = taken.ctypes.data, taken[100:].data
    del taken
    gc.collect()
    view[:] = bytes(view.nbytes)
    assert is_mapped(address)
    del view
    assert not is_mapped(address)
    assert is_mapped(address + MIB)
    del piece
    assert not is_mapped(address + MIB)


def test_a_full_history_has_no_reserve(history, reserve):
    assert faults_of(reserve.empty(MIB)) < 64
    value = TensorData("numpy", "uint8", (1000 * MIB,), np.empty(1000 * MIB, np.uint8).data)
    history.write([Record("big", Kind.VALUE, 0, 0, 0, 0, 1, 0, value=value)])
    # not at once: the thread may be adding a last piece
    wait_for(lambda: reserve.empty(MIB).nbytes == MIB and not reserve._ready)
    assert reserve._current is None
