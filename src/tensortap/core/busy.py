"""Sections of the capture path that hold a lock: their own thread never enters a second one.

A signal handler or a finalizer runs between any two instructions of a thread, also while it holds
a lock, and may catch a value there. It must not wait for its own thread, nor for another one that
is in the same position. So what it catches is dropped and counted.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


importing = threading.RLock()
"""Held while the capture path imports a module.

A fork meanwhile would leave the child with a lock of the import system that nobody releases.
"""
os.register_at_fork(
    before=importing.acquire, after_in_parent=importing.release, after_in_child=importing.release
)


class Busy(RuntimeError):
    """A signal handler or finalizer has interrupted a section of its own thread."""


class _Thread(threading.local):
    inside = False


_thread = _Thread()


def is_busy() -> bool:
    """Return whether this thread was interrupted inside a section."""
    return _thread.inside


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal handler of the program raised an error inside tensortap.

    A timeout of ``signal.alarm``, or torch's report of a worker process that died, is meant for
    the program, whatever it was doing.
    """
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(getattr(each, "func", each), "__code__", None) for each in handlers} - {None}
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code not in codes:
        traceback = traceback.tb_next
    return traceback is not None


def section(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function raise `Busy` if its thread is inside any section already."""

    @functools.wraps(function)
    def enter(*args: P.args, **kwargs: P.kwargs) -> T:
        if _thread.inside:
            raise Busy("this thread is inside tensortap already")
        # no call before the try statement: an exception of a signal handler may follow any call
        _thread.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            _thread.inside = False

    return enter
