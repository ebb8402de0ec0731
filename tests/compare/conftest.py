"""Fixtures that write runs to compare."""

from __future__ import annotations

import numpy as np
import pytest

import tensortap as tap
from tensortap.capture.queue import Queue
from tensortap.capture.ticket import Ticket
from tensortap.core.record import Kind, Record
from tensortap.runs.folders import end_run, make_run
from tensortap.runs.sink import StoreSink


@pytest.fixture(autouse=True)
def no_live_session(monkeypatch, isolated_settings):
    monkeypatch.setenv("TENSORTAP_SERVER", "127.0.0.1:1")


@pytest.fixture
def write(tmp_path):
    """Write a run from (name, kind, step, value) or (…, rank); a value that is a Summary is one."""
    from tensortap.values.snapshot import borrow

    def write(records, folder="runs"):
        run = make_run(tmp_path / folder, 1)
        ranks = sorted({(*record, 0)[4] for record in records})
        for rank in ranks:
            sink = Queue(StoreSink(run, rank), budget=1 << 30, overflow="newest", name="test")
            seq = 0
            for record in records:
                name, kind, step, value, its_rank = (*record, 0)[:5]
                if its_rank != rank:
                    continue
                stats = value if isinstance(value, tap.core.record.Summary) else None
                neutral = None if stats is not None else borrow(value)
                array = isinstance(value, np.ndarray)
                dtype, shape = (str(value.dtype), value.shape) if array else ("", ())
                made = Record(
                    name, Kind(kind), step, 0, seq, rank, len(ranks), 0, "", dtype, shape,
                    None, None, neutral, stats,
                )  # fmt: skip
                sink.write(made, Ticket(1), 0)
                seq += 1
            sink.close()
        end_run(run)
        return run

    return write
