"""Rows beside what people would use instead: the same work in the same run, taken in turns.

A row is tensortap divided by the peer. A peer that cannot be imported gets a row that says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import pathlib
import shutil
import statistics
from collections.abc import Callable, Iterator

from bench.harness import Row, in_turns, time_of
from bench.runs import _folder

SIZES = {"1 MiB": 1 << 20, "16 MiB": 16 << 20}
CALL, STORED, DELIVERED = "call, {}", "stored, 16 × {}", "delivered, 16 × {}"
STEP, FIRST = "step of a 6-layer GPT", "which of 100 tensors of 1 MiB differs first"
FIRST_PART = "which part of two GPT forward passes differs first"
TIMES = 16


def peer(package: str, *works: str) -> Callable[[Callable[[], list[Row]]], Callable[[], list[Row]]]:
    """Name the package of a peer in its rows, with its version, or why it was not measured."""

    def decorate(measure: Callable[[], list[Row]]) -> Callable[[], list[Row]]:
        @functools.wraps(measure)
        def measured() -> list[Row]:
            try:
                version = importlib.metadata.version(package)
                rows = measure()
            except ImportError as error:
                reason = f"not measured: {error}"
            else:
                for row in rows:
                    row.peer = f"{package} {version}"
                return rows
            nothing = [math.nan], [math.nan]
            return [Row(f"{w} ÷ {package}", None, True, *nothing, note=reason, peer=package)
                    for w in works]  # fmt: skip

        return measured

    return decorate


@contextlib.contextmanager
def disk() -> Iterator[pathlib.Path]:
    folder = _folder()
    try:
        yield pathlib.Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def values(nbytes: int):
    import torch

    return torch.rand(nbytes // 4, generator=torch.Generator().manual_seed(0))


def _beside_memcpy(ours: list[float], base: list[float], copy: list[float]) -> str:
    a, b, c = (statistics.median(times) for times in (ours, base, copy))
    return f"{a / c:.1f} and {b / c:.1f} × memcpy"


def calls(
    ours: Callable[[object, str], object],
    settle: Callable[[], object],
    theirs: Callable[[object, str], object],
    their_settle: Callable[[], object],
    how: str,
    name: str,
) -> list[Row]:
    """Measure what a call costs the training thread, when nothing is waiting from before."""
    import numpy as np

    rows = []
    for size, nbytes in SIZES.items():
        x = values(nbytes)
        source, warm = x.numpy(), x.numpy().copy()

        def cost(call, wait, x=x) -> float:
            seconds = time_of(lambda: call(x, "value"))
            wait()
            return seconds

        a, b, c = in_turns(
            21, lambda cost=cost: cost(ours, settle), lambda cost=cost: cost(theirs, their_settle),
            lambda source=source, warm=warm: time_of(lambda: np.copyto(warm, source)),
        )  # fmt: skip
        note = f"{how}; {_beside_memcpy(a, b, c)}"
        rows.append(Row(f"{CALL.format(size)} ÷ {name}", None, True, a, b, note=note))
    return rows


def rates(
    work: str, ours: Callable[[object], object], theirs: Callable[[object], object], name: str
) -> list[Row]:
    """Measure bytes per second until everything has arrived."""
    rows = []
    for size, nbytes in SIZES.items():
        x = values(nbytes)

        def rate(call, x=x, nbytes=nbytes) -> float:
            os.sync()
            return TIMES * nbytes / time_of(lambda: call(x))

        a, b = in_turns(7, lambda rate=rate: rate(ours), lambda rate=rate: rate(theirs))
        rows.append(Row(f"{work.format(size)} ÷ {name}", None, False, a, b, "B/s"))
    return rows
