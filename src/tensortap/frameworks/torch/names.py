"""The modules and parameters of a torch model under the names that its author gave them.

Wrappers (DataParallel, torch.compile, checkpoints, FSDP) put themselves between a module and the
one that holds it; their part of the path is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

_INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Names:
    """The names in one model.

    >>> model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    >>> names = Names(model)
    >>> [name for name, _ in names.modules()], [name for name, _ in names.parameters()]
    (['Sequential', '0'], ['0.weight', '0.bias'])
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self._wrapped: list[tuple[str, str]] = []
        for path, module in root.named_modules():
            inner = _inner(module)
            if inner is not None:
                self._wrapped.append((f"{path}.{inner}" if path else inner, path))
        # the innermost first: what is left of a path still begins as it did
        self._wrapped.sort(key=lambda pair: -len(pair[0]))
        self._title = _class_of(unwrapped(root)).__name__

    def plain(self, path: str) -> str:
        """A path without the wrappers on it."""
        for long, short in self._wrapped:
            if path == long:
                path = short
            elif path.startswith(f"{long}."):
                path = f"{short}.{path[len(long) + 1 :]}" if short else path[len(long) + 1 :]
        return path

    def modules(
        self, whole: Callable[[torch.nn.Module], bool] = lambda module: False
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Every module that is no wrapper; the model itself goes by its class.

        A wrapper that is `whole` stands for what it wraps.
        """
        inside: set[int] = set()
        for path, module in self.root.named_modules():
            name = _inner(module)
            if name is not None and whole(module):
                inside.add(id(module._modules[name]))
            elif name is not None or id(module) in inside:
                continue
            yield self.plain(path) or self._title, module

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter, shared ones under each of their names."""
        for path, parameter in self.root.named_parameters(remove_duplicate=False):
            yield self.plain(path), parameter


def _inner(module: torch.nn.Module) -> str | None:
    """Where a wrapper has what it wraps; None if it is none."""
    children = module._modules
    if isinstance(module, _PARALLEL):
        return "module"
    if isinstance(module, torch.jit.ScriptModule):  # its children are in no dict
        return None
    return next((name for name in _INSIDE if isinstance(children.get(name), torch.nn.Module)), None)


def _parallel() -> tuple[type, ...]:
    found = [getattr(torch.nn.parallel, "DistributedDataParallel", None), torch.nn.DataParallel]
    return tuple(cls for cls in found if cls is not None)


_PARALLEL = _parallel()


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside all its wrappers."""
    while (name := _inner(module)) is not None:
        found = module._modules[name]
        assert found is not None
        module = found
    return module


def type_name(module: torch.nn.Module) -> str:
    """The class of a module as people import it.

    >>> type_name(torch.nn.Linear(1, 1))
    'torch.nn.Linear'
    """
    cls = _class_of(module)
    if getattr(torch.nn, cls.__name__, None) is cls:
        return f"torch.nn.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _class_of(module: torch.nn.Module) -> type:
    """Its class; fully_shard puts one of its own in front of it."""
    cls = type(module)
    bases = cls.__bases__
    sharded = len(bases) == 2 and bases[0].__name__ == "FSDPModule"
    return bases[1] if sharded else cls
