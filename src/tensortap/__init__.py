"""See the tensors of a running training job.

In the training program::

    import tensortap as tap

    tap.catch(loss, "loss", every=10)

In any other Python session: ``tap.serve()``, then ``tap.summary()``, ``tap.get("loss")``.
Importing this imports no framework and starts nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tensortap._version import __version__
from tensortap.capture.catch import catch, catch_grad, enable, flush, receipt, step
from tensortap.core.errors import StopTraining, TensortapError
from tensortap.live import connections as _connections  # noqa: F401  it registers itself

if TYPE_CHECKING:
    from tensortap import alerts, rooms
    from tensortap.api.open import open
    from tensortap.api.session import get, get_all, help, serve, status, summary
    from tensortap.page.view import view
    from tensortap.rooms import figures as viz
    from tensortap.rooms.bisect.bisect import bisect
    from tensortap.rooms.blackbox.blackbox import blackbox
    from tensortap.rooms.compare.api import compare
    from tensortap.rooms.dump.dump import dump
    from tensortap.rooms.films.recorder import Recorder
    from tensortap.rooms.ops.ops import ops
    from tensortap.rooms.trace.hdf5.callback import HDF5
    from tensortap.rooms.trace.trace import trace
    from tensortap.rooms.track.track import track
    from tensortap.rooms.watch.watch import watch, watcher
    from tensortap.runs.init import finish, init

# Verbs that pull in heavier modules are imported when they are first used. The verb of a room has
# a line here, one above and one in `__all__`; nothing else in the spine names the room. What else a
# room has is in its package, such as `tap.rooms.trace.read_hdf5`.
_LATER = {
    "HDF5": "tensortap.rooms.trace.hdf5.callback",
    "Recorder": "tensortap.rooms.films.recorder",
    "bisect": "tensortap.rooms.bisect.bisect",
    "blackbox": "tensortap.rooms.blackbox.blackbox",
    "compare": "tensortap.rooms.compare.api",
    "dump": "tensortap.rooms.dump.dump",
    "finish": "tensortap.runs.init",
    "get": "tensortap.api.session",
    "get_all": "tensortap.api.session",
    "help": "tensortap.api.session",
    "init": "tensortap.runs.init",
    "open": "tensortap.api.open",
    "ops": "tensortap.rooms.ops.ops",
    "serve": "tensortap.api.session",
    "status": "tensortap.api.session",
    "summary": "tensortap.api.session",
    "trace": "tensortap.rooms.trace.trace",
    "track": "tensortap.rooms.track.track",
    "view": "tensortap.page.view",
    "watch": "tensortap.rooms.watch.watch",
    "watcher": "tensortap.rooms.watch.watch",
}
_MODULES = {
    "alerts": "tensortap.alerts",
    "rooms": "tensortap.rooms",
    "viz": "tensortap.rooms.figures",
}

__all__ = [
    "HDF5",
    "Recorder",
    "StopTraining",
    "TensortapError",
    "__version__",
    "alerts",
    "bisect",
    "blackbox",
    "catch",
    "catch_grad",
    "compare",
    "dump",
    "enable",
    "finish",
    "flush",
    "get",
    "get_all",
    "help",
    "init",
    "open",
    "ops",
    "receipt",
    "rooms",
    "serve",
    "status",
    "step",
    "summary",
    "trace",
    "track",
    "view",
    "viz",
    "watch",
    "watcher",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _LATER:
        here = sys.modules[__name__]  # for "Did you mean"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=here)
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
