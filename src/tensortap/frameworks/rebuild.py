"""The neutral tree back as the values it was made of, as copies that belong to the caller.

Nothing that a message says is run: classes are looked up among the modules that are imported
already, checked, and filled without calling their code.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import keyword
import os
import re
import sys
import types
import unicodedata
from collections.abc import Callable
from typing import Any

from tensortap.errors import WireError
from tensortap.frameworks.snapshot import DEPTH
from tensortap.record import Blob, Fields, Mapping, Number, Opaque, TensorData, Value

_HEX = re.compile(r"-?0x[0-9a-f]+")
_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def rebuild(value: Value) -> Any:
    """The value that a snapshot was taken of; changing it changes no history.

    Tensors come back as what they were where their framework can be imported, else as NumPy
    arrays. An object of which only the repr was kept comes back as its `Opaque`.

    >>> from tensortap.record import Items
    >>> rebuild(Items("tuple", (1, 2.5)))
    (1, 2.5)
    """
    return _rebuild(value, 0)


def _rebuild(value: Value, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, Opaque)):
        return value
    if isinstance(value, TensorData):
        return _builder(value.framework)(value)
    if isinstance(value, Number):
        return _number(value)
    if isinstance(value, Blob):
        return bytearray(value.data) if value.kind == "bytearray" else value.data
    if depth >= DEPTH:
        raise WireError(f"a value deeper than {DEPTH} containers")
    if isinstance(value, Fields):
        return _fields(value, [_rebuild(part, depth + 1) for part in value.values])
    try:
        if isinstance(value, Mapping):
            return {_rebuild(k, depth + 1): _rebuild(v, depth + 1) for k, v in value.items}
        if value.kind in _ITEMS:
            return _ITEMS[value.kind]([_rebuild(part, depth + 1) for part in value.items])
    except TypeError as error:
        raise WireError(f"a key or a member of a set that can't be one: {error}") from None
    raise WireError(f"no container is called {value.kind[:40]!r}")


def _number(value: Number) -> complex | int:
    if value.kind == "complex" and len(value.parts) == 2:
        return complex(*value.parts)
    if value.kind == "int" and _HEX.fullmatch(value.text):
        return int(value.text, 16)
    raise WireError(f"not a number: {value.kind[:40]!r}")


@functools.cache
def _builder(framework: str) -> Callable[[TensorData], Any]:
    from tensortap.frameworks.numpy.adapter import build

    if framework in ("numpy", "numpy.generic"):
        return build
    if framework not in ("torch", "jax"):
        raise WireError(f"no framework is called {framework[:40]!r}")
    if framework == "jax" and "jax" not in sys.modules:
        # whoever only looks must not take the accelerator's memory from whoever trains on it
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        module = importlib.import_module(f"tensortap.frameworks.{framework}.adapter")
    except Exception:  # not installed, or broken: the numbers can be had all the same
        return build
    found: Callable[[TensorData], Any] = module.build
    return found


def _fields(value: Fields, parts: list[Any]) -> Any:
    names = value.names
    if value.kind not in ("namedtuple", "dataclass") or len(names) != len(parts):
        raise WireError(f"not a namedtuple and not a dataclass: {value.type[:80]!r}")
    cls = find_class(value.type)
    if value.kind == "namedtuple":
        if cls is None or tuple not in cls.__mro__ or getattr(cls, "_fields", None) != names:
            cls = _fresh("namedtuple", _last_name(value.type), names)
        made: Any = tuple.__new__(cls, parts)
        return made
    if cls is None or not _can_be_filled(cls, names):
        cls = _fresh("dataclass", _last_name(value.type), names)
    made = object.__new__(cls)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


def find_class(path: str) -> type | None:
    """The class that ``module:qualname`` names, where it is imported already; runs nothing."""
    module_name, _, qualname = path.partition(":")
    found: Any = sys.modules.get(module_name)
    if not isinstance(found, types.ModuleType):
        return None
    # plain dict lookups: getattr on a module or a class can run code, even import
    space: Any = object.__getattribute__(found, "__dict__")
    for name in qualname.split("."):
        found = space.get(name)
        if not isinstance(found, type):
            return None
        space = type.__getattribute__(found, "__dict__")
    return found if isinstance(found, type) else None


def _can_be_filled(cls: type, names: tuple[str, ...]) -> bool:
    """Whether a dataclass has exactly these fields and takes them without running its code."""
    if not dataclasses.is_dataclass(cls) or hasattr(cls, "__del__"):
        return False  # a finalizer would run on what a message says
    if tuple(field.name for field in dataclasses.fields(cls)) != names:
        return False
    if cls.__new__ is not object.__new__ or dict in cls.__mro__ or BaseException in cls.__mro__:
        return False
    slots = types.MemberDescriptorType
    return all(isinstance(found := _attribute(cls, name), slots) or not hasattr(found, "__set__")
               for name in names)  # fmt: skip


def _attribute(cls: type, name: str) -> Any:
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _last_name(path: str) -> str:
    name = path.rpartition(":")[2].rpartition(".")[2]
    return name if _is_name(name) else "Unnamed"


def _is_name(name: str) -> bool:
    # only normal forms: Python would see another name in any other
    return (
        name.isidentifier()
        and not keyword.iskeyword(name)
        and not name.startswith("__")
        and len(name) <= 200
        and unicodedata.normalize("NFKC", name) == name
    )


@functools.lru_cache(maxsize=256)
def _fresh(kind: str, name: str, fields: tuple[str, ...]) -> type:
    """A class made for the purpose, where the one that was caught is not imported here."""
    allowed = all(_is_name(field) for field in fields) and len(set(fields)) == len(fields)
    if not allowed or (kind == "namedtuple" and any(f.startswith("_") for f in fields)):
        raise WireError(f"these can't be fields of a {kind}: {', '.join(fields)[:80]}")
    if kind == "namedtuple":
        return collections.namedtuple(name, fields)
    return dataclasses.make_dataclass(name, fields, unsafe_hash=True)
