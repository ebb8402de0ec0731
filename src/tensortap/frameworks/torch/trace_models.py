"""Torch models as targets of `trace`: wrappers, calls of the root, and compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tensortap.frameworks.torch import private
from tensortap.frameworks.torch.compiled import forget_graphs, outside_graphs
from tensortap.frameworks.torch.names import unwrapped

_FULLGRAPH = (
    "it is part of a graph compiled with fullgraph=True, which a probe cannot leave: compile it "
    "with fullgraph=False, or keep it out of the graph with torch.compiler.disable"
)
_WRAPPERS = ("_forward_module", "module")  # of trainers whose wrapper classes are not known


def is_model(target: object) -> bool:
    """Return whether a target is a torch module."""
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
        name = next((name for name in _WRAPPERS if _only_holds(module, name)), None)
        if name is None:
            return module
        module = module.get_submodule(name)


def _only_holds(module: torch.nn.Module, name: str) -> bool:
    """Return whether a module is only a wrapper: one child of this name and no parameters."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    children = private.children_of(module)
    child = children.get(name)
    return (
        child is not None
        and all(other is child for other in children.values())
        and next(module.parameters(recurse=False), None) is None
    )


def children(owner: Any, others: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the modules in a module, without wrappers; `others` lists those in other objects."""
    named = private.children_of(owner) if is_model(owner) else others(owner)
    return {
        name: model_inside(child) if is_model(child) else child
        for name, child in named.items()
        if child is not None or not is_model(owner)
    }


def closed(owner: Any) -> str | None:
    """Return why the functions of an object cannot be traced; None if they can."""
    if isinstance(owner, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return "it is TorchScript, which runs no Python: trace the model that it was made from"
    return None


def in_backward() -> bool:
    """Return whether a backward pass is running in this thread."""
    return private.backward_pass() != -1


class RootHooks:
    """Hooks on the traced model: `begin` runs before each of its calls, `end` after it."""

    def __init__(
        self,
        module: torch.nn.Module,
        begin: Callable[[torch.nn.Module, Any], None],
        end: Callable[[], None] | None,
        unseen: Callable[[str], None],
    ) -> None:
        def after(module: torch.nn.Module, args: Any, output: Any) -> None:
            assert end is not None
            end()

        name = type(module).__name__
        self._handles = [module.register_forward_pre_hook(outside_graphs(begin, name, unseen))]
        if end is not None:
            hook = outside_graphs(after, name, unseen)
            self._handles.append(module.register_forward_hook(hook, always_call=True))
        forget_graphs()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        forget_graphs()


def has_replicas() -> bool:
    """Return whether DataParallel would copy a model for each call, on several devices."""
    return bool(torch.cuda.is_available() and torch.cuda.device_count() > 1)


class ReplicaHooks:
    """Hooks that let the copies DataParallel makes for one call stand for the original modules.

    A copy shares the dict of hooks with its module, so a hook on the module runs for both.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        add_alias: Callable[[Any, Any], None],
        remove_alias: Callable[[Any], None],
    ) -> None:
        self._handles: list[Any] = []
        for module in modules:
            self._attach(module, add_alias, remove_alias)

    def _attach(
        self,
        original: torch.nn.Module,
        add_alias: Callable[[Any, Any], None],
        remove_alias: Callable[[Any], None],
    ) -> None:
        def before(module: torch.nn.Module, args: Any) -> None:
            if module is not original:
                add_alias(module, original)

        def after(module: torch.nn.Module, args: Any, output: Any) -> None:
            if module is not original:
                remove_alias(module)

        self._handles.append(original.register_forward_pre_hook(before))
        self._handles.append(original.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


# -- probes that torch.compile can look into ---------------------------------------------

_compiling: Callable[[], bool] = torch.compiler.is_compiling
probes: Any = None  # the module whose probes these wrap, given to `compilable_probes`


def compilable_probes(plain: Any) -> Mapping[str, Callable[..., Any]]:
    """Return probes that wrap those of the module `plain` and work in compiled graphs, by name."""
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


def enter(number: int, this: object) -> Any:
    """Begin a call of a function, unless it is in a graph that must not break."""
    if _compiling() and _must_stay(number):
        return None
    return probes.enter(number, this)


def nested(outer: Any, name: str) -> Any:
    """Begin a call of a function that is defined inside another."""
    return None if outer is None else probes.nested(outer, name)


def bind(opened: Any, name: str, value: Any, part: str | None = None) -> Any:
    """Report a binding; return the value."""
    return value if opened is None else probes.bind(opened, name, value, part)


def result(opened: Any, value: Any) -> Any:
    """Report a value that is returned; return the value."""
    return value if opened is None else probes.result(opened, value)


_COMPILABLE: Mapping[str, Callable[..., Any]] = {
    "enter": enter,
    "nested": nested,
    "bind": bind,
    "result": result,
}


def _skip_frames() -> None:
    """Keep the compiler from compiling a probe where a graph breaks for it."""
    for probe in (*_COMPILABLE.values(), *probes.ALL):
        private.skip_frame(probe.__code__)
