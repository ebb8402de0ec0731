"""See the tensors of a running training job.

In the training program::

    import tensortap as tap

    tap.catch(loss, "loss", every=10)

In any other Python session: ``tap.serve()``, then ``tap.summary()``, ``tap.get("loss")``.
Importing this imports no framework and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tensortap._version import __version__
from tensortap.capture.catch import catch, catch_grad, disable, enable, flush, receipt, step
from tensortap.capture.receipt import Receipt
from tensortap.core import errors
from tensortap.core.errors import StopTraining, TensortapError
from tensortap.core.record import Kind, Record, Shard, Summary, TensorData
from tensortap.live import connections as _connections  # noqa: F401  it registers itself

if TYPE_CHECKING:
    from tensortap import alerts
    from tensortap.api.lookup import quantize_error, summarize
    from tensortap.api.open import open
    from tensortap.api.session import (
        close,
        describe,
        get,
        get_all,
        help,
        ingest_all,
        serve,
        status,
        summary,
    )
    from tensortap.page.view import view
    from tensortap.rooms import figures as viz
    from tensortap.rooms import integrations
    from tensortap.rooms.bisect.bisect import bisect
    from tensortap.rooms.bisect.graft import graft
    from tensortap.rooms.blackbox.blackbox import blackbox
    from tensortap.rooms.compare import testing
    from tensortap.rooms.compare.api import compare
    from tensortap.rooms.dump.dump import dump
    from tensortap.rooms.figures.logframe import read_logframe, validate_logframe
    from tensortap.rooms.ops.ops import ops
    from tensortap.rooms.trace.hdf5.callback import HDF5
    from tensortap.rooms.trace.hdf5.reader import read_hdf5
    from tensortap.rooms.trace.results import stack_padded_tensors
    from tensortap.rooms.trace.trace import trace
    from tensortap.rooms.track.track import track
    from tensortap.rooms.watch.films.recorder import Recorder
    from tensortap.rooms.watch.watch import list_probes, watch, watcher
    from tensortap.rooms.widths.coord_check import coord_check
    from tensortap.runs.init import finish, init, update_metadata
    from tensortap.runs.object_files import register_format
    from tensortap.values.view import array_of

# what pulls in heavier modules is looked up when it is first used
_LATER = {
    "HDF5": "tensortap.rooms.trace.hdf5.callback",
    "Recorder": "tensortap.rooms.watch.films.recorder",
    "alerts": "",
    "array_of": "tensortap.values.view",
    "bisect": "tensortap.rooms.bisect.bisect",
    "blackbox": "tensortap.rooms.blackbox.blackbox",
    "close": "tensortap.api.session",
    "compare": "tensortap.rooms.compare.api",
    "coord_check": "tensortap.rooms.widths.coord_check",
    "describe": "tensortap.api.session",
    "dump": "tensortap.rooms.dump.dump",
    "finish": "tensortap.runs.init",
    "get": "tensortap.api.session",
    "get_all": "tensortap.api.session",
    "graft": "tensortap.rooms.bisect.graft",
    "help": "tensortap.api.session",
    "ingest_all": "tensortap.api.session",
    "init": "tensortap.runs.init",
    "list_probes": "tensortap.rooms.watch.watch",
    "open": "tensortap.api.open",
    "ops": "tensortap.rooms.ops.ops",
    "quantize_error": "tensortap.api.lookup",
    "read_hdf5": "tensortap.rooms.trace.hdf5.reader",
    "read_logframe": "tensortap.rooms.figures.logframe",
    "register_format": "tensortap.runs.object_files",
    "serve": "tensortap.api.session",
    "stack_padded_tensors": "tensortap.rooms.trace.results",
    "status": "tensortap.api.session",
    "summarize": "tensortap.api.lookup",
    "summary": "tensortap.api.session",
    "testing": "",
    "trace": "tensortap.rooms.trace.trace",
    "track": "tensortap.rooms.track.track",
    "update_metadata": "tensortap.runs.init",
    "validate_logframe": "tensortap.rooms.figures.logframe",
    "view": "tensortap.page.view",
    "viz": "",
    "watch": "tensortap.rooms.watch.watch",
    "watcher": "tensortap.rooms.watch.watch",
}

__all__ = [
    "HDF5",
    "Kind",
    "Receipt",
    "Record",
    "Recorder",
    "Shard",
    "StopTraining",
    "Summary",
    "TensorData",
    "TensortapError",
    "__version__",
    "alerts",
    "array_of",
    "bisect",
    "blackbox",
    "catch",
    "catch_grad",
    "close",
    "compare",
    "coord_check",
    "describe",
    "disable",
    "dump",
    "enable",
    "errors",
    "finish",
    "flush",
    "get",
    "get_all",
    "graft",
    "help",
    "ingest_all",
    "init",
    "integrations",
    "list_probes",
    "open",
    "ops",
    "quantize_error",
    "read_hdf5",
    "read_logframe",
    "receipt",
    "register_format",
    "serve",
    "stack_padded_tensors",
    "status",
    "step",
    "summarize",
    "summary",
    "testing",
    "trace",
    "track",
    "update_metadata",
    "validate_logframe",
    "view",
    "viz",
    "watch",
    "watcher",
]


def __getattr__(name: str) -> Any:
    if name == "integrations":
        return importlib.import_module("tensortap.rooms.integrations")
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module 'tensortap' has no attribute {name!r}")
    if not module:  # a module of that name
        return importlib.import_module(f"tensortap.{name}")
    found = globals()[name] = getattr(importlib.import_module(module), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
