"""`dump`: one plain file per object, in the folder of the run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from tensortap import values as arrays
from tensortap.capture.ledger import ERROR
from tensortap.capture.names import CallSites
from tensortap.capture.pipeline import pipeline
from tensortap.capture.queue import write_to
from tensortap.core import ranks
from tensortap.core.files import restrict
from tensortap.core.record import Kind, Record
from tensortap.rooms.dump.files import format_of
from tensortap.runs.folders import file_name
from tensortap.runs.init import OpenRun, could_not_open, current

_sites = CallSites("obj")


def dump(obj: Any, name: str | None = None, update_metadata: bool = True) -> Path | None:
    """Write an object to a file of its own in the run, now: ``tap.dump(output, "layer1")``.

    A torch tensor becomes a ``.pt`` file, an array ``.npy``, anything else ``.pkl``, unless
    `register_format` defines another format. A name that is used again gets a number; no file is
    overwritten. Returns the path, or None while capturing is off. If the object cannot be written
    (a full disk, an object that cannot be pickled), that is logged, the run lists it as missing,
    and training continues; ``TENSORTAP_STRICT=1`` raises.
    """
    if not pipeline.enabled:
        return None
    if could_not_open():
        pipeline.ledger.drop_values(ERROR)
        return None
    run = current()
    if name is None:
        name = _sites.lookup(sys._getframe(1))
    start = time.perf_counter_ns()
    step, call = pipeline.counters.of(name).count(pipeline.clock.step)
    try:
        path = write_file(obj, name, run)
    except Exception as error:
        run.queue.sink.note_dropped(name, Kind.VALUE, step, run.rank)
        pipeline.fault(name, error, calls=1)
        return None
    kind, dtype, shape = arrays.describe(obj)
    record = Record(
        name, Kind.VALUE, step, call, pipeline.next_seq(), run.rank, run.world_size,
        time.time_ns(), kind, dtype, shape, tags={"file": path.name},
    )  # fmt: skip
    write_to([run.queue], record, 0)
    pipeline.ledger.capture_small(0, time.perf_counter_ns() - start)
    for keeper in run.keepers if update_metadata else ():
        keeper.update()
    return path


_numbers: dict[tuple[Path, str], int] = {}  # file name in a run → number of the next file


def write_file(obj: Any, name: str, run: OpenRun) -> Path:
    """Write a temporary file, then link it under the first free name; return the path."""
    if not run.sink.is_intact():
        raise FileNotFoundError(f"{run.path} was removed or replaced")
    form = format_of(obj)
    rank = f"_rank{ranks.rank_and_world_size()[0]}" if run.world_size > 1 else ""
    draft = run.path / f".{os.getpid()}-{time.monotonic_ns()}{form.suffix}"
    try:
        form.save(obj, draft)
        restrict(draft)
        stem = file_name(name)
        # start at the last number: otherwise each file would test the names of all before it
        key = (run.path, f"{stem}{rank}{form.suffix}")
        number = _numbers.get(key, 0)
        while True:
            count = f"_{number:04d}" if number else ""
            path = run.path / f"{stem}{count}{rank}{form.suffix}"
            try:
                os.link(draft, path)  # unlike a rename, a link never overwrites
            except FileExistsError:
                number += 1
                continue
            if len(_numbers) >= 4096:
                _numbers.clear()
            _numbers[key] = number + 1
            return path
    finally:
        draft.unlink(missing_ok=True)
