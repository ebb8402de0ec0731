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

from tensortap import errors
from tensortap._version import __version__
from tensortap.errors import StopTraining, TensortapError
from tensortap.pipeline.receipt import Receipt
from tensortap.record import Kind, Record, Shard, Summary, TensorData
from tensortap.sources.catch import catch, catch_grad, disable, enable, flush, receipt, step

if TYPE_CHECKING:
    from tensortap import alerts, integrations, testing, viz
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
    from tensortap.compare.api import compare
    from tensortap.films.recorder import Recorder
    from tensortap.frameworks.view import array_of
    from tensortap.hdf5.callback import HDF5
    from tensortap.hdf5.reader import read_hdf5
    from tensortap.runs.object_files import register_format
    from tensortap.sources.bisect import bisect
    from tensortap.sources.blackbox import blackbox
    from tensortap.sources.coord_check import coord_check
    from tensortap.sources.dump import dump
    from tensortap.sources.graft import graft
    from tensortap.sources.init import finish, init, update_metadata
    from tensortap.sources.ops import ops
    from tensortap.sources.trace import trace
    from tensortap.sources.tracing.results import stack_padded_tensors
    from tensortap.sources.track import track
    from tensortap.sources.watch import list_probes, watch, watcher
    from tensortap.table.logframe_schema import read_logframe, validate_logframe
    from tensortap.web.view import view

# what pulls in heavier modules is looked up when it is first used
_LATER = {
    "HDF5": "tensortap.hdf5.callback",
    "Recorder": "tensortap.films.recorder",
    "alerts": "",
    "array_of": "tensortap.frameworks.view",
    "bisect": "tensortap.sources.bisect",
    "blackbox": "tensortap.sources.blackbox",
    "close": "tensortap.api.session",
    "compare": "tensortap.compare.api",
    "coord_check": "tensortap.sources.coord_check",
    "describe": "tensortap.api.session",
    "dump": "tensortap.sources.dump",
    "finish": "tensortap.sources.init",
    "get": "tensortap.api.session",
    "get_all": "tensortap.api.session",
    "graft": "tensortap.sources.graft",
    "help": "tensortap.api.session",
    "ingest_all": "tensortap.api.session",
    "init": "tensortap.sources.init",
    "list_probes": "tensortap.sources.watch",
    "open": "tensortap.api.open",
    "ops": "tensortap.sources.ops",
    "quantize_error": "tensortap.api.lookup",
    "read_hdf5": "tensortap.hdf5.reader",
    "read_logframe": "tensortap.table.logframe_schema",
    "register_format": "tensortap.runs.object_files",
    "serve": "tensortap.api.session",
    "stack_padded_tensors": "tensortap.sources.tracing.results",
    "status": "tensortap.api.session",
    "summarize": "tensortap.api.lookup",
    "summary": "tensortap.api.session",
    "testing": "",
    "trace": "tensortap.sources.trace",
    "track": "tensortap.sources.track",
    "update_metadata": "tensortap.sources.init",
    "validate_logframe": "tensortap.table.logframe_schema",
    "view": "tensortap.web.view",
    "viz": "",
    "watch": "tensortap.sources.watch",
    "watcher": "tensortap.sources.watch",
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
        return importlib.import_module("tensortap.integrations")
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module 'tensortap' has no attribute {name!r}")
    if not module:  # a module of that name
        return importlib.import_module(f"tensortap.{name}")
    found = globals()[name] = getattr(importlib.import_module(module), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
