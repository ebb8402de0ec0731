"""Captured tensors, two-dimensional slices of them, and the Python that gives the same slice."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.compare.elements import is_number
from tensortap.errors import NotFound, TensortapError
from tensortap.frameworks.snapshot import borrow
from tensortap.frameworks.view import array_of
from tensortap.readers.reader import find_all, value_of
from tensortap.readers.run import RunReader
from tensortap.record import Kind, Record
from tensortap.runs.object_files import load_file
from tensortap.stats.conversion import as_real
from tensortap.values import leaves
from tensortap.web.catalog import resolve_inside
from tensortap.web.catalog_entries import CatalogEntry

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_TENSORS = 200  # of one value


class CaptureQuery(NamedTuple):
    """Which capture is wanted; None leaves it open."""

    name: str
    kind: Kind | None = None
    step: int | None = None
    rank: int | None = None
    call: int | None = None


class CapturedTensors(NamedTuple):
    """A record and its tensors, by their path within the value."""

    entry: CatalogEntry
    record: Record
    newer: int  # captures of its name, step, rank and kind
    tensors: dict[str, NDArray[Any]]

    def path(self, wanted: str) -> str:
        """Return a path if there is a tensor, else the first path."""
        return wanted if wanted in self.tensors else next(iter(self.tensors))


def find_tensors(entry: CatalogEntry, query: CaptureQuery) -> CapturedTensors:
    """Return the tensors of a capture; if there is none at its step, of the last one before it."""
    reader = entry.reader()
    head, index = _nearest(reader, query)
    record = reader.load(head)
    file = record.tags.get("file")
    if file is not None and isinstance(reader, RunReader):
        value = borrow(load_file(resolve_inside(reader.file(file), reader.path), mapped=True))
    else:
        value = value_of(record)
    arrays = ((path, array_of(leaf)) for path, leaf in leaves(value))
    numeric = ((path, array) for path, array in arrays if array is not None and _is_numeric(array))
    tensors = dict(islice(numeric, _MAX_TENSORS))
    if tensors:
        return CapturedTensors(entry, record, index, tensors)
    if record.stats is not None and record.value is None:
        raise NotFound(
            f"Only statistics of {record.name} ({record.kind.value}) were kept. To keep tensors: "
            f"tap.track(model, tensors=r'^{record.name}$'), or tap.catch(x, '{record.name}')."
        )
    raise NotFound(f"{record.name!r} at step {record.step} holds no tensor of numbers")


def _nearest(reader: Any, query: CaptureQuery) -> tuple[Record, int]:
    records = find_all(reader, query.name, kind=query.kind)
    ranks = sorted({record.rank for record in records})
    rank = query.rank if query.rank in ranks else ranks[0]
    records = [record for record in records if record.rank == rank]
    if query.kind is None:
        records = [record for record in records if record.kind is records[-1].kind]
    steps = sorted({record.step for record in records})
    wanted = steps[-1] if query.step is None else query.step
    step = max((s for s in steps if s <= wanted), default=steps[0])
    records = [record for record in records if record.step == step]
    chosen = ([r for r in records if r.call == query.call] or records)[-1]
    return chosen, len(records) - 1 - records.index(chosen)


def _is_numeric(array: NDArray[Any]) -> bool:
    return array.dtype == bool or is_number(array.dtype)


class SliceSpec(NamedTuple):
    """The two axes of a tensor that are drawn, and the indices on the others."""

    rows: int  # an axis, or -1 for none
    columns: int
    at: tuple[int, ...]  # an index per axis; meaningless for the two that are drawn


def slice_spec(shape: tuple[int, ...], axes: list[int], at: list[int]) -> SliceSpec:
    """Return a valid slice for a shape that is as close as possible to the wanted one.

    >>> slice_spec((2, 3, 4), [], [1])
    SliceSpec(rows=1, columns=2, at=(1, 0, 0))
    >>> slice_spec((5,), [0, 1], []), slice_spec((), [], [])
    (SliceSpec(rows=-1, columns=0, at=(0,)), SliceSpec(rows=-1, columns=-1, at=()))
    """
    ndim = len(shape)
    wanted = [*at, *[0] * ndim]
    indices = tuple(max(0, min(i, size - 1)) for i, size in zip(wanted, shape, strict=False))
    if ndim < 2:
        return SliceSpec(-1, ndim - 1, indices)
    valid = len(axes) == 2 == len(set(axes)) and all(0 <= axis < ndim for axis in axes)
    rows, columns = axes if valid else (ndim - 2, ndim - 1)
    return SliceSpec(rows, columns, indices)


def take_slice(array: NDArray[Any], spec: SliceSpec) -> NDArray[Any]:
    """Return the slice as two axes, without a copy."""
    if array.ndim < 2:
        return array.reshape(1, -1)
    drawn = (spec.rows, spec.columns)
    if not all(size for axis, size in enumerate(array.shape) if axis not in drawn):
        raise TensortapError(f"this tensor has no elements: its shape is {list(array.shape)}")
    part = array[tuple(slice(None) if i in drawn else at for i, at in enumerate(spec.at))]
    return part if spec.rows < spec.columns else part.T


def difference(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return ``a - b`` in float64; 0 where both are NaN, or the same infinity."""
    x, y = as_real(a), as_real(b)
    with np.errstate(invalid="ignore", over="ignore"):
        result: NDArray[Any] = np.asarray(x - y)
    result[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    return result


def python_code(found: CapturedTensors, path: str, spec: SliceSpec, variable: str = "x") -> str:
    """Return Python code that gives the same slice."""
    record = found.record
    arguments = [repr(record.name)]
    if found.newer:
        arguments.append(str(found.newer))
    arguments += [f"step={record.step}", f"rank={record.rank}", f"kind={record.kind.value!r}"]
    lines = ["import tensortap as tap", "", f"run = tap.open({found.entry.where!r})"]
    lines.append(f"{variable} = run.get({', '.join(arguments)}){path}")
    ndim = found.tensors[path].ndim
    transposed = ".T" if spec.rows > spec.columns >= 0 else ""
    if ndim > 2:
        drawn = (spec.rows, spec.columns)
        index = ", ".join(":" if i in drawn else str(at) for i, at in enumerate(spec.at))
        lines.append(f"{variable}[{index}]{transposed}")
    elif transposed:
        lines.append(f"{variable}{transposed}")
    return "\n".join(lines)
