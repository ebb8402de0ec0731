"""See the tensors of a running training job.

In the training program::

    import tensortap as tap

    tap.catch(loss, "loss", every=10)

In any other Python session: ``tap.serve()``, then ``tap.summary()``, ``tap.get("loss")``.
Importing this imports no framework and starts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap._version import __version__
from tensortap.capture.catch import catch, catch_grad, enable, flush, receipt, step
from tensortap.core.errors import StopTraining, TensortapError
from tensortap.core.rooms import lazy
from tensortap.live import connections as _connections  # noqa: F401  it registers itself

if TYPE_CHECKING:
    from tensortap import alerts, rooms
    from tensortap.api.open import open
    from tensortap.api.session import get, get_all, help, serve, status, summary
    from tensortap.page.view import view
    from tensortap.rooms import figures as viz
    from tensortap.rooms.align.align import align
    from tensortap.rooms.align.digest import digest
    from tensortap.rooms.align.perturb import perturbed
    from tensortap.rooms.bisect.bisect import bisect
    from tensortap.rooms.blackbox.blackbox import blackbox
    from tensortap.rooms.compare.api import compare
    from tensortap.rooms.dump.dump import dump
    from tensortap.rooms.films.recorder import Recorder
    from tensortap.rooms.ops.ops import ops
    from tensortap.rooms.trace.hdf5 import HDF5
    from tensortap.rooms.trace.trace import trace
    from tensortap.rooms.track.track import track
    from tensortap.rooms.watch.watcher import watch, watcher
    from tensortap.runs.init import finish, init

# Verbs that pull in heavier modules are imported when they are first used. The verb of a room has
# a line here, one above and one in `__all__`; nothing else in the spine names the room. What else a
# room has is in its package, such as `tap.rooms.provenance.reproduce`.
_LATER = {
    "HDF5": "tensortap.rooms.trace.hdf5:HDF5",
    "Recorder": "tensortap.rooms.films.recorder:Recorder",
    "alerts": "tensortap.alerts",
    "align": "tensortap.rooms.align.align:align",
    "bisect": "tensortap.rooms.bisect.bisect:bisect",
    "blackbox": "tensortap.rooms.blackbox.blackbox:blackbox",
    "compare": "tensortap.rooms.compare.api:compare",
    "digest": "tensortap.rooms.align.digest:digest",
    "dump": "tensortap.rooms.dump.dump:dump",
    "finish": "tensortap.runs.init:finish",
    "get": "tensortap.api.session:get",
    "get_all": "tensortap.api.session:get_all",
    "help": "tensortap.api.session:help",
    "init": "tensortap.runs.init:init",
    "open": "tensortap.api.open:open",
    "ops": "tensortap.rooms.ops.ops:ops",
    "perturbed": "tensortap.rooms.align.perturb:perturbed",
    "rooms": "tensortap.rooms",
    "serve": "tensortap.api.session:serve",
    "status": "tensortap.api.session:status",
    "summary": "tensortap.api.session:summary",
    "trace": "tensortap.rooms.trace.trace:trace",
    "track": "tensortap.rooms.track.track:track",
    "view": "tensortap.page.view:view",
    "viz": "tensortap.rooms.figures",
    "watch": "tensortap.rooms.watch.watcher:watch",
    "watcher": "tensortap.rooms.watch.watcher:watcher",
}

__all__ = [
    "HDF5",
    "Recorder",
    "StopTraining",
    "TensortapError",
    "__version__",
    "alerts",
    "align",
    "bisect",
    "blackbox",
    "catch",
    "catch_grad",
    "compare",
    "digest",
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
    "perturbed",
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
__getattr__ = lazy(__name__, _LATER)


def __dir__() -> list[str]:
    return __all__
