"""Rows on runs on disk."""

from __future__ import annotations

import csv
import os
import pathlib
import shutil
import tempfile
import time

from bench.harness import Row, in_turns, time_of
from bench.live import _connect
from bench.processes import process, session

MIB4 = 4 << 20


def _folder() -> str:
    # on a disk beside the code, not on a tmpfs
    return tempfile.mkdtemp(prefix=".bench-", dir=pathlib.Path(__file__).parent)


def _no_server() -> None:
    os.environ["TENSORTAP_SERVER"] = "127.0.0.1:1"
    os.environ["TENSORTAP_BUFFER"] = "2GB"


def store() -> list[Row]:
    import numpy as np

    import tensortap as tap

    _no_server()
    folder = _folder()
    times = 64
    try:
        tap.init(folder)
        array = np.random.default_rng(0).random(MIB4 // 4, np.float32)
        raw = os.open(f"{folder}/raw", os.O_WRONLY | os.O_CREAT)
        counter = iter(range(1 << 40))

        def ours() -> float:
            os.sync()
            start = time.perf_counter()
            for _ in range(times):
                array[0] = next(counter)
                tap.catch(array, "big")
            assert tap.flush(60)
            return times * MIB4 / (time.perf_counter() - start)

        def base() -> float:
            os.sync()
            start = time.perf_counter()
            for _ in range(times):
                array[0] = next(counter)
                os.write(raw, array)
            return times * MIB4 / (time.perf_counter() - start)

        a, b = in_turns(7, ours, base)
        assert not tap.receipt().dropped
        tap.finish()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [Row("store of 4 MiB tensors ÷ raw write()", 0.7, False, a, b, unit="B/s")]


def scalars() -> list[Row]:
    import tensortap as tap

    _no_server()
    folder = _folder()
    count = 100_000
    try:
        tap.init(folder)
        tap.catch(0.0, "loss")
        tap.flush(10)

        def ours() -> float:
            start = time.perf_counter()
            for number in range(count):
                tap.catch(number * 0.5, "loss")
            assert tap.flush(60)
            return count / (time.perf_counter() - start)

        def base() -> float:
            start = time.perf_counter()
            with open(f"{folder}/log.csv", "w") as stream:
                writer = csv.writer(stream)
                for number in range(count):
                    writer.writerow(("loss", number, number * 0.5))
                    stream.flush()
            return count / (time.perf_counter() - start)

        a, b = in_turns(5, ours, base)
        assert not tap.receipt().dropped
        tap.finish()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [Row("100,000 scalars into a run ÷ csv, flushed per row", 0.25, False, a, b, unit="/s")]


def _write_million(folder: str) -> pathlib.Path:
    """Write a run with 1,000,000 records of 100 names and ten tensors of 1 MiB."""
    import numpy as np

    import tensortap as tap

    path = tap.init(folder)
    names = [f"layers.{i}.loss" for i in range(99)]
    big = np.zeros(1 << 18, np.float32)
    for step in range(10_101):
        for name in names:
            tap.catch(step * 0.5, name)
        if step % 1000 == 0:
            big[:] = step
            tap.catch(big, "big")
        if step % 500 == 0:
            tap.flush(60)
    tap.finish()
    return path


def _read_million(path: str) -> tuple[float, float]:
    """Return the seconds for open, names and one get, and the peak memory in bytes."""
    import resource

    import numpy
    import pyarrow.compute
    import pyarrow.parquet

    import tensortap as tap

    assert numpy
    assert pyarrow.parquet
    assert pyarrow.compute
    assert tap.open  # access it, so that its imports do not count
    start = time.perf_counter()
    run = tap.open(pathlib.Path(path))
    names = run.names()
    value = run.get("layers.7.loss", step=5000)
    seconds = time.perf_counter() - start
    assert len(names) == 100
    assert value == 2500.0
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _read_parquet(path: str) -> float:
    import pandas  # pq.read_table imports it, which is not reading
    import pyarrow.parquet as pq

    assert pandas
    start = time.perf_counter()
    for part in sorted(pathlib.Path(path, "records", "00000").glob("*.parquet")):
        pq.read_table(part)
    return time.perf_counter() - start


def million() -> list[Row]:
    import concurrent.futures
    import multiprocessing

    _no_server()
    folder = _folder()
    spawn = multiprocessing.get_context("spawn")

    def fresh(call, *args):  # one process each: memory and imports are separate
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
            return pool.submit(call, *args).result()

    try:
        path = str(fresh(_write_million, folder))
        ours, base, memory = [], [], 0.0
        for _ in range(5):
            seconds, peak = fresh(_read_million, path)
            ours.append(seconds)
            memory = max(memory, peak)
            base.append(fresh(_read_parquet, path))
        rows = [
            Row("open + names + get of 1,000,000 records ÷ reading the Parquet", 0.2, True,
                ours, base, note=f"peak memory {memory / 1e6:.0f} MB (limit 200)"),
        ]  # fmt: skip
        rows += _random_get(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def _random_get(path: str) -> list[Row]:
    from safetensors import safe_open

    import tensortap as tap

    run = tap.open(pathlib.Path(path))
    file = next(pathlib.Path(path, "tensors").rglob("*.safetensors"))
    handle = safe_open(file, "np")
    keys = [key for key in handle.keys() if not key.startswith("__pad")]  # noqa: SIM118
    steps = [int(key.partition("@")[2].partition(":")[0]) for key in keys]
    assert steps

    def ours() -> float:
        return time_of(lambda: [run.get("big", step=step) for step in steps]) / len(steps)

    def base() -> float:
        return time_of(lambda: [handle.get_tensor(key) for key in keys]) / len(keys)

    a, b = in_turns(21, ours, base)
    return [Row("random get of 1 MiB ÷ safetensors get_tensor", 3, True, a, b)]


def training_thread() -> list[Row]:
    import numpy as np

    import tensortap as tap
    from tensortap.capture.pipeline import pipeline as here

    folder = _folder()
    array = np.arange(64, dtype=np.float32)
    big = np.zeros(1 << 18, np.float32)

    def burst() -> float:
        seconds = time_of(lambda: [tap.catch(array, "small") for _ in range(200)]) / 200
        tap.flush(20)
        return seconds

    def large() -> float:
        big[0] += 1
        seconds = time_of(lambda: tap.catch(big, "large"))
        tap.flush(20)
        return seconds

    try:
        with process(session, "256MB") as pipe:
            _connect(pipe.recv())
            for _ in range(300):
                large()
            live_small, live_large = in_turns(51, burst, large)
        deadline = time.monotonic() + 20
        while here.on and time.monotonic() < deadline:
            tap.catch(0.0, "hello")
            time.sleep(0.05)
        tap.init(folder)
        for _ in range(20):
            large()
        run_small, run_large = in_turns(51, burst, large)
        tap.finish()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [
        Row("catch of a small array into a run ÷ into a session", 1.2, True, run_small, live_small),
        Row("catch of 1 MiB into a run ÷ into a session", 1.2, True, run_large, live_large),
    ]


ROWS = (store, scalars, million, training_thread)
