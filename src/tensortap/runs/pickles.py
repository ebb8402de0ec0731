"""Pickles that can be read without running code from the file, or trusting its pointers.

The unpickler calls only the functions below. It builds arrays and dtypes itself from plain data,
because the ones of NumPy accept states that make NumPy follow a pointer in the file. It bounds the
work of each call: a few bytes must not ask for hours or gigabytes.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import importlib
import io
import math
import pathlib
import pickle
import re
from collections.abc import Callable
from typing import Any, BinaryIO

from tensortap.errors import TensortapError
from tensortap.files import plain
from tensortap.frameworks.registry import framework_named, loaded_frameworks
from tensortap.values import DEPTH


class UntrustedFile(TensortapError):
    """A file that may run code when it is read."""


def save(obj: Any, stream: BinaryIO) -> None:
    """Pickle an object; tensors are embedded as their framework says."""
    _Pickler(stream, protocol=4).dump(obj)


def load(stream: BinaryIO, name: str) -> Any:
    """Return the object; raise UntrustedFile unless all its classes are harmless."""
    return _SafeUnpickler(stream, name).load()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        for framework in loaded_frameworks():
            reduction = framework.reduction(obj)
            if reduction is not None:
                return reduction
        return NotImplemented


# -- arrays ----------------------------------------------------------------------------------

_LARGEST_EMPTY = 1 << 20  # bytes or elements of an array without data
_PLAIN_DTYPE = re.compile(r"[<>|=]?(?:[?bBhHiIlLqQefdgFDGO]|[biufcSUVmMO]\d{1,9})")


class _Unbuilt:
    """An array or a dtype of which the pickle has not given the state yet."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.build = build


def _dtype_call(spec: Any, align: Any = False, copy: Any = True) -> _Unbuilt:
    return _Unbuilt(lambda state: _dtype(spec, state))


def _dtype(spec: Any, state: Any) -> Any:
    """Return the dtype that a pickle describes, built from its plain parts."""
    import numpy as np

    if isinstance(spec, str) and not _PLAIN_DTYPE.fullmatch(spec):
        raise ValueError(f"not the name of a dtype: {spec[:40]!r}")
    _, order, subarray, names, fields, size, *rest = state
    if subarray is not None:
        base, shape = subarray
        return np.dtype((_as_dtype(base), _shape(shape)))
    if names is not None:
        parts = [fields[name] for name in names]
        layout: Any = {
            "names": list(names),
            "formats": [_as_dtype(part[0]) for part in parts],
            "offsets": [int(part[1]) for part in parts],
            "itemsize": int(size),
        }
        dtype = np.dtype(layout)
        if dtype.hasobject:
            raise ValueError("a field of a dtype holds objects")
        return dtype
    dtype = np.dtype(spec)
    if dtype.kind in "mM" and len(rest) == 3 and rest[2] is not None:
        unit, count = rest[2][1][:2]
        unit = unit.decode() if isinstance(unit, bytes) else unit
        dtype = np.dtype(f"{dtype.kind}8[{int(count)}{unit}]")
    return dtype.newbyteorder(order) if order in ("<", ">") else dtype


def _as_dtype(found: Any) -> Any:
    import numpy as np

    if not isinstance(found, np.dtype):
        raise ValueError("a dtype is not complete")
    return found


def _shape(shape: Any) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(sizes) > 32 or not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
        raise ValueError(f"not a shape: {str(shape)[:40]}")
    return sizes


def _reconstruct(cls: Any, shape: Any, kind: Any) -> _Unbuilt:
    return _Unbuilt(_array)


def _array(state: Any) -> Any:
    """Return the array with a state: version, shape, dtype, whether Fortran order, and data."""
    import numpy as np

    _, shape, dtype, fortran, data = state
    order: Any = "F" if fortran else "C"
    if isinstance(data, list):
        if _as_dtype(dtype).kind != "O":
            raise ValueError("a list is not the data of an array of numbers")
        array = np.empty(len(data), object)
        for i, item in enumerate(data):
            array[i] = item
        return array.reshape(_shape(shape), order=order)
    return _frombuffer(data, dtype, shape, order)


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> Any:
    import numpy as np

    if isinstance(data, str):
        data = data.encode("latin-1")
    if _as_dtype(dtype).hasobject or not isinstance(data, (bytes, bytearray)):
        raise ValueError("an array of objects has no plain data")
    sizes = _shape(shape)
    # at least a byte each: there may be any number of elements without bytes
    if math.prod(sizes) * max(dtype.itemsize, 1) > max(len(data), _LARGEST_EMPTY):
        raise ValueError(f"{len(data)} bytes are not the data of an array of shape {sizes}")
    if not data:
        return np.zeros(sizes, dtype)  # zeros: no memory of this process
    return np.frombuffer(bytearray(data), dtype).reshape(sizes, order=order)


