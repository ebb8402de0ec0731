"""The names of a torch model's modules and parameters, as its author wrote them.

Wrappers (DataParallel, torch.compile, checkpoints, FSDP, Fabric) put themselves between a module
and its parent; their segments are left out of paths.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

# where wrappers keep the wrapped module
_WRAPPED = (
    "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"
)  # fmt: skip


class Names:
    """The names in one model.

    >>> model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    >>> names = Names(model)
    >>> [name for name, _ in names.modules()], [name for name, _ in names.parameters()]
    (['Sequential', '0'], ['0.weight', '0.bias'])
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self._prefixes: list[tuple[str, str]] = []
        for path, module in root.named_modules():
            wrapped = _wrapped(module)
            if wrapped is not None:
                # Fabric keeps it under two names
                for name, child in module.named_modules(remove_duplicate=False):
                    if child is wrapped[1]:
                        self._prefixes.append((f"{path}.{name}" if path else name, path))
        self._keras = dict(_keras_layers(root)) if "keras" in sys.modules else {}
        # the innermost first, so that the others still match what is left of a path
        self._prefixes.sort(key=lambda pair: -len(pair[0]))
        self._title = _class_of(unwrapped(root)).__name__

    def plain(self, path: str) -> str:
        """Return a path without the segments of wrappers."""
        for long, short in self._prefixes:
            if path == long:
                path = short
            elif path.startswith(f"{long}."):
                path = f"{short}.{path[len(long) + 1 :]}" if short else path[len(long) + 1 :]
        return path

    def modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield every module that is no wrapper; the model itself goes by its class."""
        registered: set[int] = set()
        for path, module in self.root.named_modules():
            registered.add(id(module))
            if _wrapped(module) is None:
                yield self.plain(path) or self._title, module
        yield from (pair for pair in self._keras.items() if id(pair[1]) not in registered)

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield every parameter, shared ones under each of their names."""
        keras = {
            id(variable.value): f"{path}.{variable.name}"
            for path, layer in self._keras.items()
            for variable in getattr(layer, "variables", ())
        }
        for path, parameter in self.root.named_parameters(remove_duplicate=False):
            yield keras.get(id(parameter)) or self.plain(path), parameter


def _wrapped(module: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
    """Return the module in a wrapper and its name there, the first child; None for no wrapper."""
    child: tuple[str, torch.nn.Module] | None = next(module.named_children(), None)
    if child is not None and (
        child[0] in _WRAPPED
        or isinstance(module, _PARALLEL)
        or (child[0] == "module" and type(module).__name__ == "DeepSpeedEngine")
    ):
        return child
    return None


def _keras_layers(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the layers of a Keras model with their paths, a layer before those in it.

    Keras keeps most of them in lists, where torch does not find them.
    """
    paths = {id(module): path for path, module in root.named_modules()}
    pending = [module for module in root.modules() if hasattr(type(module), "_flatten_layers")]
    found: set[int] = set()
    for owner in pending:  # which grows
        for layer in owner._flatten_layers(include_self=False, recursive=False):
            path = paths.get(id(layer)) or ".".join(filter(None, (paths[id(owner)], layer.name)))
            for below, module in layer.named_modules():
                if id(module) not in found:
                    found.add(id(module))
                    paths.setdefault(id(module), f"{path}.{below}" if below else path)
                    yield paths[id(module)], module
                    if hasattr(type(module), "_flatten_layers"):
                        pending.append(module)


_PARALLEL: tuple[type, ...] = (torch.nn.DataParallel,)
if torch.distributed.is_available():
    _PARALLEL += (torch.nn.parallel.DistributedDataParallel,)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside all its wrappers."""
    while (wrapped := _wrapped(module)) is not None:
        module = wrapped[1]
    return module


def type_name(module: torch.nn.Module) -> str:
    """Return the class of a module as people import it.

    >>> type_name(torch.nn.Linear(1, 1))
    'torch.nn.Linear'
    """
    cls = _class_of(module)
    if getattr(torch.nn, cls.__name__, None) is cls:
        return f"torch.nn.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _class_of(module: torch.nn.Module) -> type:
    """Return the class of a module; fully_shard puts a class of its own in front of it."""
    cls = type(module)
    bases = cls.__bases__
    sharded = len(bases) == 2 and bases[0].__name__ == "FSDPModule"
    return bases[1] if sharded else cls
