"""The values that snapshots were taken of, rebuilt as copies that belong to the caller.

Nothing that a message says is run: classes are looked up among the modules that are already
imported, checked, and filled without calling their code.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import keyword
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from tensortap.core.errors import WireError
from tensortap.core.record import Blob, Fields, Mapping, Number, Opaque, TensorData, Value
from tensortap.core.values import DEPTH
from tensortap.values.registry import framework_named

_HEX = re.compile(r"-?0x[0-9a-f]+")
_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def rebuild(value: Value, depth: int = 0) -> Any:
    """Return the value that a snapshot was taken of; changing it changes no history.

    Tensors come back in their framework if it can be imported, else as NumPy arrays. An object of
    which only the repr was kept comes back as its `Opaque`.

    >>> from tensortap.core.record import Items
    >>> rebuild(Items("tuple", (1, 2.5)))
    (1, 2.5)
    """
    if value is None or isinstance(value, (bool, int, float, str, Opaque)):
        return value
    if isinstance(value, TensorData):
        return _builder(value.framework)(value)
    if isinstance(value, Number):
        return _number(value)
    if isinstance(value, Blob):
        return bytearray(value.data) if value.kind == "bytearray" else value.data
    if depth >= DEPTH:
        raise WireError(f"value is nested deeper than {DEPTH} containers")
    depth += 1
    if isinstance(value, Fields):
        return _fields(value, [rebuild(part, depth) for part in value.values])
    try:
        if isinstance(value, Mapping):
            return {rebuild(key, depth): rebuild(part, depth) for key, part in value.items}
        if value.kind in _ITEMS:
            return _ITEMS[value.kind]([rebuild(part, depth) for part in value.items])
    except TypeError as error:
        raise WireError(f"unhashable key of a dict or member of a set: {error}") from None
    raise WireError(f"no container is called {value.kind[:40]!r}")


def _number(value: Number) -> complex | int:
    if value.kind == "complex" and len(value.parts) == 2:
        return complex(*value.parts)
    if value.kind == "int" and _HEX.fullmatch(value.text):
        return int(value.text, 16)
    raise WireError(f"not a number: {value.kind[:40]!r}")


@functools.cache
def _builder(framework: str) -> Callable[[TensorData], Any]:
    try:
        return framework_named("numpy" if framework == "numpy.generic" else framework).rebuild
    except WireError:
        raise
    except Exception:  # not installed, or broken: NumPy can hold the numbers
        return framework_named("numpy").rebuild


def _fields(value: Fields, parts: list[Any]) -> Any:
    names = value.names
    if value.kind not in ("namedtuple", "dataclass"):
        raise WireError(f"neither a namedtuple nor a dataclass: {value.type[:80]!r}")
    cls = find_class(value.type)
    if value.kind == "namedtuple":
        if cls is None or tuple not in cls.__mro__ or getattr(cls, "_fields", None) != names:
            cls = _substitute("namedtuple", value.type, names)
        rebuilt: Any = tuple.__new__(cls, parts)
        return rebuilt
    if cls is None or not _can_be_filled(cls, names):
        cls = _substitute("dataclass", value.type, names)
    rebuilt = object.__new__(cls)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(rebuilt, name, part)
    return rebuilt


def find_class(path: str) -> type | None:
    """Return the imported class that ``module:qualname`` names; None if there is none."""
    module_name, _, qualname = path.partition(":")
    found: Any = sys.modules.get(module_name)
    if not isinstance(found, types.ModuleType):
        return None
    # plain dict lookups: getattr on a module or a class can run code, even import modules
    namespace: Any = object.__getattribute__(found, "__dict__")
    for name in qualname.split("."):
        found = namespace.get(name)
        if not isinstance(found, type):
            return None
        namespace = type.__getattribute__(found, "__dict__")
    return found if isinstance(found, type) else None


def _can_be_filled(cls: type, names: tuple[str, ...]) -> bool:
    """Return whether a dataclass has exactly these fields and takes them without running code."""
    if not dataclasses.is_dataclass(cls) or hasattr(cls, "__del__"):
        return False  # a finalizer would run with contents that a message chose
    if tuple(field.name for field in dataclasses.fields(cls)) != names:
        return False
    if cls.__new__ is not object.__new__ or dict in cls.__mro__ or BaseException in cls.__mro__:
        return False
    slots = types.MemberDescriptorType
    return all(isinstance(found := _attribute(cls, name), slots) or not hasattr(found, "__set__")
               for name in names)  # fmt: skip


def _attribute(cls: type, name: str) -> Any:
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


@functools.lru_cache(maxsize=256)
def _substitute(kind: str, name: str, fields: tuple[str, ...]) -> type:
    """Return a new class with these fields, for one that is not imported in this process."""
    name = name.rpartition(":")[2].rpartition(".")[2]
    name = name if name.isidentifier() and not keyword.iskeyword(name) else "Unnamed"
    try:  # both check the names
        if any(field.startswith("__") for field in fields):
            raise ValueError("names of Python itself")
        if kind == "namedtuple":
            return collections.namedtuple(name, fields)
        return dataclasses.make_dataclass(name, fields, unsafe_hash=True)
    except (TypeError, ValueError, SyntaxError) as error:
        raise WireError(f"not the fields of a {kind}: {', '.join(fields)[:80]} ({error})") from None
