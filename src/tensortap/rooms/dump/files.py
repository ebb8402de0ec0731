"""One plain file per object: `.pt`, `.npy`, `.pkl`, and formats that users add.

Reading never runs code from a file, unless the caller trusts it: `.pt` is read with
``weights_only``, `.npy` without objects, `.pkl` not at all.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tensortap.core.arguments import check_text
from tensortap.core.dtypes import DTYPES, numpy_dtype
from tensortap.core.errors import NotFound, TensortapError, UntrustedFile
from tensortap.core.files import CorruptFile, check_regular, open_regular, plain
from tensortap.core.limits import available_memory
from tensortap.core.record import TensorData
from tensortap.runs.payloads import DTYPE_NAMES, TensorReader, has_nbytes
from tensortap.values import describe
from tensortap.values.view import array_of


class FileFormat(NamedTuple):
    """Functions that save, load and compare objects of a type."""

    type: type | str  # a class, or "module.Class" of one that may not be imported
    suffix: str
    save: Callable[[Any, Path], None]
    load: Callable[[Path, bool, bool], Any]  # path, whether it is trusted, whether to map it
    compare: Callable[[Any, Any], bool] | None = None


_formats: list[FileFormat] = []


def register_format(
    type: type,  # noqa: A002  the obvious name
    suffix: str,
    save: Callable[[Any, Path], None],
    load: Callable[[Path], Any],
    compare: Callable[[Any, Any], bool] | None = None,
) -> None:
    """Register how `dump` saves objects of a type: ``save(obj, path)`` and ``load(path)``.

    >>> import json, pathlib
    >>> register_format(
    ...     dict,
    ...     ".json",
    ...     lambda obj, path: path.write_text(json.dumps(obj)) and None,
    ...     lambda path: json.loads(path.read_text()),
    ... )
    >>> _ = _formats.pop(0)
    """
    check_text("suffix", suffix)
    if not suffix.startswith(".") or "/" in suffix:
        raise ValueError(f"suffix must be like '.json', got {suffix!r}")
    _formats.insert(0, FileFormat(type, suffix, save, lambda path, *_: load(path), compare))


def format_of(obj: object) -> FileFormat:
    """Return the format for an object; formats that were registered last come first."""
    for known in (*_formats, *_BUILT_IN):
        cls = _resolve(known.type)
        if cls is not None and isinstance(obj, cls) and not _holds_objects(obj):
            return known
    name, dtype, _ = describe(obj)
    if dtype and not name.startswith("numpy."):  # a tensor of any other framework
        return _NUMPY
    return _PICKLE


def save_file(obj: object, path: Path) -> None:
    format_of(obj).save(obj, path)


def own_comparison(a: object, b: object) -> Callable[[Any, Any], bool] | None:
    """Return the comparison that was registered for the type of two objects, if any."""
    for known in _formats:
        if known.compare is None or isinstance(known.type, str):
            continue
        if isinstance(a, known.type) and isinstance(b, known.type):
            return known.compare
    return None


def _holds_objects(obj: Any) -> bool:
    # `.npy` files hold arrays of objects only as pickles
    return bool(getattr(getattr(obj, "dtype", None), "hasobject", False))


def suffixes() -> set[str]:
    """Return the suffixes of all files that can be read."""
    return {form.suffix for form in (*_formats, *_BUILT_IN, _TENSORS, _PICKLE)}


def load_file(path: Path, *, trust: bool = False, mapped: bool = False) -> Any:
    """Return the object in a file; that of a pickle only if the file is trusted.

    With `mapped`, tensors are read-only, and those that do not fit into memory stay in the file if
    its format allows that; shortening the file then ends this process.
    """
    known = (*_formats, *_BUILT_IN, _TENSORS, _PICKLE)
    form = next((form for form in known if path.name.endswith(form.suffix)), None)
    if form is None:
        formats = ", ".join(sorted(suffixes()))
        raise TensortapError(f"{path.name}: unknown suffix; the formats are {formats}")
    try:
        check_regular(path)
        fits = path.stat().st_size < available_memory() // 2
        try:
            return form.load(path, trust, mapped and (form is _TENSORS or not fits))
        except MemoryError:
            return form.load(path, trust, mapped)
    except TensortapError:
        raise
    except MemoryError:
        raise TensortapError(f"{path} needs more memory than there is") from None
    except FileNotFoundError:
        raise NotFound(f"no such file: {path}") from None
    except Exception as error:
        # a damaged file may cause anything: EOFError, KeyError, struct.error …
        reason = plain(str(error).partition("\n")[0], 200) or type(error).__name__
        raise TensortapError(f"{path} cannot be read, it may be damaged: {reason}") from error


def _resolve(name: type | str) -> type | None:
    if not isinstance(name, str):
        return name
    module, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None)
    return found if isinstance(found, type) else None


def _save_torch(obj: Any, path: Path) -> None:
    sys.modules["torch"].save(obj, path)


def _load_torch(path: Path, trust: bool, mapped: bool) -> Any:
    import torch

    # only zip archives can be mapped, which is what torch writes since 1.6
    archived = zipfile.is_zipfile(path)
    if archived and not trust:
        with zipfile.ZipFile(path) as archive:
            if any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist()):
                raise ValueError("it is compressed, which torch.save does not do")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about files that other versions have written
            options: dict[str, Any] = {"weights_only": not trust, "mmap": mapped and archived}
            return torch.load(path, map_location="cpu", **options)
    except pickle.UnpicklingError as error:
        raise UntrustedFile(
            f"{path.name} holds more than tensors and may run code when read: "
            f"pass trust=True if you trust it ({plain(str(error).splitlines()[0], 120)})"
        ) from None


def _save_numpy(obj: Any, path: Path) -> None:
    import numpy

    array = array_of(obj)
    assert array is not None
    if _is_extension(array.dtype.name):
        # `.npy` has no bfloat16 and the like: store bits, in a field with the name of the dtype
        bits = numpy.dtype([(array.dtype.name, f"u{array.dtype.itemsize}")])
        array = numpy.ascontiguousarray(array).view(bits)
    with path.open("wb") as stream:
        numpy.save(stream, array, allow_pickle=False)


def _load_numpy(path: Path, trust: bool, mapped: bool) -> Any:
    import numpy

    with open_regular(path) as stream:
        _check_length(stream)
    try:
        array = numpy.load(path, allow_pickle=trust, mmap_mode="r" if mapped else None)
    except ValueError as error:
        if mapped:  # an array without elements, or of objects, cannot be mapped
            return _load_numpy(path, trust, False)
        if "allow_pickle" not in str(error):
            raise
        raise UntrustedFile(
            f"{path.name} is damaged, or holds objects, which may run code when read: "
            "pass trust=True if you trust it"
        ) from None
    names: tuple[str, ...] = array.dtype.names or ()
    if len(names) == 1 and _is_extension(names[0]):  # see `_save_numpy`
        return array.view(numpy_dtype(names[0]))
    return array


def _check_length(stream: BinaryIO) -> None:
    """Raise ValueError if a file is too short: NumPy allocates memory before it finds that out."""
    from numpy.lib import format as npy

    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    left = os.fstat(stream.fileno()).st_size - stream.tell()
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize > left:
        raise ValueError(f"it is too short for an array of shape {shape}")


def _is_extension(name: str) -> bool:
    """Return whether NumPy has a dtype from ml_dtypes only."""
    return name in DTYPES and DTYPES[name].numpy not in ("", name)


def _load_tensors(path: Path, trust: bool, mapped: bool) -> Any:
    from tensortap.values.numpy.adapter import build

    tensors = tensors_in(path)
    return tensors if mapped else {name: build(tensor) for name, tensor in tensors.items()}


def tensors_in(path: Path) -> dict[str, TensorData]:
    """Return all tensors of a safetensors file, without padding; their bytes are read on demand."""
    reader, found = TensorReader(path), {}
    for key, entry in reader.entries.items():
        if key == "__metadata__" or key.startswith("__pad_"):
            continue
        data = reader.payload(key)
        name, shape = entry.get("dtype"), entry.get("shape")
        dtype = DTYPE_NAMES.get(name) if isinstance(name, str) else None
        if dtype is None:
            raise CorruptFile(f"{path}: {key!r} has the unknown dtype {plain(str(name), 40)}")
        if not isinstance(shape, list) or not has_nbytes(dtype, shape, data.nbytes):
            raise CorruptFile(
                f"{path}: {key!r} is a {dtype} of shape {str(shape)[:80]}, "
                f"but has {data.nbytes} bytes"
            )
        found[key] = TensorData("numpy", dtype, tuple(shape), data)
    return found


def _save_nothing(obj: Any, path: Path) -> None:
    raise TensortapError(f"{path.name}: dump does not write safetensors files")


def _save_pickle(obj: Any, path: Path) -> None:
    with path.open("wb") as stream:
        _Pickler(stream, protocol=4).dump(obj)


class _Pickler(pickle.Pickler):
    """Embeds torch tensors as `torch.save` writes them: their own pickles cannot hold float8."""

    def reducer_override(self, obj: Any) -> Any:
        tensor = _resolve("torch.Tensor")
        if tensor is None or not isinstance(obj, tensor):
            return NotImplemented
        torch = sys.modules["torch"]
        data = io.BytesIO()
        torch.save(obj, data)
        return torch.load, (io.BytesIO(data.getvalue()),)


def _load_pickle(path: Path, trust: bool, mapped: bool) -> Any:
    if not trust:
        raise UntrustedFile(
            f"{path.name} is a pickle, which may run code when read: "
            "pass trust=True if you trust it"
        )
    with open_regular(path) as stream:
        return pickle.load(stream)  # noqa: S301  the caller trusts it


_NUMPY = FileFormat("numpy.ndarray", ".npy", _save_numpy, _load_numpy)
_BUILT_IN = (FileFormat("torch.Tensor", ".pt", _save_torch, _load_torch), _NUMPY)
_TENSORS = FileFormat(object, ".safetensors", _save_nothing, _load_tensors)
_PICKLE = FileFormat(object, ".pkl", _save_pickle, _load_pickle)
