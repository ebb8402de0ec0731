"""Records of a small training job, from which every figure can be drawn."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.alerts import Alert, record_of
from tensortap.capture.queue import Queue
from tensortap.capture.ticket import Ticket
from tensortap.core.record import Kind, Record
from tensortap.runs.folders import make_run
from tensortap.runs.sink import StoreSink
from tensortap.stats import summarize_array

HOSTILE = "</script><b>bold</b><img src=x onerror=\"document.title='owned'\">&amp;😀"
LAYERS = ["embed", "blocks.0.up", "blocks.0.down", HOSTILE, "output"]
STEPS = 12


def values(layer: int, step: int, kind: Kind) -> np.ndarray:
    """Return the values of a layer: they grow from step to step, and two have NaN or Inf."""
    rng = np.random.default_rng([layer, step, len(kind.value)])
    found = rng.standard_normal(256).astype("f4") * np.float32(1.5**step * 10.0**-layer)
    if (layer, step, kind) == (2, 7, Kind.ACTIVATION):
        found[:3] = np.nan
    if (layer, step, kind) == (4, 8, Kind.ACTIVATION):
        found[0] = np.inf
    return found


def training(steps=range(STEPS), ranks=1, layers=LAYERS) -> list[Record]:
    """Return records of activations, gradients, a loss, and one alert."""
    found = []

    def add(name, kind, step, rank, **fields):
        seq = sum(r.rank == rank for r in found)
        made = Record(name, kind, step, 0, seq, rank, ranks, 1_000_000 * step + seq, **fields)
        found.append(made)

    for step in steps:
        for rank in range(ranks):
            for number, name in enumerate(layers):
                for kind in (Kind.ACTIVATION, Kind.GRADIENT):
                    stats = summarize_array(values(number, step, kind) * (1 + rank))
                    head = {"type": "torch.nn.Linear", "dtype": "float32", "shape": (256,)}
                    add(name, kind, step, rank, **head, stats=stats)
            add("loss", Kind.METRIC, step, rank, value=1.0 / (1 + step) + rank)
            if step == 7:
                alert = Alert("nan", layers[2], Kind.ACTIVATION, 7, rank, layers[2], "3 NaN")
                seq = sum(r.rank == rank for r in found)
                found.append(record_of(alert, seq=seq, time_ns=7_500_000))
    return found


class RunWriter:
    """Writes records into a run, with one sink per rank."""

    def __init__(self, folder, ranks=1):
        self.path = make_run(folder, ranks)
        self._sinks = {}
        self.stores = {}

    def write(self, records):
        for record in records:
            if record.rank not in self._sinks:
                store = self.stores[record.rank] = StoreSink(self.path, record.rank)
                sink = Queue(store, budget=1 << 30, overflow="newest", name="test")
                self._sinks[record.rank] = sink
            self._sinks[record.rank].write(record, Ticket(1), 8)
        assert all(sink.flush(60) for sink in self._sinks.values())

    def close(self):
        for sink in self._sinks.values():
            sink.close(60)
        self._sinks = {}


@pytest.fixture
def writer(tmp_path):
    made = RunWriter(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def run_path(tmp_path_factory):
    """Write a complete run."""
    made = RunWriter(tmp_path_factory.mktemp("runs"))
    made.write(training())
    made.close()
    return made.path


@pytest.fixture(scope="session")
def table(run_path):
    from tensortap.table.table import table_of

    return table_of(run_path)
