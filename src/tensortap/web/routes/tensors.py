"""The tab of tensors: a slice of one, its histogram and statistics, and the file to take away."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from tensortap.errors import NotFound
from tensortap.record import Summary
from tensortap.runs.folders import file_name
from tensortap.runs.object_files import format_of
from tensortap.stats import summarize_array
from tensortap.viz.figures import histogram_figure, tensor_figure
from tensortap.web import tensors as found_in
from tensortap.web.responses import Asked, guarded
from tensortap.web.routes.figures import theme_of
from tensortap.web.tensors import Found, Place, Slice

_SIDE = 320  # cells of a side at most
_HISTOGRAM = 1 << 24  # elements of a slice that are counted at once


def tensor(asked: Asked) -> dict[str, Any]:
    """A slice as a figure; what else the tab says of the tensor."""
    found = found_in.find_tensor(asked.shown, _place(asked))
    leaf = _leaf(found, asked.text("leaf"))
    array = found.leaves[leaf]
    part = found_in.slice_of(array.shape, asked.numbers("axes"), asked.numbers("at"))
    theme = theme_of(asked)
    record = found.record
    about: dict[str, Any] = {
        "name": record.name, "kind": record.kind.value, "step": record.step, "rank": record.rank,
        "call": record.call, "type": record.type, "dtype": str(array.dtype),
        "shape": list(array.shape), "leaf": leaf, "leaves": list(found.leaves),
        "axes": [part.rows, part.columns], "at": list(part.at),
        "nbytes": int(array.nbytes),
        "python": found_in.as_python(asked.shown, found, leaf, part),
    }  # fmt: skip
    if not array.size:
        about["empty"] = f"This tensor has no elements: its shape is {list(array.shape)}."
        return about
    drawn = found_in.cut(array, part)
    minus = _minus(asked, found)
    if minus is not None:
        about["minus"] = _said(asked, minus)
        about["python"] += "\n" + _minus_python(asked, minus, leaf, part)
        other = minus.leaves[_leaf(minus, leaf)]
        if other.shape != array.shape:
            shapes = f"{list(array.shape)} and {list(other.shape)}"
            raise NotFound(f"no difference: the shapes are {shapes}")
        drawn = found_in.difference(drawn, found_in.cut(other, part))
    region = _region(asked.numbers("zoom"), drawn.shape)
    about["region"] = list(region)
    inner = drawn[region[0] : region[1], region[2] : region[3]]
    figure = tensor_figure(
        inner[0] if part.rows < 0 else inner, origin=(region[0], region[2]),
        axes=(_axis(part.rows), _axis(part.columns)), rows=_SIDE, columns=_SIDE,
        limit=_limit(drawn), theme=theme,
    )  # fmt: skip
    about["figure"] = figure
    about["whole"] = list(drawn.shape)
    about["statistics"] = _statistics(_summary(drawn))
    if minus is None and array.ndim > 2 and record.stats is not None:
        about["of_all"] = _statistics(record.stats)
    if drawn.size <= _HISTOGRAM:
        about["histogram"] = histogram_figure(drawn, theme=theme)
    return about


def _place(asked: Asked) -> Place:
    if not asked.text("name"):
        raise NotFound("choose a name on the left")
    numbers = (asked.number(key) for key in ("step", "rank", "call"))
    return Place(asked.text("name"), asked.kind, *numbers)


def _leaf(found: Found, wanted: str) -> str:
    return wanted if wanted in found.leaves else next(iter(found.leaves))


def _minus(asked: Asked, found: Found) -> Found | None:
    """What is taken away from the tensor: another step, rank or run of it."""
    record, kind = found.record, asked.text("minus")
    if kind not in ("step", "rank", "run"):
        return None
    shown = asked.shown
    step, rank = record.step, record.rank
    if kind == "step":
        said = asked.number("otherstep")
        step = step - 1 if said is None else said
    elif kind == "rank":
        said = asked.number("otherrank")
        rank = (0 if record.rank else 1) if said is None else said
    else:
        if asked.other is None:
            raise NotFound("choose the other run")
        shown = asked.other
    other = found_in.find_tensor(shown, Place(record.name, record.kind, step, rank, record.call))
    if kind == "rank" and other.record.rank != rank:
        raise NotFound(f"there is no {record.name!r} of rank {rank}")
    return other


def _minus_python(asked: Asked, minus: Found, leaf: str, part: Slice) -> str:
    shown = asked.other if asked.text("minus") == "run" and asked.other else asked.shown
    lines = found_in.as_python(shown, minus, _leaf(minus, leaf), part, "y").splitlines()[2:]
    return "\n".join([*lines, "x - y"])


def _said(asked: Asked, found: Found) -> str:
    other = asked.other if asked.text("minus") == "run" else None
    title = "" if other is None else f"{other.title}, "
    return f"{title}step {found.record.step:,}, rank {found.record.rank}"


def _axis(number: int) -> str:
    return "" if number < 0 else f"axis {number}"


def _region(zoom: list[int], shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """What is zoomed into, with a margin; all of it where nothing is."""
    rows, columns = shape
    if len(zoom) != 4:
        return 0, rows, 0, columns
    top, bottom, left, right = zoom
    top, left = max(0, min(top, rows - 1)), max(0, min(left, columns - 1))
    return top, max(top + 1, min(bottom, rows)), left, max(left + 1, min(right, columns))


def _limit(array: NDArray[Any]) -> float | None:
    """The last colour, the same however far one zooms in."""
    summary = _summary(array)
    return summary.max_abs or None if summary is not None and summary.finite else None


def _summary(array: NDArray[Any]) -> Summary | None:
    try:
        return summarize_array(array)
    except TypeError:  # booleans of some kinds have none
        return None


def _statistics(summary: Summary | None) -> dict[str, Any]:
    if summary is None:
        return {}
    names = [name for name in summary.__struct_fields__ if name not in ("first_bin", "bins")]
    return {name: getattr(summary, name) for name in names}


async def download(request: Request) -> Response:
    """The whole tensor as a file of NumPy."""

    asked = Asked(request.app.state.place, request)

    def work() -> Response:
        found = found_in.find_tensor(asked.shown, _place(asked))
        array = np.ascontiguousarray(found.leaves[_leaf(found, asked.text("leaf"))])
        # in a file: it may be larger than memory has room for twice
        with tempfile.NamedTemporaryFile(suffix=".npy", delete=False) as draft:
            path = Path(draft.name)
        format_of(array).save(array, path)
        record = found.record
        name = f"{file_name(record.name)}_step{record.step}_rank{record.rank}.npy"
        headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(name)}"}
        return FileResponse(
            path, media_type="application/octet-stream", headers=headers,
            background=BackgroundTask(path.unlink, missing_ok=True),
        )  # fmt: skip

    return await run_in_threadpool(guarded, work, asked)
