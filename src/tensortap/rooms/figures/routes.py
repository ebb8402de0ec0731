"""The tabs of figures: training, Layers, Exponents and Tensors."""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response

from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.record import Kind, Record, Summary
from tensortap.core.rooms import offer
from tensortap.core.values import leaves
from tensortap.page.catalog import CatalogEntry, RunEntry
from tensortap.page.responses import PageRequest, PageRoute
from tensortap.rooms.figures.figures.exponents import exponents_figure
from tensortap.rooms.figures.figures.heatmap import heatmap_figure
from tensortap.rooms.figures.figures.lines import lines_figure
from tensortap.rooms.figures.figures.tensors import histogram_figure, tensor_figure
from tensortap.rooms.figures.figures.theme import AUTO, message_figure, themed
from tensortap.rooms.figures.figures.training import sparkline, training_figure
from tensortap.runs.folders import file_name
from tensortap.runs.reader import Reader, find_all, value_of
from tensortap.runs.rows import STATISTICS
from tensortap.runs.run_reader import RunReader
from tensortap.stats import summarize_array
from tensortap.stats.conversion import is_number
from tensortap.table.frames import choose_rank
from tensortap.values.snapshot import borrow
from tensortap.values.view import array_of

if TYPE_CHECKING:
    from tensortap.table.table import Table


_MAX_TENSORS = 200  # of one value
_MAX_HISTOGRAM = 1 << 24  # elements


class CapturedTensors(NamedTuple):
    """A record and its tensors, by their path within the value."""

    entry: CatalogEntry
    record: Record
    tensors: dict[str, Any]  # arrays, or files of them

    def path(self, wanted: str) -> str:
        """Return a path if there is a tensor, else the first path."""
        return wanted if wanted in self.tensors else next(iter(self.tensors))


class SliceSpec(NamedTuple):
    """The two axes of a tensor that are drawn, and the indices on the others."""

    rows: int  # an axis, or -1 for none
    columns: int
    at: tuple[int, ...]  # an index per axis; meaningless for the two that are drawn


def tensor(request: PageRequest) -> dict[str, Any]:
    """Return a slice as a figure, and what else the tab shows of the tensor."""
    found = _requested(request)
    path = found.path(request.text("leaf"))
    array, record = found.tensors[path], found.record
    spec = slice_spec(array.shape, request.integers("axes"), request.integers("at"))
    answer: dict[str, Any] = {
        "name": record.name, "kind": record.kind.value, "step": record.step, "rank": record.rank,
        "call": record.call, "dtype": str(array.dtype), "shape": list(array.shape), "leaf": path,
        "leaves": list(found.tensors), "axes": [spec.rows, spec.columns], "at": list(spec.at),
        "nbytes": int(array.nbytes),
        "download": request.context.access.signed(
            "/api/tensor.npy", run=found.entry.id, name=record.name, kind=record.kind.value,
            step=record.step, rank=record.rank, call=record.call, leaf=path,
        ),
    }  # fmt: skip
    if not array.size:
        return answer | {"empty": f"This tensor has no elements: its shape is {list(array.shape)}."}
    values = take_slice(array, spec)
    if array.ndim > 2 and record.stats is not None:
        answer["all_statistics"] = _statistics(record.stats)
    return answer | _drawn(request, values, spec)


def _drawn(request: PageRequest, values: NDArray[Any], spec: SliceSpec) -> dict[str, Any]:
    """Return the figure of a slice, its histogram and its statistics."""
    top, bottom, left, right = region = _region(request.integers("zoom"), values.shape)
    part = values[top:bottom, left:right]
    try:
        summary = summarize_array(values)
    except TypeError:  # some dtypes have no statistics
        summary = None
    axes = tuple("" if axis < 0 else f"axis {axis}" for axis in (spec.rows, spec.columns))
    # the colors span the whole slice, so that zooming does not change them
    limit = summary.max_abs or None if summary is not None and summary.finite else None
    drawn: dict[str, Any] = {
        "region": list(region),
        "whole": list(values.shape),
        "statistics": _statistics(summary),
    }
    row = part[0] if spec.rows < 0 else part
    figure = tensor_figure(row, origin=(top, left), axes=(axes[0], axes[1]), limit=limit)
    drawn["figure"] = themed(figure, request.theme)
    if values.size <= _MAX_HISTOGRAM:
        drawn["histogram"] = themed(histogram_figure(values), request.theme)
    return drawn


