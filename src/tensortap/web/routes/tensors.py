"""The tab Tensors: a slice of a tensor, its histogram and statistics, and a file to download."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response

from tensortap.errors import NotFound
from tensortap.record import Summary
from tensortap.runs.folders import file_name
from tensortap.runs.object_files import format_of
from tensortap.runs.rows import STATISTICS
from tensortap.stats import summarize_array
from tensortap.viz.figures import histogram_figure, tensor_figure
from tensortap.web.responses import PageRequest
from tensortap.web.tensor_slices import (
    CapturedTensors,
    CaptureQuery,
    SliceSpec,
    difference,
    find_tensors,
    python_code,
    slice_spec,
    take_slice,
)

_MAX_CELLS = 320  # per side
_MAX_HISTOGRAM = 1 << 24  # elements


def tensor(request: PageRequest) -> dict[str, Any]:
    """Return a slice as a figure, and what else the tab shows of the tensor."""
    found = find_tensors(request.entry, _query(request))
    path = found.path(request.text("leaf"))
    array, record = found.tensors[path], found.record
    spec = slice_spec(array.shape, request.integers("axes"), request.integers("at"))
    answer: dict[str, Any] = {
        "name": record.name, "kind": record.kind.value, "step": record.step, "rank": record.rank,
        "call": record.call, "dtype": str(array.dtype), "shape": list(array.shape), "leaf": path,
        "leaves": list(found.tensors), "axes": [spec.rows, spec.columns], "at": list(spec.at),
        "nbytes": int(array.nbytes), "python": python_code(found, path, spec),
    }  # fmt: skip
    if not array.size:
        message = f"This tensor has no elements: its shape is {list(array.shape)}."
        return {**answer, "empty": message}
    values = take_slice(array, spec)
    other = _subtrahend(request, found)
    if other is not None:
        other_path = other.path(path)
        subtrahend = other.tensors[other_path]
        if subtrahend.shape != array.shape:
            shapes = f"{list(array.shape)} and {list(subtrahend.shape)}"
            raise NotFound(f"no difference: the shapes are {shapes}")
        values = difference(values, take_slice(subtrahend, spec))
        title = "" if other.entry is found.entry else f"{other.entry.title}, "
        answer["minus"] = f"{title}step {other.record.step:,}, rank {other.record.rank}"
        code = python_code(other, other_path, spec, "y").splitlines()[2:]
        answer["python"] = "\n".join([answer["python"], *code, "x - y"])
    elif array.ndim > 2 and record.stats is not None:
        answer["all_statistics"] = _statistics(record.stats)
    return answer | _drawn(request, values, spec)


def _drawn(request: PageRequest, values: NDArray[Any], spec: SliceSpec) -> dict[str, Any]:
    """Return the figure of a slice, its histogram and its statistics."""
    top, bottom, left, right = region = _region(request.integers("zoom"), values.shape)
    part = values[top:bottom, left:right]
    summary = _summary(values)
    axes = tuple("" if axis < 0 else f"axis {axis}" for axis in (spec.rows, spec.columns))
    # the colors span the whole slice, so that zooming does not change them
    limit = summary.max_abs or None if summary is not None and summary.finite else None
    drawn: dict[str, Any] = {
        "region": list(region),
        "whole": list(values.shape),
        "statistics": _statistics(summary),
        "figure": tensor_figure(
            part[0] if spec.rows < 0 else part, origin=(top, left), axes=(axes[0], axes[1]),
            rows=_MAX_CELLS, columns=_MAX_CELLS, limit=limit, theme=request.theme,
        ),
    }  # fmt: skip
    if values.size <= _MAX_HISTOGRAM:
        drawn["histogram"] = histogram_figure(values, theme=request.theme)
    return drawn


def _query(request: PageRequest) -> CaptureQuery:
    if not request.text("name"):
        raise NotFound("choose a name on the left")
    integers = (request.integer(key) for key in ("step", "rank", "call"))
    return CaptureQuery(request.text("name"), request.kind, *integers)


def _subtrahend(request: PageRequest, found: CapturedTensors) -> CapturedTensors | None:
    """Return what is subtracted from a tensor: the same one at another step, rank or run."""
    record, minus = found.record, request.text("minus")
    if minus not in ("step", "rank", "run"):
        return None
    entry, step, rank = found.entry, record.step, record.rank
    if minus == "step":
        other = request.integer("otherstep")
        step = step - 1 if other is None else other
    elif minus == "rank":
        other = request.integer("otherrank")
        rank = int(not rank) if other is None else other
    elif request.other is None:
        raise NotFound("choose the other run")
    else:
        entry = request.other
    query = CaptureQuery(record.name, record.kind, step, rank, record.call)
    subtrahend = find_tensors(entry, query)
    if minus == "rank" and subtrahend.record.rank != rank:
        raise NotFound(f"rank {rank} has no {record.name!r}")
    return subtrahend


def _region(zoom: list[int], shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return the part that is zoomed into; all of it if there is no valid zoom."""
    rows, columns = shape
    if len(zoom) != 4:
        return 0, rows, 0, columns
    top, bottom, left, right = zoom
    top, left = max(0, min(top, rows - 1)), max(0, min(left, columns - 1))
    return top, max(top + 1, min(bottom, rows)), left, max(left + 1, min(right, columns))


def _summary(array: NDArray[Any]) -> Summary | None:
    try:
        return summarize_array(array)
    except TypeError:  # some dtypes have no statistics
        return None


def _statistics(summary: Summary | None) -> dict[str, Any]:
    return {} if summary is None else {name: getattr(summary, name) for name in STATISTICS}


def download(request: PageRequest) -> Response:
    """Return the whole tensor as a file of NumPy."""
    found = find_tensors(request.entry, _query(request))
    array = np.ascontiguousarray(found.tensors[found.path(request.text("leaf"))])
    # through a file: memory may not have room for a second copy
    with tempfile.NamedTemporaryFile(suffix=".npy", delete=False) as file:
        path = Path(file.name)
    format_of(array).save(array, path)
    record = found.record
    name = f"{file_name(record.name)}_step{record.step}_rank{record.rank}.npy"
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(name)}"}
    return FileResponse(
        path, media_type="application/octet-stream", headers=headers,
        background=BackgroundTask(path.unlink, missing_ok=True),
    )  # fmt: skip
