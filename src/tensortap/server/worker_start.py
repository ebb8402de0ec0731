"""How a worker process begins: what it was told, and where the user's functions are found.

The main module of the program is read only if a function is defined there, and only up to where
its training begins.
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
from tensortap.server.worker_process import Functions, Worker
from tensortap.wire.worker import MainIsRead, Orders, read_main

log = logging.getLogger("tensortap")


def spawned(line: int) -> None:
    """The start of a fresh interpreter: the orders come over standard input."""
    from msgspec import msgpack

    orders = msgpack.decode(sys.stdin.buffer.read(), type=Orders)
    sys.path[:] = orders.path
    sys.argv[:] = orders.arguments
    _go_to(orders.folder)
    code = Worker(orders, socket.socket(fileno=line), lambda: functions_of(orders)).run()
    _leave(code)


def served(orders: Orders, line: socket.socket) -> None:
    """The start of a process of multiprocessing's fork server."""
    _leave(Worker(orders, line, lambda: functions_of(orders)).run())


def forked(orders: Orders, line: socket.socket, functions: Functions) -> None:
    """The start of a copy of the training process."""
    signal.set_wakeup_fd(-1)  # the parent's
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the threads of the parent's pool are not here
    _leave(Worker(orders, line, lambda: functions).run())


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _go_to(folder: str) -> None:
    if not folder:
        return
    try:
        os.chdir(folder)
    except OSError as error:
        log.warning("tensortap: a worker cannot go to %s: %s", folder, error)


def functions_of(orders: Orders) -> Functions:
    """What the user gave; the program's main module is imported only if it is defined there."""
    if orders.main and "__mp_main__" not in sys.modules:
        _import_main(orders.main, orders.main_is_module)
    try:
        # written by our own parent, over a pipe that it made
        recorder, on_close = _Unpickler(io.BytesIO(orders.functions)).load()
    except AttributeError as error:
        if not orders.main:
            raise
        raise TensortapError(
            f"{error}: the worker imports the main module only as far as the first tap.init() or "
            "tap.watch(); define on_record above it, or in a module of its own"
        ) from error
    return functions_for(recorder, on_close)


def functions_for(recorder: Any, on_close: Callable[[], object] | None) -> Functions:
    """A recorder has `close` and `flush` of its own; a function has not."""
    close = getattr(recorder, "close", None)
    if on_close is not None and close is not None:
        own, given = close, on_close

        def close_both() -> None:
            try:
                own()
            finally:
                given()

        close = close_both
    return Functions(recorder, close or on_close, getattr(recorder, "flush", None))


class _Unpickler(pickle.Unpickler):
    """Finds what was defined in the main module."""

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
            raise TensortapError(f"the main module {where} cannot be imported in the worker")
        code = loader.get_code(where)
        module.__spec__, module.__package__ = spec, spec.parent
        module.__file__ = spec.origin
    else:
        with io.open_code(where) as file:
            code = compile(file.read(), where, "exec")
        module.__file__ = where
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    read_main(True)
    try:
        exec(code, module.__dict__)  # noqa: S102  the user's own program
    except MainIsRead:
        pass  # a script without a guard: it was about to train
    finally:
        read_main(False)
