"""Rows on runs that are aligned by token."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench.harness import Row, in_turns, processor_time_of
from bench.runs import _folder, _no_server

_BATCHES, _ROWS, _LENGTH, _LAYERS = 62, 128, 128, 32


def align() -> list[Row]:
    import os

    import numpy as np

    import tensortap as tap

    _no_server()
    folder = _folder()
    random = np.random.default_rng(0)
    ids = random.integers(0, 50_000, (_BATCHES, _ROWS, _LENGTH))

    def write(name: str) -> Path:
        path = tap.init(f"{folder}/{name}")
        for batch in ids:
            for layer in range(_LAYERS):
                values = random.random(batch.shape, np.float32)
                tap.catch(values, f"layers.{layer}", tokens=batch)
            assert tap.flush(60)
        assert not tap.receipt().dropped
        tap.finish()
        return path

    def read() -> None:
        for run in runs:
            reader = tap.open(run).reader
            for _, records in reader.by_name(reader.names()):
                for record in records:
                    reader.load(record)

    def read_raw() -> None:
        for run in runs:
            for path in filter(os.path.isfile, run.rglob("*")):
                path.read_bytes()

    try:
        runs = [write("a"), write("b")]
        calls = (lambda: tap.align(*runs), read, read_raw)
        timed = [lambda call=call: processor_time_of(call) for call in calls]
        ours, records, raw = in_turns(5, *timed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    name = "align of 1,000,000 tokens × 32 layers, processor time"
    return [
        Row(f"{name} ÷ reading the records", 3, True, ours, records),
        Row(f"{name} ÷ reading the bytes", 20, True, ours, raw),
    ]


ROWS = (align,)
