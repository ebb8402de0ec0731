"""Pickles that can be read without running code from the file."""

from __future__ import annotations

import io
import pickle
from typing import Any, BinaryIO

from tensortap.errors import TensortapError
from tensortap.frameworks.registry import framework_named, loaded_frameworks


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


_HARMLESS = {
    "builtins": {"complex", "set", "frozenset", "slice", "range", "bytearray"},
    "_io": {"BytesIO"},
    "collections": {"OrderedDict", "deque", "Counter"},
    "datetime": {"datetime", "date", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "jax._src.array": {"_reconstruct_array"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
    "tensortap.frameworks.rebuild": {"rebuild_tensor"},
    "torch": {"Size", "device"},
}


class _SafeUnpickler(pickle.Unpickler):
    """An unpickler that knows only classes that do nothing but hold data."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        super().__init__(stream)
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.serialization", "load"):
            return _load_torch
        if name in _HARMLESS.get(module, ()):
            return super().find_class(module, name)
        if module in ("ml_dtypes", "numpy", "torch") and _is_dtype(module, name):
            return super().find_class(module, name)
        raise UntrustedFile(
            f"{self._name} is a pickle with a {module}.{name}, which may run code when read: "
            "pass trust=True if you trust it"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise UntrustedFile(f"{self._name} is a pickle that refers to objects outside of it")


def _load_torch(stream: io.BytesIO) -> Any:
    return framework_named("torch").load(stream, trust=False)


def _is_dtype(module: str, name: str) -> bool:
    import importlib

    found = getattr(importlib.import_module(module), name, None)
    if module == "torch":
        return type(found).__name__ == "dtype"
    import numpy

    # classes of numbers, such as numpy.float32 and ml_dtypes.bfloat16
    return isinstance(found, type) and (issubclass(found, numpy.generic) or module == "ml_dtypes")
