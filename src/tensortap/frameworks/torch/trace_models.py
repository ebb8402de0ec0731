"""Models of torch as targets: wrappers looked through, calls of the root counted, graphs left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tensortap.frameworks.torch.compiled import (
    forget_graphs,
    in_whole_graph,
    leave_alone,
    outside,
)
from tensortap.frameworks.torch.names import unwrapped
from tensortap.sources.tracing import probes, rewrite
from tensortap.sources.tracing.resolve import items

_WHOLE = (
    "it is part of a graph compiled with fullgraph=True, which a probe cannot leave: compile it "
    "with fullgraph=False, or keep it out of the graph with torch.compiler.disable"
)


def common(cls: type, name: str) -> bool:
    """Whether a method is one that modules have from torch, and no forward.

    >>> common(torch.nn.Linear, "extra_repr"), common(torch.nn.Linear, "forward")
    (True, False)
    """
    if cls is torch.nn.Module:
        return True
    return cls.__module__.partition(".")[0] == "torch" and name != "forward"


_WRAPPERS = ("_forward_module", "module")  # of trainers that are not known by their class


def inside(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside all wrappers: DDP, DataParallel, torch.compile, FSDP, those of trainers.

    >>> type(inside(torch.nn.DataParallel(torch.nn.ReLU()))).__name__
    'ReLU'
    """
    while True:
        module = unwrapped(module)
        name = next((name for name in _WRAPPERS if _only(module, name)), None)
        if name is None:
            return module
        found = module._modules[name]
        assert found is not None
        module = found


def _only(module: torch.nn.Module, name: str) -> bool:
    """Whether a module does nothing but hold another: no other child and no parameter."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    held = {id(child) for child in module._modules.values()}
    child = module._modules.get(name)
    return child is not None and held == {id(child)} and not module._parameters


def children(owner: Any) -> Mapping[str, Any]:
    """The modules in a module, without the wrappers around them."""
    if not isinstance(owner, torch.nn.Module):
        return {
            name: inside(item) if isinstance(item, torch.nn.Module) else item
            for name, item in items(owner).items()
        }
    named = owner._modules.items()
    return {name: inside(child) for name, child in named if child is not None}


def closed(owner: Any) -> str | None:
    """Why the functions of a module cannot be looked into, if they cannot."""
    if isinstance(owner, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return "it is TorchScript, which runs no Python: trace the model that it was made of"
    return None


def in_backward() -> bool:
    """Whether a backward pass has called whoever asks."""
    return bool(_current_graph_task() != -1)


_current_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class Root:
    """Tells when the model is called: `begin` before each call, `end` after it."""

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
        self._handles = [module.register_forward_pre_hook(outside(begin, name, unseen))]
        if end is not None:
            hook = outside(after, name, unseen)
            self._handles.append(module.register_forward_hook(hook, always_call=True))
        forget_graphs()

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        forget_graphs()


def has_replicas() -> bool:
    """Whether DataParallel would copy a model for each call of it: there are several devices."""
    return bool(torch.cuda.is_available() and torch.cuda.device_count() > 1)


class Replicas:
    """Has the copies that DataParallel makes for one call stand for the modules they are of.

    A copy has the very dict of hooks that its module has, so a hook there is called on both.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._handles: list[Any] = []
        for module in modules:
            self._watch(module)

    def _watch(self, original: torch.nn.Module) -> None:
        def before(module: torch.nn.Module, args: Any) -> None:
            if module is not original:
                probes.add_alias(module, original)

        def after(module: torch.nn.Module, args: Any, output: Any) -> None:
            if module is not original:
                probes.remove_alias(module)

        self._handles.append(original.register_forward_pre_hook(before))
        self._handles.append(original.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


# -- probes that torch.compile can look into ---------------------------------------------

_compiling: Callable[[], bool] = torch.compiler.is_compiling


def _must_stay(number: int) -> bool:
    """Whether the graph that is being compiled must not break; asked while it is."""
    whole = in_whole_graph()
    if whole:
        probes.unseen[number] = _WHOLE
    else:
        _stay_out()
    return whole


_must_stay._dynamo_marked_constant = True  # type: ignore[attr-defined]


def enter(number: int, this: object) -> Any:
    """A function is entered; in a graph that must not break nobody is told."""
    if _compiling() and _must_stay(number):
        return None
    return probes.enter(number, this)


def nested(outer: Any, name: str) -> Any:
    """A function that is defined inside one is entered."""
    return None if outer is None else probes.nested(outer, name)


def bind(opened: Any, name: str, value: Any, part: str | None = None) -> Any:
    """A name was bound."""
    return value if opened is None else probes.bind(opened, name, value, part)


def result(opened: Any, value: Any) -> Any:
    """A value is returned."""
    return value if opened is None else probes.result(opened, value)


_LOOKED_INTO: dict[str, Callable[..., Any]] = {
    rewrite.ENTER: enter,
    rewrite.NESTED: nested,
    rewrite.BIND_ALWAYS: bind,  # where there is a call at all the other is asked directly
    rewrite.RESULT: result,
}


def _stay_out() -> None:
    """Where a graph breaks for a probe, the compiler is not to compile the probe instead."""
    for probe in (*_LOOKED_INTO.values(), *probes.ALL):
        leave_alone(probe.__code__)


def use() -> None:
    """Have functions that are instrumented from here on call these."""
    probes.PROBES.update(_LOOKED_INTO)
    if "torch._dynamo" in sys.modules:
        _stay_out()
