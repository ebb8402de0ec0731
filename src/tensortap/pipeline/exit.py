"""Functions that run when the process ends, also in processes of multiprocessing."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable


def at_exit(function: Callable[[], object], *, priority: int) -> None:
    """Run a function when the process ends; in a child of multiprocessing, higher ones first."""
    atexit.register(function)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        # a child of multiprocessing leaves without atexit, and forgets at its start what it had
        # inherited: call this in the process that is to run the function
        from multiprocessing.util import Finalize

        Finalize(None, function, exitpriority=priority)
