"""See the tensors of a running training job.

In the training program::

    import tensortap as tap

    tap.catch(loss, "loss", every=10)

In any other Python session: ``tap.serve()``, then ``tap.summary()``, ``tap.get("loss")``.
Importing this imports no framework and starts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensortap import alerts, errors
from tensortap._version import __version__
from tensortap.errors import StopTraining, TensortapError
from tensortap.receipt import Receipt
from tensortap.record import Kind, Record, Shard, Summary, TensorData
from tensortap.sources.catch import catch
from tensortap.sources.switches import disable, enable, flush, receipt, step

if TYPE_CHECKING:
    from tensortap import integrations, testing, viz
    from tensortap.arrays.view import array_of
    from tensortap.compare.verb import compare
    from tensortap.console.live import (
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
    from tensortap.console.open import open
    from tensortap.console.summarize import summarize
    from tensortap.formats.files import register_format
    from tensortap.formats.hdf5 import HDF5
    from tensortap.formats.hdf5_read import read_hdf5
    from tensortap.formats.logframe import read_logframe, validate_logframe
    from tensortap.sources.dump import dump
    from tensortap.sources.locals.stack import stack_padded_tensors
    from tensortap.sources.probes import list_probes
    from tensortap.sources.run import finish, init, update_metadata
    from tensortap.sources.trace import trace
    from tensortap.sources.track import track
    from tensortap.sources.watch import watch, watcher
    from tensortap.viz.films.recorder import Recorder
    from tensortap.web.verb import view

# what pulls in heavier modules is looked up when it is first used
_LATER = {
    "HDF5": "tensortap.formats.hdf5",
    "Recorder": "tensortap.viz.films.recorder",
    "array_of": "tensortap.arrays.view",
    "close": "tensortap.console.live",
    "compare": "tensortap.compare.verb",
    "describe": "tensortap.console.live",
    "dump": "tensortap.sources.dump",
    "finish": "tensortap.sources.run",
    "get": "tensortap.console.live",
    "get_all": "tensortap.console.live",
    "help": "tensortap.console.live",
    "ingest_all": "tensortap.console.live",
    "init": "tensortap.sources.run",
    "list_probes": "tensortap.sources.probes",
    "open": "tensortap.console.open",
    "read_hdf5": "tensortap.formats.hdf5_read",
    "read_logframe": "tensortap.formats.logframe",
    "register_format": "tensortap.formats.files",
    "serve": "tensortap.console.live",
    "stack_padded_tensors": "tensortap.sources.locals.stack",
    "status": "tensortap.console.live",
    "summarize": "tensortap.console.summarize",
    "summary": "tensortap.console.live",
    "testing": "",
    "trace": "tensortap.sources.trace",
    "track": "tensortap.sources.track",
    "update_metadata": "tensortap.sources.run",
    "validate_logframe": "tensortap.formats.logframe",
    "view": "tensortap.web.verb",
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
    "catch",
    "close",
    "compare",
    "describe",
    "disable",
    "dump",
    "enable",
    "errors",
    "finish",
    "flush",
    "get",
    "get_all",
    "help",
    "ingest_all",
    "init",
    "integrations",
    "list_probes",
    "open",
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
        import tensortap.integrations

        return tensortap.integrations
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module 'tensortap' has no attribute {name!r}")
    import importlib

    if not module:  # a module of that name
        return importlib.import_module(f"tensortap.{name}")
    found = globals()[name] = getattr(importlib.import_module(module), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
