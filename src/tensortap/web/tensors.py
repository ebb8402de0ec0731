"""A captured tensor, found and cut: the slice that the page draws, and how Python gets the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.errors import NotFound, TensortapError
from tensortap.frameworks.view import array_of
from tensortap.readers.reader import find_all, value_of
from tensortap.readers.run import RunReader
from tensortap.record import Fields, Items, Kind, Mapping, Record
from tensortap.runs.object_files import load_file
from tensortap.stats.values import real
from tensortap.web.catalog import inside
from tensortap.web.entries import Shown, ShownRun

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LEAVES = 200  # tensors of one value that are offered


class Place(NamedTuple):
    """Which capture: what the page knows of it."""

    name: str
    kind: Kind | None = None
    step: int | None = None
    rank: int | None = None
    call: int | None = None


class Found(NamedTuple):
    """A capture with its tensors, by the path that leads to each from the value."""

    record: Record
    back: int  # how many captures of its name, step, rank and kind came after it
    leaves: dict[str, NDArray[Any]]


def find_tensor(shown: Shown, place: Place) -> Found:
    """The capture at a place, or the nearest before its step; the tensors that it holds."""
    reader: Any = shown.reader()
    record, back = _nearest(reader, place)
    loaded = reader.load(record)
    file = record.tags.get("file")
    if file is not None and isinstance(reader, RunReader) and isinstance(shown, ShownRun):
        value = load_file(inside(reader.file(file), shown.path), mapped=True)
    else:
        value = value_of(loaded)
    leaves: dict[str, NDArray[Any]] = {}
    _gather(value, "", leaves)
    if not leaves:
        if record.stats is not None and loaded.value is None:
            raise NotFound(_only_statistics(record))
        raise NotFound(f"{record.name!r} at step {record.step} holds no tensor of numbers")
    return Found(loaded, back, leaves)


def _only_statistics(record: Record) -> str:
    return (
        f"Of {record.name} ({record.kind.value}) only the statistics were kept. To keep tensors "
        f"whole: tap.track(model, tensors=r'^{record.name}$'), or tap.catch(x, '{record.name}')."
    )


def _nearest(reader: Any, place: Place) -> tuple[Record, int]:
    found = find_all(reader, place.name, kind=place.kind)
    ranks = sorted({record.rank for record in found})
    rank = place.rank if place.rank in ranks else ranks[0]
    found = [record for record in found if record.rank == rank]
    if place.kind is None:
        found = [record for record in found if record.kind is found[-1].kind]
    steps = sorted({record.step for record in found})
    wanted = steps[-1] if place.step is None else place.step
    step = max((s for s in steps if s <= wanted), default=steps[0])
    same = [record for record in found if record.step == step]
    chosen = [r for r in same if r.call == place.call] or same[-1:]
    return chosen[-1], len(same) - 1 - same.index(chosen[-1])


def _gather(value: Any, path: str, leaves: dict[str, NDArray[Any]]) -> None:
    """All tensors in a value, neutral or as the user had it."""
    if len(leaves) >= _LEAVES:
        return
    if isinstance(value, Items):
        children = [(f"[{i}]", each) for i, each in enumerate(value.items)]
    elif isinstance(value, Mapping):
        children = [(f"[{key!r}]", each) for key, each in value.items]
    elif isinstance(value, Fields):
        children = [(f".{n}", each) for n, each in zip(value.names, value.values, strict=True)]
    elif isinstance(value, dict):
        children = [(f"[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        children = [(f"[{i}]", each) for i, each in enumerate(value)]
    else:
        array = array_of(value)
        if array is not None and _drawable(array):
            leaves[path] = array
        return
    for step, child in children:
        _gather(child, path + step, leaves)


def _drawable(array: NDArray[Any]) -> bool:
    from tensortap.compare.elements import is_number

    return array.dtype == bool or is_number(array.dtype)


# -- slices --------------------------------------------------------------------------------


class Slice(NamedTuple):
    """Two axes of a tensor that are drawn, and where the others are cut."""

    rows: int  # an axis, or -1: there is none
    columns: int
    at: tuple[int, ...]  # an index for each axis; of those that are drawn it means nothing


def slice_of(shape: tuple[int, ...], axes: list[int], at: list[int]) -> Slice:
    """A slice that fits a shape, as near to the one that is wanted as may be.

    >>> slice_of((2, 3, 4), [], [1])
    Slice(rows=1, columns=2, at=(1, 0, 0))
    >>> slice_of((5,), [0, 1], []), slice_of((), [], [])
    (Slice(rows=-1, columns=0, at=(0,)), Slice(rows=-1, columns=-1, at=()))
    """
    ndim = len(shape)
    places = tuple(
        max(0, min(at[i] if i < len(at) else 0, size - 1)) for i, size in enumerate(shape)
    )
    if ndim < 2:
        return Slice(-1, ndim - 1, places)
    good = len(axes) == 2 and len(set(axes)) == 2 and all(0 <= axis < ndim for axis in axes)
    rows, columns = axes if good else (ndim - 2, ndim - 1)
    return Slice(rows, columns, places)


def cut(array: NDArray[Any], part: Slice) -> NDArray[Any]:
    """The slice as two axes, without a copy."""
    if array.ndim < 2:
        return array.reshape(1, -1)
    where = tuple(
        slice(None) if axis in (part.rows, part.columns) else part.at[axis]
        for axis in range(array.ndim)
    )
    if not all(array.shape[a] for a in range(array.ndim) if a not in (part.rows, part.columns)):
        raise TensortapError(f"this tensor has no elements: its shape is {list(array.shape)}")
    found = array[where]
    return found if part.rows < part.columns else found.T


def difference(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """``a - b`` in float64; equal infinities and NaN on both sides are no difference."""
    import numpy as np

    x, y = real(a), real(b)
    with np.errstate(invalid="ignore", over="ignore"):
        found: NDArray[Any] = np.asarray(x - y)
    found[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    return found


def as_python(shown: Shown, found: Found, leaf: str, part: Slice, variable: str = "x") -> str:
    """The lines that give the same slice in Python."""
    record = found.record
    asked = [repr(record.name)]
    if found.back:
        asked.append(str(found.back))
    asked += [f"step={record.step}", f"rank={record.rank}", f"kind={record.kind.value!r}"]
    lines = ["import tensortap as tap", "", f"run = tap.open({shown.where!r})"]
    lines.append(f"{variable} = run.get({', '.join(asked)}){leaf}")
    shape = found.leaves[leaf].shape
    if len(shape) > 2:
        drawn = (part.rows, part.columns)
        index = ", ".join(":" if i in drawn else str(part.at[i]) for i in range(len(shape)))
        turned = ".T" if part.rows > part.columns else ""
        lines.append(f"{variable}[{index}]{turned}")
    elif part.rows > part.columns >= 0:
        lines.append(f"{variable}.T")
    return "\n".join(lines)
