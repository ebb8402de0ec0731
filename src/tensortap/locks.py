"""Locks for code that signal handlers and finalizers may interrupt and call again.

They run between any two instructions of a thread, also while it holds a lock, and may capture a
value there. So nothing on the way of a captured value waits for a lock without an end.
"""

from __future__ import annotations

import _thread
import ctypes
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import TypeVar

T = TypeVar("T")

_TIMEOUT = 1.0  # seconds; no thread of ours holds a lock for that long
_POLL = 0.05  # seconds after which a thread that waits looks again
_PATIENCE = 30.0  # seconds; late imports take less
_PACKAGE = __name__.partition(".")[0]

_c = ctypes.CDLL(None)  # its functions release the interpreter lock
_c.PyThread_allocate_lock.restype = ctypes.c_void_p
_c.PyThread_acquire_lock_timed.argtypes = [ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int]
_c.PyThread_release_lock.argtypes = _c.PyThread_free_lock.argtypes = [ctypes.c_void_p]

importing = threading.RLock()
"""Held by `prepare`, while one of our modules is imported late.

A fork while another thread imports a module would leave the child with a lock that stays locked.
"""
os.register_at_fork(
    before=importing.acquire,
    after_in_parent=importing.release,
    after_in_child=importing.release,
)


class Latch:
    """Lets threads wait until it is opened; no signal handler runs while they wait.

    A handler that took its turn in the middle of a wait could wait as well, and the next one within
    it, until the stack is full.
    """

    def __init__(self) -> None:
        self._open = False
        self._lock = _c.PyThread_allocate_lock()
        _c.PyThread_acquire_lock_timed(self._lock, -1, 0)

    def open(self) -> None:
        """Let all that wait continue, and nobody wait again."""
        self._open = True
        _c.PyThread_release_lock(self._lock)

    def wait(self, timeout: float) -> bool:
        """Wait until it is open; return False if time ran out."""
        # the last argument: a signal does not end the wait
        if not self._open and _c.PyThread_acquire_lock_timed(self._lock, int(timeout * 1e6), 0):
            _c.PyThread_release_lock(self._lock)
        return self._open

    def __del__(self) -> None:
        _c.PyThread_free_lock(self._lock)


_preparing: int | None = None  # the thread that does what `prepare` was called with


def prepare(work: Callable[[], T]) -> T:
    """Do what must not be interrupted, in another thread; return its result.

    A signal handler would find the work of its own thread half done: modules without their last
    lines, a queue without its thread. It calls this too, and waits until it is all done. So `work`
    is called again, after the first time, and then has nothing left to do.
    """
    if _preparing == threading.get_ident() or _is_importing(sys._getframe(1)):
        return work()
    latch, results, errors = Latch(), list[T](), list[BaseException]()

    def run() -> None:
        global _preparing
        try:
            with importing:
                _preparing, collecting = threading.get_ident(), gc.isenabled()
                gc.disable()  # a finalizer that captures a value would find the work half done
                try:
                    results.append(work())
                finally:
                    _preparing = None
                    if collecting:
                        gc.enable()
        except BaseException as error:
            errors.append(error)
        finally:
            latch.open()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # the interpreter is ending
        return work()
    if not latch.wait(_PATIENCE):
        raise TimeoutError("tensortap is still importing its modules")
    if errors:
        raise errors[0]
    return results[0]


def import_late(name: str) -> ModuleType:
    """Import a module where a signal handler or finalizer may need it at the same time."""
    found = sys.modules.get(name)
    if found is not None and is_imported(found):
        return found
    try:
        return prepare(lambda: importlib.import_module(name))
    except TimeoutError:  # modules of a slow disk, or another thread that waits for this one
        return importlib.import_module(name)


def is_imported(module: ModuleType) -> bool:
    """Return whether a module has been imported to its end."""
    return not getattr(module.__spec__, "_initializing", False)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether this thread was interrupted in an import of ours, which has to end first."""
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load" and "importlib" in frame.f_code.co_filename:
            if frame.f_locals.get("name", "").partition(".")[0] == _PACKAGE:
                return True
        frame = frame.f_back
    return False


class SafeLock:
    """A lock that never deadlocks: `acquire` returns False where an ordinary one would.

    A handler must not wait for its own thread. Nor for long for another one: that may be in the
    same position, with two locks exchanged. The lock belongs to the frame that called `acquire`:
    if an exception of a signal handler keeps it from calling `release`, the lock ends with it.
    """

    __slots__ = ("_lock", "_owner")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: FrameType | None = None

    def acquire(self) -> bool:
        """Return whether the calling frame has the lock now; False if its thread had it."""
        frame = sys._getframe(1)
        while True:
            lock, fresh = self._lock, None
            if lock.acquire(timeout=_TIMEOUT):
                owner = self._owner
                if owner is not None and _is_below(frame, owner):
                    lock.release()
                    return False
            else:
                owner, fresh = self._owner, threading.RLock()
                if owner is not None and _is_running(owner):
                    return False
            # no call from here on, so that no other thread and no handler comes in between
            if self._lock is lock:
                if fresh is None:
                    self._owner = frame
                    return True
                if self._owner is owner:
                    self._lock, self._owner = fresh, None

    def release(self) -> None:
        """Return the lock."""
        self._owner = None
        self._lock.release()


def _is_running(frame: FrameType) -> bool:
    return any(_is_below(top, frame) for top in sys._current_frames().values())


def _is_below(top: FrameType | None, frame: FrameType) -> bool:
    while top is not None and top is not frame:
        top = top.f_back
    return top is frame


class Notifier:
    """Lets threads wait for a condition that others change; `waiting` is how many do."""

    def __init__(self) -> None:
        self.waiting = 0
        self._changed = threading.Condition()

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `condition` holds; return False if time ran out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.waiting += 1
        try:
            with self._changed:
                while not condition():
                    left = _POLL if deadline is None else deadline - time.monotonic()
                    if left <= 0:
                        return False
                    self._changed.wait(min(left, _POLL))
            return True
        finally:
            self.waiting -= 1

    def notify(self) -> None:
        """Let the threads that wait look again."""
        if self.waiting and self._changed.acquire(timeout=_POLL):
            try:
                self._changed.notify_all()
            finally:
                self._changed.release()
