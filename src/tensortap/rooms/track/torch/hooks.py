"""Hooks on torch modules that no copy or pickle of a module has."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tensortap.values.torch import private_compiler
from tensortap.values.torch.hidden import constant_when_compiled, hide_from_compiler

log = logging.getLogger("tensortap")

_compiling: Callable[[], bool] = torch.compiler.is_compiling
# takes whatever a hook takes and does nothing; a pickle with it loads without tensortap
_NOTHING = contextlib.nullcontext().__exit__


def _skip_frames() -> None:
    """Keep the compiler from compiling more where a graph breaks than it would without hooks.

    It would compile hooks one by one, and modules of torch because they have hooks.
    """
    private_compiler.skip_frame(ModuleHook.__call__.__code__)
    for cls in list(_hooked):
        _skip_forward(cls, True)
    private_compiler.guard_hooks()


def _skip_forward(cls: type, skip: bool) -> None:
    code = getattr(getattr(cls, "forward", None), "__code__", None)
    if code is not None and cls.__module__.startswith(("torch.nn.", "torch.ao.")):
        private_compiler.skip_frame(code, skip, calls=False)


@functools.cache
def _report_split() -> None:
    log.warning(
        "tensortap: modules are not seen inside graphs with fullgraph=True that torch splits for "
        "DDP: set torch._dynamo.config.optimize_ddp = False"
    )


def _may_leave() -> bool:
    """Return whether the graph that is being compiled may break; report it if it may not."""
    if private_compiler.must_not_break():
        _report_split()
        return False
    return True


for _function in (_skip_frames, _may_leave, private_compiler.splits_for_ddp):
    constant_when_compiled(_function)


class GraphTensors(NamedTuple):
    """The probes that tell a hook from others in a shared graph, for outputs and gradients."""

    output: torch.Tensor | None = None
    gradient: torch.Tensor | None = None


class ModuleHook:
    """A hook that torch.compile does not look into; it traces `in_graph` in its place.

    That is a function of the hook and its arguments. Modules that share a graph have hooks with
    the same function, and whatever tells them apart in `tensors`.
    """

    def __init__(
        self,
        hook: Callable[..., Any],
        in_graph: Callable[..., None] | None = None,
        tensors: GraphTensors | None = None,
    ) -> None:
        def leave(*args: Any) -> Any:
            return hook(*args)

        hide_from_compiler(leave)
        self._hook, self._leave, self._in_graph = hook, leave, in_graph
        self.probe, self.gradient_probe = tensors or GraphTensors()

    def __call__(self, *args: Any) -> None:
        if not _compiling():
            self._hook(*args)
        elif self._in_graph is not None:
            _skip_frames()
            if not private_compiler.splits_for_ddp():
                self._in_graph(self, *args)
            elif _may_leave():
                self._leave(*args)

    # for classes that copy or pickle their attributes in a way of their own
    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _NOTHING

    def __reduce__(self) -> Any:
        return _NOTHING.__reduce__()


class ReplacingHook(ModuleHook):
    """A hook whose result takes the place of what the module gets or returns."""

    def __call__(self, *args: Any) -> Any:
        return self._leave(*args)


def hook_module(
    module: torch.nn.Module, hook: ModuleHook, *, before: bool = False, **options: bool
) -> Callable[[], None]:
    """Call the hook after (or `before`) the forward of a module; return a function that ends this.

    The `options` are those of torch. While the hook lasts, copies and pickles of modules of this
    class are made without such hooks.
    """
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(hook, **options)
    cls = type(module)
    with _lock:
        _hooked[cls] += 1
        copyreg.dispatch_table.setdefault(cls, _reduced)
        if not private_compiler.compiler_is_loaded():
            private_compiler.when_compiler_loads(_skip_frames)
        elif _hooked[cls] == 1:
            _skip_frames()

    def undo() -> None:
        handle.remove()
        with _lock:
            _hooked[cls] -= 1
            if not _hooked[cls]:
                del _hooked[cls]
                if private_compiler.compiler_is_loaded():
                    _skip_forward(cls, False)
                if copyreg.dispatch_table.get(cls) is _reduced:
                    del copyreg.dispatch_table[cls]

    return undo


_lock = threading.Lock()
_hooked: collections.Counter[type] = collections.Counter()


def _reduced(module: torch.nn.Module) -> Any:
    """Return what a copy or a pickle of a module is made from, without our hooks."""
    reduced = module.__reduce_ex__(4)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = dict(reduced[2])
    tables = {
        key: table
        for key, table in state.items()
        if key.startswith("_forward_") and isinstance(table, collections.OrderedDict)
    }
    ours = {
        number
        for table in tables.values()
        for number, hook in table.items()
        if isinstance(hook, ModuleHook)
    }
    for key, table in tables.items():
        kept = [(number, hook) for number, hook in table.items() if number not in ours]
        state[key] = collections.OrderedDict(kept)
    return (*reduced[:2], state, *reduced[3:])
