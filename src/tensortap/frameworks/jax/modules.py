"""The outputs of Flax modules, marked while their program is traced or run.

Linen offers a hook for every method of every module. nnx has none: while `instrumented` holds,
the classes of its modules have their `__call__` wrapped. Paths are those of the outermost module
that is called, so nothing is written into the user's model.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tensortap.frameworks.jax.primitive import mark
from tensortap.frameworks.jax.trees import key_name
from tensortap.frameworks.protocol import type_name
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind

Wanted = Callable[[Kind, str], bool]
"""Whether a kind of thing is wanted of the module of that name."""

_active = threading.local()
_patching = threading.RLock()
_patched: dict[type, Any] = {}
_users = 0


@contextlib.contextmanager
def instrumented(wanted: Wanted) -> Iterator[None]:
    """Mark what modules put out, in this thread."""
    before = getattr(_active, "wanted", None), getattr(_active, "stack", None)
    _active.wanted, _active.stack = wanted, _Stack()
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    try:
        with contextlib.ExitStack() as stack:
            if linen is not None:
                stack.enter_context(linen.intercept_methods(_linen))
            if nnx is not None:
                stack.enter_context(_wrapped_calls(nnx))
            yield
    finally:
        _active.wanted, _active.stack = before


def _mark_all(output: Any, name: str, cls: type) -> Any:
    """The output with every array in it marked."""
    try:
        return _marked(output, name, cls)
    except Exception as error:  # an output that JAX cannot take apart
        pipeline.fault(name, error)
        return output


def _marked(output: Any, name: str, cls: type) -> Any:
    wanted = _active.wanted
    activation, gradient = wanted(Kind.ACTIVATION, name), wanted(Kind.GRADIENT, name)
    if not (activation or gradient):
        return output
    leaves, tree = jax.tree_util.tree_flatten_with_path(output, is_leaf=_is_object)
    if not any(_is_array(leaf) for _, leaf in leaves):
        return output
    module = type_name(cls)

    def marked(path: Any, leaf: Any) -> Any:
        if not _is_array(leaf):
            return leaf
        part = ".".join(key_name(key) for key in path)
        return mark(leaf, name, part=part, module=module, activation=activation, gradient=gradient)

    return jax.tree_util.tree_unflatten(tree, [marked(path, leaf) for path, leaf in leaves])


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and isinstance(leaf.dtype, np.dtype)


def _is_object(node: Any) -> bool:
    """Whether it is something of nnx with an identity, which must not be rebuilt."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, (nnx.Module, nnx.Variable))


# -- linen -----------------------------------------------------------------------------------


def _linen(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    output = call(*args, **kwargs)
    method = context.method_name
    module = context.module
    if (method != "__call__" and method.startswith("_")) or method == "setup":
        return output
    if module.scope is None:
        return output
    name = ".".join(module.path) or type(module).__name__
    if method != "__call__":
        name = f"{name}.{method}"
    return _mark_all(output, name, type(module))


# -- nnx -------------------------------------------------------------------------------------


class _Stack:
    """The nnx modules whose calls are under way, and the names below the outermost."""

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.names: list[dict[int, str]] = []

    def enter(self, module: Any) -> str:
        """The name of a module that is called now."""
        for known in reversed(self.names):
            if id(module) in known:
                self._push(module, {})
                return known[id(module)]
        # the outermost, or one that a transformation made anew below another
        prefix = ""
        if self.modules:
            above = self._name_of(self.modules[-1])
            prefix = f"{above}.{type(module).__name__}"
        names = {id(module): prefix or type(module).__name__}
        nnx = sys.modules["flax.nnx"]
        for path, node in nnx.iter_graph(module):
            if isinstance(node, nnx.Module) and node is not module:
                below = ".".join(str(key) for key in path)
                names.setdefault(id(node), f"{prefix}.{below}" if prefix else below)
        self._push(module, names)
        return names[id(module)]

    def _name_of(self, module: Any) -> str:
        for known in reversed(self.names):
            if id(module) in known:
                return known[id(module)]
        return type(module).__name__

    def _push(self, module: Any, names: dict[int, str]) -> None:
        self.modules.append(module)
        self.names.append(names)

    def leave(self) -> None:
        self.modules.pop()
        self.names.pop()


def _wrap(call: Any) -> Any:
    @functools.wraps(call)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        stack: _Stack | None = getattr(_active, "stack", None)
        # super().__call__() is no call of another module
        if stack is None or (stack.modules and stack.modules[-1] is self):
            return call(self, *args, **kwargs)
        name = stack.enter(self)
        try:
            output = call(self, *args, **kwargs)
        finally:
            stack.leave()
        return _mark_all(output, name, type(self))

    return wrapper


def _subclasses(cls: type) -> Iterator[type]:
    subclasses: list[type] = cls.__subclasses__()
    for sub in subclasses:
        yield sub
        yield from _subclasses(sub)


@contextlib.contextmanager
def _wrapped_calls(nnx: Any) -> Iterator[None]:
    global _users
    with _patching:
        _users += 1
        for cls in set(_subclasses(nnx.Module)):
            call = cls.__dict__.get("__call__")
            if call is not None and cls not in _patched:
                _patched[cls] = call
                type.__setattr__(cls, "__call__", _wrap(call))
    try:
        yield
    finally:
        with _patching:
            _users -= 1
            if not _users:
                for cls, call in _patched.items():
                    type.__setattr__(cls, "__call__", call)
                _patched.clear()
