"""Traced values as records of kind Local, for the run and the live session."""

from __future__ import annotations

import time
from typing import Any

from tensortap import frameworks as arrays
from tensortap import ranks
from tensortap.errors import CaptureError
from tensortap.frameworks.adapters import adapter_of
from tensortap.frameworks.protocol import type_name
from tensortap.frameworks.scalars import safe_repr
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind, Opaque, Record, TensorData, Value
from tensortap.sources import init as run
from tensortap.sources.dump import write_file
from tensortap.sources.tracing.copies import has_opaque
from tensortap.sources.tracing.iterations import Iteration

_calls: dict[str, tuple[int, int]] = {}  # name → step of its last record, records in that step
_run: Any = None  # the run in which they are counted


def put_local(name: str, value: Any, iteration: Iteration, order: int) -> None:
    """Make a record of a traced value and queue it."""
    start = time.perf_counter_ns()
    step = iteration.call if pipeline.clock.step is None else pipeline.clock.step
    opened = run.opened()
    call = _call_in_step(name, step, opened)
    kind, dtype, shape = arrays.describe(value)
    adapter, shard = adapter_of(type(value)), None
    if adapter.local_shard is not None:
        value, shard = adapter.local_shard(value)
    snapshot, nbytes = _snapshot(value)
    if isinstance(snapshot, TensorData):
        dtype, shape = snapshot.dtype, snapshot.shape
    tags = {"mode": iteration.mode, "iteration": str(iteration.number), "binding": str(order)}
    if isinstance(value, Opaque):  # it could not be copied, so it cannot be pickled
        kind = value.type
    elif opened is not None and has_opaque(snapshot):
        try:
            tags["file"] = write_file(value, name, opened).name
        except Exception as error:  # the record has its type and repr
            pipeline.fault(name, error, "was not pickled")
    rank, world_size = ranks.rank_and_world_size()
    record = Record(
        name, Kind.LOCAL, step, call, pipeline.next_seq(), rank, world_size, time.time_ns(),
        kind, dtype, shape, shard, None, snapshot, None, tags,
    )  # fmt: skip
    pipeline.put_captured(record, nbytes, start)


def _snapshot(value: Any) -> tuple[Value, int]:
    """Return a snapshot, or type and repr of a value that no record can hold."""
    if isinstance(value, Opaque):
        return value, 0
    try:
        return arrays.snapshot(value, pipeline.pool)
    except CaptureError:  # sparse, quantized, a container that contains itself
        return Opaque(type_name(type(value)), safe_repr(value)), 0


def _call_in_step(name: str, step: int, opened: Any) -> int:
    """Return how many earlier records of the name there are in this step of the run."""
    global _run
    if _run is not opened:
        _run = opened
        _calls.clear()
    last, count = _calls.get(name, (-1, 0))
    call = count if last == step else 0
    _calls[name] = (step, call + 1)
    return call
