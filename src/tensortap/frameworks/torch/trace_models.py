"""Torch models as targets of `trace`: wrappers, calls of the root, and compiled graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tensortap.frameworks.torch import private
from tensortap.frameworks.torch.hooks import ModuleHook, hook_module
from tensortap.frameworks.torch.names import unwrapped
from tensortap.frameworks.torch.outputs import forget_graphs

_FULLGRAPH = (
    "it is part of a graph compiled with fullgraph=True, which a probe cannot leave: compile it "
    "with fullgraph=False, or keep it out of the graph with torch.compiler.disable"
)
_WRAPPERS = ("_forward_module", "module")  # of trainers whose wrapper classes are not known


def is_model(target: object) -> bool:
    return isinstance(target, torch.nn.Module)


def is_common(cls: type, name: str) -> bool:
    """Return whether a method comes from torch and is no forward.

    >>> is_common(torch.nn.Linear, "extra_repr"), is_common(torch.nn.Linear, "forward")
    (True, False)
    """
    if cls is torch.nn.Module:
        return True
    return cls.__module__.partition(".")[0] == "torch" and name != "forward"


def model_inside(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside all wrappers: DDP, DataParallel, torch.compile, FSDP, trainers'.

    >>> type(model_inside(torch.nn.DataParallel(torch.nn.ReLU()))).__name__
    'ReLU'
    """
    while True:
        module = unwrapped(module)
        children = list(module.named_children())
        is_wrapper = len(children) == 1 and children[0][0] in _WRAPPERS
        if not is_wrapper or next(module.parameters(recurse=False), None) is not None:
            return module
        module = children[0][1]


def children(owner: Any, others: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the modules in a module, without wrappers; `others` lists those in other objects."""
    if is_model(owner):
        modules = owner.named_modules(remove_duplicate=False)
        named = {name: child for name, child in modules if name and "." not in name}
    else:
        named = dict(others(owner))
    return {
        name: model_inside(child) if is_model(child) else child for name, child in named.items()
    }


def closed(owner: Any) -> str | None:
    if isinstance(owner, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return "it is TorchScript, which runs no Python: trace the model that it was made from"
    return None


def in_backward() -> bool:
    return private.backward_pass() != -1


def hook_root(
    module: torch.nn.Module,
    begin: Callable[[torch.nn.Module, Any], None],
    end: Callable[[], None] | None,
    unseen: Callable[[str], None],
) -> contextlib.ExitStack:
    name = type(module).__name__
    hooks = contextlib.ExitStack()
    hooks.callback(forget_graphs)
    hooks.callback(hook_module(module, ModuleHook(begin, name, unseen), before=True))
    if end is not None:
        after = ModuleHook(lambda module, args, output: end(), name, unseen)
        hooks.callback(hook_module(module, after, always_call=True))
    forget_graphs()
    return hooks


def has_replicas() -> bool:
    """Return whether DataParallel would copy a model for each call, on several devices."""
    return bool(torch.cuda.is_available() and torch.cuda.device_count() > 1)


def hook_replicas(
    modules: Iterable[torch.nn.Module],
    add_alias: Callable[[Any, Any], None],
    remove_alias: Callable[[Any], None],
) -> contextlib.ExitStack:
    # a copy shares the dict of hooks with its module, so a hook on the module runs for both
    hooks = contextlib.ExitStack()
    for original in modules if has_replicas() else ():

        def before(module: Any, args: Any, original: Any = original) -> None:
            if module is not original:
                add_alias(module, original)

        def after(module: Any, args: Any, output: Any, original: Any = original) -> None:
            if module is not original:
                remove_alias(module)

        name = type(original).__name__
        hooks.callback(hook_module(original, ModuleHook(before, name, _ignore), before=True))
        hooks.callback(hook_module(original, ModuleHook(after, name, _ignore), always_call=True))
    return hooks


def _ignore(name: str) -> None:
    """Take the name of a module whose replicas are not told apart in a compiled graph."""


# -- probes that torch.compile can look into ---------------------------------------------

_compiling: Callable[[], bool] = torch.compiler.is_compiling
probes: Any = None  # the module whose probes these wrap, given to `compilable_probes`


def compilable_probes(plain: Any) -> Mapping[str, Callable[..., Any]]:
    global probes
    probes = plain
    if private.compiler_is_loaded():
        _skip_frames()
    return _COMPILABLE


def _must_stay(number: int) -> bool:
    """Return whether the graph that is being compiled must not break, and report that if so."""
    stays = private.must_not_break()
    if stays:
        probes.unseen[number] = _FULLGRAPH
    else:
        _skip_frames()
    return stays


private.constant_when_compiled(_must_stay)


def _enter(number: int, this: object) -> Any:
    """Begin a call of a function, unless it is in a graph that must not break."""
    if _compiling() and _must_stay(number):
        return None
    return probes.enter(number, this)


def _nested(outer: Any, name: str) -> Any:
    return None if outer is None else probes.nested(outer, name)


def _bind(opened: Any, name: str, value: Any, part: str | None = None) -> Any:
    return value if opened is None else probes.bind(opened, name, value, part)


def _result(opened: Any, value: Any) -> Any:
    return value if opened is None else probes.result(opened, value)


_COMPILABLE: Mapping[str, Callable[..., Any]] = {
    "enter": _enter,
    "nested": _nested,
    "bind": _bind,
    "result": _result,
}


def _skip_frames() -> None:
    """Keep the compiler from compiling a probe where a graph breaks for it."""
    for probe in (*_COMPILABLE.values(), *probes.ALL):
        private.skip_frame(probe.__code__)
