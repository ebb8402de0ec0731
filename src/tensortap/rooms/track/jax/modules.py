"""Marking the outputs of modules while their program is traced or run.

Linen has a public hook for every method of every module. nnx and Equinox have none: inside
`marked_modules`, the `__call__` methods of their module classes are wrapped. Names are paths below
the outermost module that is called, so nothing is written into the user's model.
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

from tensortap.core.record import Kind
from tensortap.rooms.track.jax.marks import Collector, mark
from tensortap.values.protocol import type_name

Wants = Callable[[Kind, str], bool]
"""Whether to observe a kind of tensor of the module of that name."""

OnError = Callable[[str, Exception], object]
"""Takes the name of a module and an error of observing it."""

_thread = threading.local()
_patching = threading.RLock()
_patched: dict[type, Any] = {}  # the `__call__` of each class
_users = 0


@contextlib.contextmanager
def marked_modules(wants: Wants, on_error: OnError, collector: Collector) -> Iterator[None]:
    """Mark the outputs of modules that are called in this thread."""
    outer: _Marking | None = getattr(_thread, "marking", None)
    _thread.marking = _Marking(wants, on_error, collector)
    linen = sys.modules.get("flax.linen")
    hook = contextlib.nullcontext() if linen is None else linen.intercept_methods(_intercept)
    try:
        with hook, _wrapped_calls():
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
    """The outputs to mark, and the modules whose calls are under way."""

    def __init__(self, wants: Wants, on_error: OnError, collector: Collector) -> None:
        self._wants = wants
        self._on_error = on_error
        self._collector = collector
        self._modules: list[Any] = []
        self._names: list[dict[int, str]] = []  # module id → name, one dict per call under way

    def observe(self, call: Any, name: str, cls: type, args: Any, kwargs: Any) -> Any:
        """Call a module and return its output, marked."""
        return self._mark(call(*args, **kwargs), name, cls)

    def _mark(self, output: Any, name: str, cls: type) -> Any:
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
        name = self._name_of(module)
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


def _base_classes() -> Iterator[type]:
    """Yield the base classes of modules of the libraries that the program has imported."""
    for library in ("flax.nnx", "equinox"):
        cls = getattr(sys.modules.get(library), "Module", None)
        if cls is not None:
            yield next((base for base in cls.__mro__ if "__call__" in base.__dict__), cls)


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


def _is_object(node: Any) -> bool:
    """Return whether a node has an identity and must not be rebuilt."""
    nnx, eqx = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if eqx is not None and isinstance(node, eqx.nn.State):
        return True
    return nnx is not None and isinstance(node, (nnx.Module, nnx.Variable))


def _intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Mark the output of a method of linen."""
    method, module = context.method_name, context.module
    marking: _Marking | None = getattr(_thread, "marking", None)
    hidden = (method != "__call__" and method.startswith("_")) or method == "setup"
    if hidden or module.scope is None or marking is None:
        return call(*args, **kwargs)
    name = ".".join(module.path) or type(module).__name__
    if method != "__call__":
        name = f"{name}.{method}"
    return marking.observe(call, name, type(module), args, kwargs)


def _wrap_call(call: Any) -> Any:
    @functools.wraps(call)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        marking: _Marking | None = getattr(_thread, "marking", None)
        # super().__call__() is not a call of another module
        if marking is None or marking.is_calling(self):
            return call(self, *args, **kwargs)
        with marking.calling(self) as name:
            inner = functools.partial(call, self)
            return marking.observe(inner, name, type(self), args, kwargs)

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
def _wrapped_calls() -> Iterator[None]:
    global _users
    with _patching:
        _users += 1
        for cls in {cls for base in _base_classes() for cls in (base, *_subclasses(base))}:
            method = cls.__dict__.get("__call__")
            is_function = isinstance(method, types.FunctionType)
            if is_function and cls not in _patched and not _is_internal(cls):
                _patched[cls] = method
                type.__setattr__(cls, "__call__", _wrap_call(method))
    try:
        yield
    finally:
        with _patching:
            _users -= 1
            if not _users:
                for cls, method in _patched.items():
                    type.__setattr__(cls, "__call__", method)
                _patched.clear()
