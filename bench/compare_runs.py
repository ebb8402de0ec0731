"""Rows on comparing two runs on disk."""

from __future__ import annotations

import pathlib
import shutil
import time

from bench.harness import Row, in_turns
from bench.runs import _folder, _no_server

GIB = 1 << 30


def _write(folder: str, seed: int, tensors: int, shape: int, noise: float) -> pathlib.Path:
    import numpy as np

    import tensortap as tap

    rng = np.random.default_rng(0)
    own = np.random.default_rng(seed)
    path = tap.init(folder)
    x = rng.standard_normal(shape, dtype=np.float32)
    for step in range(tensors):
        x[0] = step
        y = x + noise * own.standard_normal(1, dtype=np.float32) if noise else x
        tap.catch(y, "x")
        if step % 16 == 0:
            tap.flush(120)
    tap.finish()
    return path


def runs_that_differ() -> list[Row]:
    from tensortap.rooms.compare.runs import compare_runs

    _no_server()
    folder = _folder()
    try:
        # 2 GiB each; every tensor differs slightly, so that all must be read
        a, b = (_write(folder, seed, 128, 4 << 20, 1e-7) for seed in (1, 2))

        def ours() -> float:
            start = time.perf_counter()
            report = compare_runs(a, b, rtol=1e-4, atol=1e-4)
            assert report, str(report)
            assert report.compared == 128
            return time.perf_counter() - start

        def base() -> float:
            start = time.perf_counter()
            buffer = bytearray(4 << 20)
            for run in (a, b):
                for file in sorted(run.glob("tensors/*/*.safetensors")):
                    with file.open("rb", buffering=0) as stream:
                        while stream.readinto(buffer):
                            pass
            return time.perf_counter() - start

        x, y = in_turns(3, ours, base)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [Row("compare two runs of 2 GiB ÷ reading both files", 1.5, True, x, y)]


def equal_runs() -> list[Row]:
    import pandas
    import pyarrow.parquet as pq

    import tensortap as tap
    from tensortap.rooms.compare.runs import compare_runs

    assert pandas
    _no_server()
    folder = _folder()

    def write() -> pathlib.Path:
        import numpy as np

        path = tap.init(folder)
        x = np.zeros(5000, np.float32)
        for step in range(20_000):
            x[0] = step
            tap.catch(x, f"layers.{step % 50}.x")
            if step % 1000 == 0:
                tap.flush(60)
        tap.finish()
        return path

    try:
        a, b = write(), write()

        def ours() -> float:
            start = time.perf_counter()
            report = compare_runs(a, b)
            assert report, str(report)
            assert report.equal == 20_000
            return time.perf_counter() - start

        def base() -> float:
            start = time.perf_counter()
            for run in (a, b):
                for part in sorted(run.glob("records/*/*.parquet")):
                    pq.read_table(part)
            return time.perf_counter() - start

        x, y = in_turns(7, ours, base)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [Row("compare two equal runs of 20,000 records ÷ reading their tables", 2, True, x, y)]


ROWS = (runs_that_differ, equal_runs)
