"""Hooks on torch modules, which do nothing in copies and pickles of a module."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch

from tensortap.rooms.track.torch import internals
from tensortap.rooms.track.torch.internals import compiler_is_loaded
from tensortap.values.torch.hidden import constant_when_compiled, hide_from_compiler

log = logging.getLogger("tensortap")

WHOLE = "it is compiled with fullgraph=True, where nothing can look at it"
_compiling: Callable[[], bool] = torch.compiler.is_compiling
# takes whatever a hook takes and does nothing; a pickle with it loads without tensortap
_NOTHING = contextlib.nullcontext().__exit__


def _skip_frames() -> None:
    """Keep the compiler from compiling more where a graph breaks than it would without hooks.

    It would compile hooks one by one, and modules of torch because they have hooks.
    """
    for code in _skipped:
        internals.skip_frame(code)
    for cls in list(_hooked):
        _skip_forward(cls, True)
    internals.guard_hooks()


def _skip_forward(cls: type, skip: bool) -> None:
    code = getattr(getattr(cls, "forward", None), "__code__", None)
    if code is not None and cls.__module__.startswith(("torch.nn.", "torch.ao.")):
        internals.skip_frame(code, skip, calls=False)


@functools.cache
def _report_split() -> None:
    log.warning(
        "tensortap: modules are not seen inside graphs that torch splits for DDP: set "
        "torch._dynamo.config.optimize_ddp = False"
    )


for _function in (
    _skip_frames,
    _report_split,
    internals.splits_for_ddp,
    internals.may_break,
):
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
        _skipped.add(leave.__code__)
        self._hook, self._leave, self._in_graph = hook, leave, in_graph
        self.probe, self.gradient_probe = tensors or GraphTensors()

    def __call__(self, *args: Any) -> None:
        if not _compiling():
            self._hook(*args)
        elif self._in_graph is not None:
            _skip_frames()
            if internals.splits_for_ddp():
                _report_split()
            else:
                self._in_graph(self, *args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _NOTHING

    def __reduce__(self) -> Any:
        return _NOTHING.__reduce__()


class ReplacingHook(ModuleHook):
    """A hook whose result takes the place of what the module gets or returns."""

    def __call__(self, *args: Any) -> Any:
        return self._leave(*args)


class BreakingHook(ModuleHook):
    """A hook at which graphs break, of an optimizer or a gradient: it looks at what they computed.

    Where a graph must be whole (`fullgraph=True`), it does nothing but tell `missed` the reason.
    """

    def __init__(self, hook: Callable[..., Any], missed: Callable[[str], object]) -> None:
        super().__init__(hook)

        def note() -> None:
            missed(WHOLE)

        constant_when_compiled(note)
        self._note = note
        skip_code(BreakingHook.__call__.__code__)

    def __call__(self, *args: Any) -> None:
        if not _compiling():
            self._hook(*args)
        elif internals.may_break():
            self._leave(*args)
        else:
            self._note()


def skip_code(code: CodeType) -> None:
    """Keep the compiler from compiling this code, also if it is loaded later."""
    if code not in _skipped:
        _skipped.add(code)
        if compiler_is_loaded():
            internals.skip_frame(code)
        else:
            internals.when_compiler_loads(_skip_frames)


def hook_module(
    module: torch.nn.Module, hook: ModuleHook, *, before: bool = False, **options: bool
) -> Callable[[], None]:
    """Call the hook after (or `before`) the forward of a module; return a function that ends this.

    The `options` are those of torch. A ScriptModule takes no hooks.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return _NOTHING
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(hook, **options)
    cls = type(module)
    with _lock:
        _hooked[cls] += 1
        if not compiler_is_loaded():
            internals.when_compiler_loads(_skip_frames)
        elif _hooked[cls] == 1:
            _skip_frames()

    def undo() -> None:
        handle.remove()
        with _lock:
            _hooked[cls] -= 1
            if not _hooked[cls]:
                del _hooked[cls]
                if compiler_is_loaded():
                    _skip_forward(cls, False)

    return undo


_lock = threading.Lock()
_skipped = {ModuleHook.__call__.__code__}
_hooked: collections.Counter[type] = collections.Counter()
