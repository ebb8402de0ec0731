"""Traced values as records: for the live session, and for the run."""

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
from tensortap.sources.tracing.iterations import Iteration
from tensortap.sources.tracing.kept import has_opaque

_calls: dict[str, tuple[int, int]] = {}  # name → the step of its last record, and how many then
_run: Any = None  # that they are counted in


def put(name: str, value: Any, iteration: Iteration, order: int) -> None:
    """Hand a value on to whoever listens."""
    start = time.perf_counter_ns()
    held = pipeline.clock.step
    step = iteration.call if held is None else held
    opened = run.opened()
    call = _call(name, step, opened)
    kind, dtype, shape = arrays.describe(value)
    adapter, shard = adapter_of(type(value)), None
    if adapter.local_shard is not None:  # of a tensor that is spread over ranks: this rank's part
        value, shard = adapter.local_shard(value)
    neutral, nbytes = _neutral(value)
    if isinstance(neutral, TensorData):
        dtype, shape = neutral.dtype, neutral.shape
    tags = {"mode": iteration.mode, "iteration": str(iteration.number), "binding": str(order)}
    if isinstance(value, Opaque):  # what could not be copied can't be pickled either
        kind = value.type
    elif opened is not None and has_opaque(neutral):
        try:
            tags["file"] = write_file(value, name, opened).name
        except Exception as error:  # what no pickle holds: type and repr are there
            pipeline.fault(name, error, "was not pickled")
    rank, world_size = ranks.rank_and_world_size()
    record = Record(
        name, Kind.LOCAL, step, call, pipeline.next_seq(), rank, world_size, time.time_ns(),
        kind, dtype, shape, shard, None, neutral, None, tags,
    )  # fmt: skip
    pipeline.put_captured(record, nbytes, start)


def _neutral(value: Any) -> tuple[Value, int]:
    """The value as a record holds it; of what no record can hold, type and repr."""
    if isinstance(value, Opaque):
        return value, 0
    try:
        return arrays.snapshot(value, pipeline.pool)
    except CaptureError:  # sparse, quantized, a container that contains itself
        return Opaque(type_name(type(value)), safe_repr(value)), 0


def _call(name: str, step: int, opened: Any) -> int:
    """How many records of the name there were in this step."""
    global _run
    if _run is not opened:
        _run = opened
        _calls.clear()
    last, count = _calls.get(name, (-1, 0))
    call = count if last == step else 0
    _calls[name] = (step, call + 1)
    return call