def _region(zoom: list[int], shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return the part that is zoomed into; all of it if there is no valid zoom."""
    rows, columns = shape
    if len(zoom) != 4:
        return 0, rows, 0, columns
    top, bottom, left, right = zoom
    top, left = max(0, min(top, rows - 1)), max(0, min(left, columns - 1))
    return top, max(top + 1, min(bottom, rows)), left, max(left + 1, min(right, columns))


def _statistics(summary: Summary | None) -> dict[str, Any]:
    return {} if summary is None else {name: getattr(summary, name) for name in STATISTICS}


def download(request: PageRequest) -> Response:
    """Return the whole tensor as a file of NumPy."""
    found = _requested(request)
    array = np.ascontiguousarray(found.tensors[found.path(request.text("leaf"))])
    # through a file: memory may not have room for a second copy
    with tempfile.NamedTemporaryFile(suffix=".npy", delete=False) as file:
        path = Path(file.name)
    offer("dump.save_file")(array, path)
    record = found.record
    name = f"{file_name(record.name)}_step{record.step}_rank{record.rank}.npy"
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(name)}"}
    return FileResponse(
        path, media_type="application/octet-stream", headers=headers,
        background=BackgroundTask(path.unlink, missing_ok=True),
    )  # fmt: skip


# -- which tensor ----------------------------------------------------------------------------


def _requested(request: PageRequest) -> CapturedTensors:
    if not request.text("name"):
        raise NotFound("choose a name on the left")
    step, rank, call = (request.integer(key) for key in ("step", "rank", "call"))
    return find_tensors(request.entry, request.text("name"), request.kind, step, rank, call)


def find_tensors(
    entry: CatalogEntry,
    name: str,
    kind: Kind | None,
    step: int | None,
    rank: int | None,
    call: int | None,
) -> CapturedTensors:
    """Return the tensors of a capture; if there is none at its step, of the last one before it."""
    reader = entry.reader()
    records = find_all(reader, name, kind=kind)
    ranks = sorted({record.rank for record in records})
    rank = rank if rank in ranks else ranks[0]
    records = [record for record in records if record.rank == rank]
    if kind is None:
        records = [record for record in records if record.kind is records[-1].kind]
    steps = sorted({record.step for record in records})
    wanted = steps[-1] if step is None else step
    step = max((each for each in steps if each <= wanted), default=steps[0])
    records = [record for record in records if record.step == step]
    head = ([each for each in records if each.call == call] or records)[-1]
    record = reader.load(head)
    tensors = _tensors_of(reader, record)
    if tensors:
        return CapturedTensors(entry, record, tensors)
    if record.stats is not None and record.value is None:
        raise NotFound(
            f"Only statistics of {record.name} ({record.kind.value}) were kept. To keep tensors: "
            f"tap.track(model, tensors=r'^{record.name}$'), or tap.catch(x, '{record.name}')."
        )
    raise NotFound(f"{record.name!r} at step {record.step} holds no tensor of numbers")


def _tensors_of(reader: Reader, record: Record) -> dict[str, Any]:
    """Return the tensors of a record by their path."""
    file = record.tags.get("file")
    if file is not None and isinstance(reader, RunReader):
        value = borrow(reader.load_file(file))
    else:
        value = value_of(record)
    arrays = ((where, array_of(leaf)) for where, leaf in leaves(value))
    numeric = ((where, x) for where, x in arrays if x is not None and is_number(x.dtype))
    return dict(islice(numeric, _MAX_TENSORS))


# -- slices ----------------------------------------------------------------------------------


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
        return np.asarray(array).reshape(1, -1)
    drawn = (spec.rows, spec.columns)
    part = array[tuple(slice(None) if i in drawn else at for i, at in enumerate(spec.at))]
    return part if spec.rows < spec.columns else part.T


DEFAULT_STATISTIC = "rm2"
_MAX_SPARKLINES = 200
_MAX_LINES = 64


def training(request: PageRequest) -> dict[str, Any]:
    table, rank = request.entry.table(), None  # curves need no whole tensors
    if request.text("rank") not in ("", "all"):
        table, rank = table_and_rank(request)
    return themed(training_figure(table, rank=rank, height=104), request.theme)


def sparklines(request: PageRequest) -> dict[str, Any]:
    """Return the SVG paths of small lines, and which names had NaN or Inf."""
    (table, rank), kind = table_and_rank(request), kind_of(request)
    metric = request.text("metric", DEFAULT_STATISTIC)
    lines = {}
    with table.lock:
        column = table.column(metric if table.has(metric) else DEFAULT_STATISTIC)
        for name in request.texts("name")[:_MAX_SPARKLINES]:
            rows = table.series(kind, name, rank)
            values = column[rows]
            bad = bool(table.nonfinite(rows).any())
            if np.isnan(values).all() and table.has("value"):  # single numbers
                values = table.column("value")[rows]
                bad |= bool((table.is_known("value", rows) & ~np.isfinite(values)).any())
            path = sparkline(values, width=37, height=18, steps=table.step[rows])
            lines[name] = {"d": path, "bad": bad}
    return {"lines": lines}


def overview(request: PageRequest) -> dict[str, Any]:
    (table, rank), kind = table_and_rank(request), kind_of(request)
    names = table.layers(kind)
    if not names:
        message = f"no {kind} in this run" if table.records() else "nothing has been captured yet"
        return themed(message_figure(message), request.theme)
    key = request.text("key")  # a state of the optimizer, such as exp_avg
    names = [name for name in names if not key or name.endswith(f".{key}")]
    figure = heatmap_figure(
        table, kind=kind, metric=request.text("metric", DEFAULT_STATISTIC),
        names=searched(request, names), rank=rank, relative=request.text("colors") != "absolute",
    )  # fmt: skip
    return themed(figure, request.theme)


def searched(request: PageRequest, names: list[str]) -> list[str]:
    try:
        pattern = request.pattern("q", ignore_case=True)
    except TensortapError:
        return names  # not typed completely yet; the page marks the search field
    return [name for name in names if pattern is None or pattern.search(name)]


def lines(request: PageRequest) -> dict[str, Any]:
    table, rank = table_and_rank(request)
    statistics = [name for name in request.texts("stat") if name == AUTO or table.has(name)]
    figure = lines_figure(
        table, names=request.texts("name")[:_MAX_LINES], kind=kind_of(request),
        metrics=statistics or [DEFAULT_STATISTIC], rank=rank,
        log={"log": True, "linear": False}.get(request.text("scale")),
        panels={"name": "name", "stat": "metric"}.get(request.text("by")),
        width_px=request.integer("width") or 900,
    )  # fmt: skip
    return themed(figure, request.theme)


def exponents(request: PageRequest) -> dict[str, Any]:
    (table, rank), kind, names = table_and_rank(request), kind_of(request), request.texts("name")
    if not names:
        raise NotFound("choose a name on the left")
    step = _captured_step(table, kind, names[0], request.integer("step"))
    figure = exponents_figure(
        table, name=names, kind=kind, step=step, rank=rank,
        dtype_annotation=request.text("dtype") or None, log=request.text("scale") == "log",
    )  # fmt: skip
    return {**themed(figure, request.theme), "step": step}


def table_and_rank(request: PageRequest) -> tuple[Table, int | None]:
    """Return the table to draw, and the rank: whole tensors if the page chose none."""
    rank, entry = request.text("rank"), request.entry
    if isinstance(entry, RunEntry) and request.kind in (Kind.VALUE, Kind.LOCAL):
        entry.complete()
    return choose_rank(entry.table(), rank if rank == "all" else request.integer("rank"))


def _captured_step(table: Table, kind: str, name: str, wanted: int | None) -> int:
    """Return the last step at or before the wanted one at which a name was captured."""
    steps = table.steps(kind, name)
    return at_or_before(steps, wanted) if len(steps) else wanted or 0


def at_or_before(steps: NDArray[np.int64], wanted: int | None) -> int:
    """Return the last of some steps that is not after the wanted one, or else the first."""
    if wanted is None:
        return int(steps[-1])
    return int(steps[max(0, int(np.searchsorted(steps, wanted, side="right")) - 1)])


def kind_of(request: PageRequest) -> str:
    return (request.kind or Kind.ACTIVATION).value


ROUTES = (
    PageRoute("training", training),
    PageRoute("sparklines", sparklines),
    PageRoute("overview", overview),
    PageRoute("lines", lines),
    PageRoute("exponents", exponents),
    PageRoute("tensor", tensor),
    PageRoute("tensor.npy", download, cached=False),
)
