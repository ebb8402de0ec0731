"""Marking the outputs of Flax, Equinox and Keras modules while their program is traced or run.

Linen has a public hook for every method of every module. The others have none: inside
`marked_modules`, the `__call__` methods of their module classes are wrapped. Names are paths below
the outermost module that is called, so nothing is written into the user's model; Keras has its own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tensortap.frameworks.jax.marks import Collector, mark
from tensortap.frameworks.protocol import type_name
from tensortap.record import Kind

Wants = Callable[[Kind, str], bool]
"""Whether to observe a kind of tensor of the module of that name."""

OnError = Callable[[str, Exception], object]
"""Takes the name of a module and an error of observing it."""

_thread = threading.local()
_patching = threading.RLock()
_patched: dict[type, Any] = {}
_users = 0


@contextlib.contextmanager
def marked_modules(wants: Wants, on_error: OnError, collector: Collector) -> Iterator[None]:
    """Mark the outputs of modules that are called in this thread."""
    outer: _Marking | None = getattr(_thread, "marking", None)
    _thread.marking = _Marking(wants, on_error, collector)
    linen = sys.modules.get("flax.linen")
    try:
        with contextlib.ExitStack() as stack:
            if linen is not None:
                stack.enter_context(linen.intercept_methods(_intercept_linen))
            stack.enter_context(_wrapped_calls(_base_classes()))
            yield
    finally:
        _thread.marking = outer


def key_name(key: Any) -> str:
    """Return the word in a key of a tree path: ``['kernel']``, ``.mu``, ``[0]``."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


class _Marking:
    """Which outputs are marked, and the modules whose calls are under way."""

    def __init__(self, wants: Wants, on_error: OnError, collector: Collector) -> None:
        self._wants = wants
        self._on_error = on_error
        self._collector = collector
        self._modules: list[Any] = []
        self._names: list[dict[int, str]] = []  # module id → name, one dict per call under way

    def mark(self, output: Any, name: str, cls: type) -> Any:
        """Return the output with every array in it marked."""
        self._collector.modules += 1

        def marked(path: Any, leaf: Any) -> Any:
            if not (isinstance(leaf, jax.Array) and isinstance(leaf.dtype, np.dtype)):
                return leaf
            whole = f"{name}[{'.'.join(map(key_name, path))}]" if path else name
            return mark(leaf, whole, type_name(cls), activation, gradient, self._collector)

        try:
            activation = self._wants(Kind.ACTIVATION, name)
            gradient = self._wants(Kind.GRADIENT, name)
            if not (activation or gradient):
                return output
            return jax.tree_util.tree_map_with_path(marked, output, is_leaf=_is_object)
        except Exception as error:  # an output that JAX cannot take apart
            self._on_error(name, error)
            return output

    def is_calling(self, module: Any) -> bool:
        """Return whether `module` is the module whose call is under way."""
        return bool(self._modules) and self._modules[-1] is module

    @contextlib.contextmanager
    def calling(self, module: Any) -> Iterator[str]:
        """Enter a call of a module and give its name."""
        name = _keras_name(module) or self._name_of(module)
        names = {}
        if name is None:
            # the outermost module, or one that a transformation has created below another
            prefix = ""
            if self._modules:
                above = self._modules[-1]
                above_name = self._name_of(above) or type(above).__name__
                prefix = f"{above_name}.{type(module).__name__}"
            name = prefix or type(module).__name__
            names = {id(module): name}
            for below, node in _modules_in(module):
                names.setdefault(id(node), f"{prefix}.{below}" if prefix else below)
        self._modules.append(module)
        self._names.append(names)
        try:
            yield name
        finally:
            self._modules.pop()
            self._names.pop()

    def _name_of(self, module: Any) -> str | None:
        for names in reversed(self._names):
            if id(module) in names:
                return names[id(module)]
        return None


def _base_classes() -> tuple[type, ...]:
    """Return the base classes of modules of the libraries that the program has imported."""
    places = (("flax.nnx", "Module"), ("equinox", "Module"), ("keras.layers", "Layer"))
    found = (getattr(sys.modules.get(library), name, None) for library, name in places)
    return tuple([cls for cls in found if cls is not None])


def _modules_in(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules in a module, each with its path."""
    nnx, eqx = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None and isinstance(module, nnx.Module):
        for path, node in nnx.iter_graph(module):
            if isinstance(node, nnx.Module) and node is not module:
                yield ".".join(map(str, path)), node
    elif eqx is not None and isinstance(module, eqx.Module):

        def inner(node: Any) -> bool:
            return node is not module and isinstance(node, eqx.Module)

        for keys, node in jax.tree_util.tree_flatten_with_path(module, is_leaf=inner)[0]:
            if inner(node):
                path = ".".join(map(key_name, keys))
                yield path, node
                yield from ((f"{path}.{below}", one) for below, one in _modules_in(node))


def _keras_name(module: Any) -> str:
    """Return the path of a Keras layer; empty for any other module."""
    layer = getattr(sys.modules.get("keras.layers"), "Layer", ())
    return str(module.path or module.name).replace("/", ".") if isinstance(module, layer) else ""


def _is_object(node: Any) -> bool:
    """Return whether a node has an identity and must not be rebuilt."""
    nnx, eqx = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if eqx is not None and isinstance(node, eqx.nn.State):
        return True
    return nnx is not None and isinstance(node, (nnx.Module, nnx.Variable))


def _intercept_linen(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    output = call(*args, **kwargs)
    method, module = context.method_name, context.module
    if (method != "__call__" and method.startswith("_")) or method == "setup":
        return output
    marking: _Marking | None = getattr(_thread, "marking", None)
    if module.scope is None or marking is None:
        return output
    name = ".".join(module.path) or type(module).__name__
    if method != "__call__":
        name = f"{name}.{method}"
    return marking.mark(output, name, type(module))


def _wrap_call(call: Any) -> Any:
    @functools.wraps(call)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        marking: _Marking | None = getattr(_thread, "marking", None)
        # super().__call__() is not a call of another module
        if marking is None or marking.is_calling(self):
            return call(self, *args, **kwargs)
        with marking.calling(self) as name:
            output = call(self, *args, **kwargs)
        return marking.mark(output, name, type(self))

    return wrapper


def _subclasses(cls: type) -> Iterator[type]:
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)


def _is_internal(cls: type) -> bool:
    """Return whether Equinox uses a module class for a transformed function, not for a layer."""
    return cls.__module__.startswith("equinox.") and not cls.__module__.startswith("equinox.nn.")


@contextlib.contextmanager
def _wrapped_calls(bases: tuple[type, ...]) -> Iterator[None]:
    global _users
    with _patching:
        _users += 1
        for cls in {cls for base in bases for cls in (base, *_subclasses(base))}:
            call = cls.__dict__.get("__call__")
            if (
                isinstance(call, types.FunctionType)
                and cls not in _patched
                and not _is_internal(cls)
            ):
                _patched[cls] = call
                type.__setattr__(cls, "__call__", _wrap_call(call))
    try:
        yield
    finally:
        with _patching:
            _users -= 1
            if not _users:
                for cls, call in _patched.items():
                    type.__setattr__(cls, "__call__", call)
                _patched.clear()
