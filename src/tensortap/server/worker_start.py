"""The start of a worker process: its orders, and the user's functions.

If a function is defined in the program's main module, that module is imported up to where its
training begins.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import pickle
import signal
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from tensortap.errors import TensortapError
from tensortap.frameworks.registry import loaded_frameworks
from tensortap.server.worker_process import Functions, WorkerProcess, report_crashes
from tensortap.wire.worker import MainImported, Orders, set_importing_main

log = logging.getLogger("tensortap")


def spawned(line: int) -> None:
    """Run a worker in a fresh interpreter; its orders come over standard input."""
    from msgspec import msgpack

    orders = msgpack.decode(sys.stdin.buffer.read(), type=Orders)
    sys.path[:] = orders.path
    sys.argv[:] = orders.arguments
    if orders.folder:
        try:
            os.chdir(orders.folder)
        except OSError as error:
            log.warning("tensortap: a worker cannot change to %s: %s", orders.folder, error)
    _run(orders, socket.socket(fileno=line), lambda: functions_of(orders))


def served(orders: Orders, line: socket.socket) -> None:
    """Run a worker in a process of multiprocessing's fork server."""
    _run(orders, line, lambda: functions_of(orders))


def forked(orders: Orders, line: socket.socket, functions: Functions) -> None:
    """Run a worker in a fork of the training process."""
    report_crashes(line)  # first: what follows may crash in a fork
    signal.set_wakeup_fd(-1)  # it is the parent's
    for framework in loaded_frameworks():
        framework.after_fork()
    _run(orders, line, lambda: functions)


def _run(orders: Orders, line: socket.socket, load: Callable[[], Functions]) -> None:
    code = WorkerProcess(orders, line, load).run()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def functions_of(orders: Orders) -> Functions:
    """Return the user's functions; import the program's main module if they need it."""
    if orders.main and "__mp_main__" not in sys.modules:
        _import_main(orders.main, orders.main_is_module)
    try:
        # pickled by our own parent, over a pipe that it created
        recorder, on_close = _Unpickler(io.BytesIO(orders.functions)).load()
    except AttributeError as error:
        if not orders.main:
            raise
        raise TensortapError(
            f"{error}: the worker imports the main module only up to the first tap.init() or "
            "tap.watch(); define on_record above it, or in another module"
        ) from error
    return functions_for(recorder, on_close)


def functions_for(recorder: Any, on_close: Callable[[], object] | None) -> Functions:
    """Return the functions of a recorder, which may have `close` and `flush`, or of a function."""
    close = getattr(recorder, "close", None)
    if on_close is None or close is None:
        return Functions(recorder, close or on_close, getattr(recorder, "flush", None))

    def close_both() -> None:
        try:
            close()
        finally:
            on_close()

    return Functions(recorder, close_both, getattr(recorder, "flush", None))


class _Unpickler(pickle.Unpickler):
    """Finds what is defined in the program's main module."""

    def find_class(self, module: str, name: str) -> Any:
        main = sys.modules.get("__mp_main__")
        if module == "__main__" and main is not None:
            found: Any = main
            for part in name.split("."):
                found = getattr(found, part)
            return found
        return super().find_class(module, name)


def _import_main(where: str, is_module: bool) -> None:
    """Run the main module of the program up to where its training begins."""
    module = types.ModuleType("__mp_main__")
    if is_module:
        spec = importlib.util.find_spec(where)
        loader: Any = spec.loader if spec is not None else None
        if spec is None or not hasattr(loader, "get_code"):
            raise TensortapError(f"the worker cannot import the main module {where}")
        code = loader.get_code(where)
        module.__spec__, module.__package__ = spec, spec.parent
        module.__file__ = spec.origin
    else:
        with io.open_code(where) as file:
            code = compile(file.read(), where, "exec")
        module.__file__ = where
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    set_importing_main(True)
    try:
        exec(code, module.__dict__)  # noqa: S102  the user's own program
    except MainImported:
        pass  # a script without a guard, which was about to train
    finally:
        set_importing_main(False)
