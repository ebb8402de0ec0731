"""One plain file an object: `.pt`, `.npy`, `.pkl`, and what users add.

Reading never runs what a file says: `.pt` through ``weights_only``, `.npy` without objects,
`.pkl` through an unpickler that knows only harmless classes, unless the caller trusts the file.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tensortap.errors import TensortapError


class UntrustedFile(TensortapError):
    """A file that would run code when it is read."""


class Format(NamedTuple):
    """How objects of a type are saved, loaded and compared."""

    type: type | str  # a class, or "module.Class" of one that need not be imported
    suffix: str
    save: Callable[[Any, Path], None]
    load: Callable[[Path, bool], Any]  # the path, and whether it is trusted
    compare: Callable[[Any, Any], bool] | None = None


_formats: list[Format] = []


def register_format(
    type: type,  # noqa: A002  the word that people expect
    suffix: str,
    save: Callable[[Any, Path], None],
    load: Callable[[Path], Any],
    compare: Callable[[Any, Any], bool] | None = None,
) -> None:
    """Dump objects of a type in a format of its own: ``save(obj, path)``, ``load(path)``.

    >>> import json, pathlib
    >>> register_format(
    ...     dict,
    ...     ".json",
    ...     lambda obj, path: path.write_text(json.dumps(obj)) and None,
    ...     lambda path: json.loads(path.read_text()),
    ... )
    >>> _ = _formats.pop(0)
    """
    if not suffix.startswith(".") or "/" in suffix:
        raise ValueError(f"a suffix is like '.json', not {suffix!r}")
    _formats.insert(0, Format(type, suffix, save, lambda path, trust: load(path), compare))


def format_of(obj: object) -> Format:
    """The format for an object: what was registered last comes first."""
    for known in (*_formats, *_BUILT_IN):
        cls = _resolve(known.type)
        if cls is not None and isinstance(obj, cls):
            return known
    return _PICKLE


def format_of_file(path: Path) -> Format:
    """The format of a file, by its suffix."""
    for known in (*_formats, *_BUILT_IN, _PICKLE):
        if path.name.endswith(known.suffix):
            return known
    suffixes = ", ".join(sorted({f.suffix for f in (*_formats, *_BUILT_IN, _PICKLE)}))
    raise TensortapError(f"{path.name}: no format has this suffix; there are {suffixes}")


def load_file(path: Path, *, trust: bool = False) -> Any:
    """The object in a file; a pickle of unknown classes only if the file is trusted."""
    return format_of_file(path).load(path, trust)


def _resolve(name: type | str) -> type | None:
    if not isinstance(name, str):
        return name
    module, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None)
    return found if isinstance(found, type) else None


def _save_torch(obj: Any, path: Path) -> None:
    import torch

    torch.save(obj, path)


def _load_torch(path: Path, trust: bool) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        raise UntrustedFile(
            f"{path.name} holds more than tensors and may run code when read: "
            f"trust=True if it is yours ({str(error).splitlines()[0][:120]})"
        ) from None


def _save_numpy(obj: Any, path: Path) -> None:
    import numpy

    with path.open("wb") as stream:
        numpy.save(stream, obj, allow_pickle=False)


def _load_numpy(path: Path, trust: bool) -> Any:
    import numpy

    return numpy.load(path, allow_pickle=trust)


def _save_pickle(obj: Any, path: Path) -> None:
    with path.open("wb") as stream:
        pickle.dump(obj, stream, protocol=4)


def _load_pickle(path: Path, trust: bool) -> Any:
    data = path.read_bytes()
    if trust:
        return pickle.loads(data)  # noqa: S301  the caller says that he trusts it
    return _Careful(io.BytesIO(data), path.name).load()


_HARMLESS = {
    "builtins": {"complex", "set", "frozenset", "slice", "range", "bytearray"},
    "collections": {"OrderedDict", "deque", "Counter"},
    "datetime": {"datetime", "date", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
    "ml_dtypes": {"bfloat16"},
}


class _Careful(pickle.Unpickler):
    """Knows only classes that do nothing but hold data."""

    def __init__(self, stream: io.BytesIO, name: str) -> None:
        super().__init__(stream)
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        if name in _HARMLESS.get(module, ()):
            return super().find_class(module, name)
        raise UntrustedFile(
            f"{self._name} is a pickle with a {module}.{name}, which may run code when read: "
            "trust=True if it is yours"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise UntrustedFile(f"{self._name} is a pickle that refers to things outside of it")


_BUILT_IN = (
    Format("torch.Tensor", ".pt", _save_torch, _load_torch),
    Format("numpy.ndarray", ".npy", _save_numpy, _load_numpy),
)
_PICKLE = Format(object, ".pkl", _save_pickle, _load_pickle)
