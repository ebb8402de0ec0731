"""Runs to compare, written as a training would."""

from __future__ import annotations

import os

import numpy as np
import pytest

import tensortap as tap
from tensortap.formats.folders import end_run, make_run
from tensortap.record import Kind, Record
from tensortap.sinks.background import Background
from tensortap.sinks.store import Store
from tensortap.sinks.ticket import Ticket


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch, tmp_path_factory):
    for name in list(os.environ):
        if name.startswith("TENSORTAP_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.setenv("TENSORTAP_SERVER", "127.0.0.1:1")


@pytest.fixture
def write(tmp_path):
    """Write a run from (name, kind, step, value) or (…, rank); a value that is a Summary is one."""
    from tensortap.arrays.tree import borrow

    def write(records, folder="runs"):
        run = make_run(tmp_path / folder, 1)
        ranks = sorted({(*record, 0)[4] for record in records})
        for rank in ranks:
            sink = Background(Store(run, rank), budget=1 << 30, overflow="newest", name="test")
            seq = 0
            for record in records:
                name, kind, step, value, its_rank = (*record, 0)[:5]
                if its_rank != rank:
                    continue
                stats = value if isinstance(value, tap.Summary) else None
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
