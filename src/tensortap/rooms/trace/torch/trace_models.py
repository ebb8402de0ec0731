"""Torch models as targets of `trace`: wrappers, and calls of the root."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tensortap.rooms.track.torch.hooks import ModuleHook, hook_module
from tensortap.rooms.track.torch.names import unwrapped
from tensortap.values.torch import private
from tensortap.values.torch.private_compiler import compiled_modules

_WRAPPERS = ("_forward_module", "module")  # of trainers whose wrapper classes are not known


def is_model(target: object) -> bool:
    """Return whether a target is a model."""
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
    """Return why the functions of an object cannot be traced; None if they can."""
    if isinstance(owner, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return "it is TorchScript, which runs no Python: trace the model that it was made from"
    return None


def compiled(target: Any) -> frozenset[int]:
    """Return the ids of the modules of a target that run inside compiled graphs."""
    found = compiled_modules(target) if is_model(target) else []
    return frozenset(id(inner) for module in found for inner in module.modules())


def in_backward() -> bool:
    """Return whether a backward pass is running in this thread."""
    return private.backward_pass() != -1


def hook_root(
    module: torch.nn.Module,
    begin: Callable[[torch.nn.Module], None],
    end: Callable[[], None] | None,
) -> contextlib.ExitStack:
    """Call `begin` before each call of the traced model and `end` after it, until closed."""
    hooks = contextlib.ExitStack()
    hooks.callback(hook_module(module, ModuleHook(lambda *args: begin(module)), before=True))
    if end is not None:
        hooks.callback(hook_module(module, ModuleHook(lambda *args: end()), always_call=True))
    return hooks
