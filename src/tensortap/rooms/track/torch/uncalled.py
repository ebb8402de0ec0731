"""Modules whose weights are used without calling the module, so that it has no output."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from tensortap.rooms.track.torch.names import Names

REASON = "its weights are used, but the module itself is not called, so it has no output"


def has_forward(module: torch.nn.Module) -> bool:
    """Return whether a module can be called, unlike a list of modules or parameters."""
    return getattr(type(module), "forward", None) is not torch.nn.Module.forward


class UncalledModules:
    """The modules with weights of their own that have not been called yet."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self.modules: dict[str, torch.nn.Module] = {}

    def add(self, name: str, module: torch.nn.Module) -> None:
        """Take a module, unless it has no weight or, like a list of parameters, no forward."""
        if isinstance(module, NonDynamicallyQuantizableLinear):
            return  # out_proj of nn.MultiheadAttention, whose output is that of the attention
        if has_forward(module) and next(module.parameters(recurse=False), None) is not None:
            self.modules[name] = module

    def names(self) -> set[str]:
        """Return the names of those modules."""
        return set(self.modules)

    def called(self, name: str) -> None:
        self.modules.pop(name, None)

    def clear(self) -> None:
        self.modules.clear()

    def trained(self, is_trained: Callable[[torch.nn.Parameter], bool]) -> Iterator[str]:
        """Yield those whose weights are trained, each once."""
        found = [
            (name, weights)
            for name, module in self.modules.items()
            if (weights := [p for p in module.parameters(recurse=False) if is_trained(p)])
        ]
        if not found:
            return
        called = {  # a tied weight may belong to a module that is called
            id(parameter)
            for name, module in Names(self._root).modules()
            if name not in self.modules
            for parameter in module.parameters(recurse=False)
        }
        for name, weights in found:
            self.called(name)
            if not any(id(parameter) in called for parameter in weights):
                yield name