def _scalar(dtype: Any, data: Any) -> Any:
    return data if _as_dtype(dtype).kind == "O" else _frombuffer(data, dtype, (), "C")[()]


def _jax_array(function: Any, arguments: Any, state: Any, aval: Any) -> Any:
    import numpy as np

    array = _array(state)
    plain = 1, array.shape, array.dtype, False, array.tobytes()
    original = importlib.import_module("jax._src.array")._reconstruct_array
    return original(lambda *_: np.empty(0, array.dtype), (), plain, aval)


# -- other values ----------------------------------------------------------------------------


def _of_items(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes items from a container, not from an endless range."""

    def build(items: Any = (), *options: Any) -> Any:
        if not isinstance(items, (list, tuple, dict, set, frozenset, bytes, str)):
            raise ValueError(f"{make.__name__} of a {type(items).__name__}")
        return make(items, *options)

    return build


def _of_integers(make: Callable[..., Any], bits: int) -> Callable[..., Any]:
    def build(*parts: Any) -> Any:
        if not all(part is None or isinstance(part, int) for part in parts):
            raise ValueError(f"{make.__name__} of something other than integers")
        if any(part is not None and part.bit_length() > bits for part in parts):
            raise ValueError(f"{make.__name__} of a number that is too large")
        return make(*parts)

    return build


def _decimal(text: Any) -> decimal.Decimal:
    if not isinstance(text, str) or len(text) > 10_000:
        raise ValueError("not a decimal number")
    return decimal.Decimal(text)


def _fraction(*parts: Any) -> Any:
    if len(parts) == 1 and isinstance(parts[0], str):  # as older versions of Python write it
        parts = tuple(int(part) for part in parts[0].split("/"))
    return _of_integers(fractions.Fraction, 1 << 17)(*parts)


def _load_torch(stream: Any) -> Any:
    if not isinstance(stream, io.BytesIO):
        raise ValueError("a tensor is not embedded")
    return framework_named("torch").load(stream, trust=False)


def _path(cls: type) -> Callable[..., Any]:
    return lambda *parts: cls(*map(str, parts))


def _rebuild_tensor(*arguments: Any) -> Any:
    from tensortap.frameworks.rebuild import rebuild_tensor

    return rebuild_tensor(*arguments)


def _torch_value(name: str) -> Callable[..., Any]:
    def build(*parts: Any) -> Any:
        return getattr(importlib.import_module("torch"), name)(*parts)

    return build


_NUMPY: dict[str, Callable[..., Any]] = {
    "_reconstruct": _reconstruct,
    "scalar": _scalar,
    "_frombuffer": _frombuffer,
}
_CALLS: dict[str, dict[str, Callable[..., Any]]] = {
    "builtins": {
        "complex": complex,
        "set": _of_items(set),
        "frozenset": _of_items(frozenset),
        "bytearray": _of_items(bytearray),
        "slice": _of_integers(slice, 64),
        "range": _of_integers(range, 64),
    },
    "collections": {
        "OrderedDict": _of_items(collections.OrderedDict),
        "deque": _of_items(collections.deque),
        "Counter": _of_items(collections.Counter),
    },
    "datetime": {
        name: getattr(datetime, name)
        for name in ("datetime", "date", "time", "timedelta", "timezone")
    },
    "decimal": {"Decimal": _decimal},
    "fractions": {"Fraction": _fraction},
    "jax._src.array": {"_reconstruct_array": _jax_array},
    "numpy": {"dtype": _dtype_call},
    "numpy.core.multiarray": _NUMPY,
    "numpy._core.multiarray": _NUMPY,
    "numpy.core.numeric": _NUMPY,
    "numpy._core.numeric": _NUMPY,
    "tensortap.frameworks.rebuild": {"rebuild_tensor": _rebuild_tensor},
    "torch": {"Size": _of_items(_torch_value("Size")), "device": _torch_value("device")},
    "torch.serialization": {"load": _load_torch},
}
for _module in ("pathlib", "pathlib._local"):
    _CALLS[_module] = {
        name: _path(getattr(pathlib, name))
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")
    }
_KNOWN = {id(call) for calls in _CALLS.values() for call in calls.values()}


_Unpickler: Any = pickle._Unpickler  # in Python: its operations can be replaced


class _SafeUnpickler(_Unpickler):  # type: ignore[misc]
    """An unpickler that calls only the functions above.

    The unpickler in C allocates as much memory as a pickle asks for.
    """

    def __init__(self, stream: BinaryIO, name: str) -> None:
        super().__init__(stream)
        self._name = name
        self._depths: dict[int, int] = {}  # of tuples, which stay alive in `_tuples`
        self._tuples: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        found = _CALLS.get(module, {}).get(name)
        if found is not None:
            return found
        if (module, name) in (("_io", "BytesIO"), ("numpy", "ndarray")):
            return getattr(importlib.import_module(module), name)
        if module in ("ml_dtypes", "numpy", "torch") and _is_dtype(module, name):
            return getattr(importlib.import_module(module), name)
        raise self._untrusted(f"{module}.{name}")

    def _untrusted(self, what: str) -> UntrustedFile:
        return UntrustedFile(
            f"{self._name} is a pickle with a {plain(what, 200)}, which may run code when read: "
            "pass trust=True if you trust it"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise UntrustedFile(f"{self._name} is a pickle that refers to objects outside of it")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if id(function) not in _KNOWN:
            raise self._untrusted(f"call of {getattr(function, '__name__', '')}")
        self.stack[-1] = function(*arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        found = self.stack[-1]
        if isinstance(found, _Unbuilt):
            built = self.stack[-1] = found.build(state)
            for key, value in self.memo.items():
                if value is found:
                    self.memo[key] = built
        elif isinstance(found, io.BytesIO):
            found.write(state[0])
            found.seek(0)
        else:
            raise self._untrusted(f"state of a {type(found).__name__}")

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        cls = self.stack.pop()
        if cls is not io.BytesIO or arguments:
            raise self._untrusted(f"new {getattr(cls, '__name__', '')}")
        self.append(io.BytesIO())

    def refuse(self) -> None:
        raise self._untrusted("operation that tensortap does not write")

    def nest(self) -> None:
        """Bound how deep tuples are nested: Python hashes them recursively, without a limit."""
        made = self.stack[-1]
        inner = [self._depths.get(id(part), 1) for part in made if type(part) is tuple]
        if inner:
            depth = self._depths[id(made)] = 1 + max(inner)
            self._tuples.append(made)
            if depth > DEPTH:
                raise ValueError(f"tuples are nested deeper than {DEPTH}")


def _nested(operation: Callable[[Any], None]) -> Callable[[Any], None]:
    def build(unpickler: Any) -> None:
        operation(unpickler)
        unpickler.nest()

    return build


_OPERATIONS: dict[int, Callable[[Any], None]] = _Unpickler.dispatch
_REFUSED = "NEWOBJ_EX", "INST", "OBJ", "EXT1", "EXT2", "EXT4"
_TUPLES = "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"
_SafeUnpickler.dispatch = {
    **_OPERATIONS,
    pickle.REDUCE[0]: _SafeUnpickler.load_reduce,
    pickle.BUILD[0]: _SafeUnpickler.load_build,
    pickle.NEWOBJ[0]: _SafeUnpickler.load_newobj,
    **{getattr(pickle, name)[0]: _SafeUnpickler.refuse for name in _REFUSED},
    **{(code := getattr(pickle, name)[0]): _nested(_OPERATIONS[code]) for name in _TUPLES},
}


def _is_dtype(module: str, name: str) -> bool:
    found = getattr(importlib.import_module(module), name, None)
    if module == "torch":
        return type(found).__name__ == "dtype"
    import numpy

    # classes of numbers, such as numpy.float32 and ml_dtypes.bfloat16
    return isinstance(found, type) and (issubclass(found, numpy.generic) or module == "ml_dtypes")
