"""Write a comparison report as one self-contained HTML file.

The size of the file is bounded: a large report gets a coarser timeline, and details only of the
first differences. The page says what is left out.
"""

from __future__ import annotations

import base64
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.compare.provenance import rows_of
from tensortap.compare.report import CompareReport, Difference, gaps
from tensortap.compare.result import as_json, figures_of
from tensortap.compare.text import lacks
from tensortap.errors import TensortapError
from tensortap.frameworks.view import array_of
from tensortap.readers.assemble import Disagreement
from tensortap.stats.conversion import as_real, is_number
from tensortap.viz import reals
from tensortap.viz.html_file import html_file, shortened, static_text, write_html_file

PICTURES = 80
_SECONDS = 60.0  # bytes of all pictures
_DETAILS = 2000
_CELLS = 1_000_000
_ROWS = 3000
_SIDE = 64  # cells of a picture, at most
_AT_ONCE = 1 << 22  # elements that are converted at once
_NOT_FINITE = -128
_TEXT = 400  # longest text from a run, in characters

# states of a timeline cell, the larger the worse: a cell of several steps shows the worst
NONE, SAME, CLOSE, ONLY_B, ONLY_A, EXPECTED, DIFFERS = 0, 1, 2, 104, 105, 106, 110
_LEVELS = 100
_DECADES = -8, 1  # relative differences at which the levels begin


def write_html(
    report: CompareReport,
    path: str | Path,
    *,
    pictures: int = PICTURES,
    progress: Callable[[int, int], object] | None = None,
) -> Path:
    """Write a report; `pictures` is the number of differences whose tensors are drawn."""
    return write_html_file(path, render(report, pictures=pictures, progress=progress))


def render(
    report: CompareReport,
    *,
    pictures: int = PICTURES,
    progress: Callable[[int, int], object] | None = None,
) -> str:
    """Return the page as text."""
    body, style, script = (
        static_text("tensortap.compare", name)
        for name in ("report.html", "report.css", "report.js")
    )
    data = _data(report, pictures, progress)
    return html_file("tensortap compare", body, data, scripts=[script], style=style)


def _data(
    report: CompareReport, pictures: int, progress: Callable[[int, int], object] | None
) -> dict[str, Any]:
    timeline = _timeline(report)
    first = report.first
    shown = report.differences[:_DETAILS]
    if first is not None and not any(each is first for each in shown):
        shown = *shown[:-1], first  # all earlier ones were expected
    numbers = {each: number for number, each in enumerate(timeline.rows)}
    missing = gaps(report.missing)
    return {
        "agree": bool(report),
        "a": _short(report.a),
        "b": _short(report.b),
        "counts": {
            "compared": report.compared,
            "same": report.equal,
            "by_statistics": report.by_statistics,
            "differ": len(report.differences),
            "expected": sum(bool(each.expected) for each in report.differences),
            "only_a": sum(each.side == "a" for each in report.missing),
            "only_b": sum(each.side == "b" for each in report.missing),
            "ignored": report.ignored,
        },
        "allow_missing": report.allow_missing,
        "culprit": _short(report.culprit.removeprefix("culprit: ")),
        "bitwise": _short(
            report.bitwise_text and f"first bitwise difference: {report.bitwise_text}"
        ),
        "tolerance": report.tolerance_text,
        "first": next((n for n, each in enumerate(shown) if each is first), None),
        "provenance": [[_short(cell) for cell in row] for row in rows_of(report.provenance)[:500]],
        "names": [_short(name) for name, _ in timeline.rows],
        "kinds": [kind for _, kind in timeline.rows],
        "left_out": timeline.left_out,
        "steps": timeline.steps,
        "bucket": timeline.bucket,
        "cells": base64.b64encode(timeline.cells.tobytes()).decode(),
        "decades": _DECADES,
        "differences": [
            _detail(each, numbers.get((each.key.name, each.key.kind), -1)) for each in shown
        ],
        "pictures": _pictures(report, shown, pictures, progress),
        "missing": [
            [_short(gap.name), gap.kind, gap.count, gap.steps, list(gap.ranks[:50]), lacks(gap)]
            for gap in missing[:_DETAILS]
        ],
        "gaps": len(missing),
    }


def _detail(each: Difference, row: int) -> dict[str, Any]:
    found = figures_of(each.comparison)
    parts = [f"{part.path}: {part.line}" for part in each.comparison.parts[:20]]
    kept = (
        "reason shapes dtypes count finite mismatches share nonfinite max_abs mean_abs max_rel "
        "mean_rel rel_l2 cosine ulps worst values passing_atol passing_rtol"
    ).split()
    figures = {name: found[name] for name in kept if found[name] not in (None, "")}
    if "values" in figures:
        figures["values"] = [_short(str(value)) for value in figures["values"]]
    if "reason" in figures:
        figures["reason"] = _short(figures["reason"])
    key = each.key
    return {
        "row": row, "name": _short(key.name), "kind": key.kind, "step": key.step,
        "call": key.call, "rank": key.rank, "by": each.by, "level": _level(each),
        "expected": _short(each.expected), "rule": _short(each.rule),
        "why": [_short(text) for text in each.explanations],
        "notes": [_short(text) for text in each.comparison.notes],
        "parts": [_short(text) for text in parts], "figures": as_json(figures),
    }  # fmt: skip


def _short(text: str) -> str:
    return shortened(text, _TEXT)


# -- the timeline --------------------------------------------------------------------------


class Timeline(NamedTuple):
    """Names and kinds in the order of execution, by steps."""

    rows: list[tuple[str, str]]
    steps: list[int]
    """The first step of each column."""
    bucket: int
    """Number of recorded steps per column."""
    cells: NDArray[np.uint8]
    left_out: int
    """Number of rows left out; they agree, unless all rows differ."""


def _timeline(report: CompareReport) -> Timeline:
    worst, missing = report.worst, [each.key for each in report.missing]
    sizes = np.fromiter(worst.values(), np.float64, len(worst))
    codes = [
        *np.where(sizes == 0, SAME, CLOSE + _levels(sizes)),
        *(ONLY_A if each.side == "a" else ONLY_B for each in report.missing),
        *(EXPECTED if each.expected else DIFFERS + _level(each) for each in report.differences),
    ]
    keys = missing + [each.key for each in report.differences]
    places = [*worst, *((key.name, key.kind, key.step) for key in keys)]
    numbers: dict[tuple[str, str], int] = {}
    row = np.array([numbers.setdefault(place[:2], len(numbers)) for place in places], np.int64)
    step = np.array([place[2] for place in places], np.int64)
    steps, column = np.unique(step, return_inverse=True)
    cells = np.array(codes, np.uint8)
    severe = np.zeros(len(numbers), np.uint8)
    np.maximum.at(severe, row, cells)
    # differing rows first if not all fit, but in their order
    kept = np.sort(np.argsort(severe < ONLY_B, kind="stable")[:_ROWS])
    position = np.full(len(numbers), -1)
    position[kept] = np.arange(len(kept))
    bucket = max(1, math.ceil(len(kept) * len(steps) / _CELLS))
    drawn = np.zeros((len(kept), len(steps[::bucket])), np.uint8)
    shown = position[row] >= 0
    np.maximum.at(drawn, (position[row][shown], column[shown] // bucket), cells[shown])
    every = list(numbers)
    return Timeline(
        [every[i] for i in kept], steps[::bucket].tolist(), bucket, drawn, len(every) - len(kept)
    )


def _level(difference: Difference) -> int:
    found = difference.comparison
    size = found.max_rel if found.rel_l2 is None else found.rel_l2
    if found.nonfinite or not found.count:  # different shapes, text, a container
        size = math.inf
    return int(_levels(np.array([size]))[0])


def _levels(sizes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the color levels of relative differences; the last level is for no measure."""
    low, high = _DECADES
    with np.errstate(divide="ignore"):
        share = np.clip((np.log10(sizes) - low) / (high - low), 0.0, 1.0)
    levels = np.rint((_LEVELS - 1) * np.nan_to_num(share)).astype(np.int64)
    return np.where(sizes < math.inf, levels, _LEVELS)


# -- pictures ------------------------------------------------------------------------------


def _pictures(
    report: CompareReport,
    shown: tuple[Difference, ...],
    most: int,
    progress: Callable[[int, int], object] | None,
) -> dict[int, Any]:
    """Return pictures by index of the difference: first one per name, then the others."""
    found: dict[int, Any] = {}
    if report.look is None:
        return found
    seen: set[tuple[str, str]] = set()
    once: list[int] = []
    again: list[int] = []
    for number, each in enumerate(shown):
        at = each.key.name, each.key.kind
        if each.by == "value":
            (again if at in seen else once).append(number)
        seen.add(at)
    chosen = sorted([*once, *again][:most])
    end = time.monotonic() + _SECONDS
    for done, number in enumerate(chosen, 1):
        if time.monotonic() > end:
            break
        try:
            drawn = pictures_of(*report.look(shown[number].key))
        except (Disagreement, TensortapError, OSError):
            drawn = None
        if drawn is not None:
            found[number] = as_json(drawn)
        if progress is not None:
            progress(done, len(chosen))
    return found


def pictures_of(a: Any, b: Any) -> dict[str, Any] | None:
    """Return what a page draws: cells from -127 to 127 of `scale`, -128 for not finite.

    Each cell is the value of its block that is farthest from zero. None if not a tensor.
    """
    one, other = array_of(a), array_of(b)
    if one is None or other is None or not all(is_number(x.dtype) and x.size for x in (one, other)):
        return None
    found: dict[str, Any] = {}
    small = shrink(one), shrink(other)
    scale = max(_largest(each) for each in small)
    found["a"], found["b"] = (_encoded(each, scale) for each in small)
    found["scale"] = scale
    if one.shape == other.shape:
        difference = shrink(one, other)
        found["scale_d"] = _largest(difference)
        found["d"] = _encoded(difference, found["scale_d"])
    return found


def shrink(a: NDArray[Any], b: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """Reduce a tensor, or ``a - b``, to 64×64 blocks with the value farthest from zero.

    Blocks with values that are not finite, and not the same in both, are not finite.

    >>> import numpy as np
    >>> shrink(np.array([[1, -5], [2, 3]], np.int8))
    array([[ 1., -5.],
           [ 2.,  3.]])
    """
    sides = [each.reshape(flattened(each.shape)) for each in (a, b) if each is not None]
    columns = sides[0].shape[1]
    if a.size <= _AT_ONCE:
        cells = reals.shrink(_real(*sides), _SIDE, _SIDE, 0.0)
    else:
        edges = [columns * i // min(_SIDE, columns) for i in range(min(_SIDE, columns) + 1)]
        strips = ([side[:, i:j] for side in sides] for i, j in itertools.pairwise(edges))
        cells = np.hstack([reals.shrink(_real(*strip), _SIDE, 1, 0.0) for strip in strips])
    return cells


def _real(one: NDArray[Any], other: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """Return a matrix as real numbers, or the difference of two: 0 where they are the same."""
    x = as_real(one)
    if other is None:
        return x
    y = as_real(other)
    with np.errstate(invalid="ignore", over="ignore"):
        difference: NDArray[np.float64] = x - y
    difference[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    return difference


def flattened(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return two axes for any number of axes, as close to a square as possible.

    >>> flattened((8, 16, 32, 64)), flattened((5,)), flattened(())
    ((128, 2048), (1, 5), (1, 1))
    """
    splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    if not splits:
        return 1, math.prod(shape)
    return min(splits, key=lambda each: abs(math.log(each[0] / each[1])))


def _largest(cells: NDArray[np.float64]) -> float:
    finite = cells[np.isfinite(cells)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def _encoded(cells: NDArray[np.float64], scale: float) -> dict[str, Any]:
    finite = np.isfinite(cells)
    share = np.where(finite, cells, 0.0) / (scale or 1.0)
    codes = np.rint(share * 127).astype(np.int8)
    # draw no nonzero value as zero, however small
    small = finite & (codes == 0) & (share != 0)
    codes[small] = np.sign(share[small]).astype(np.int8)
    codes[~finite] = _NOT_FINITE
    text = base64.b64encode(codes.tobytes()).decode()
    return {"rows": cells.shape[0], "columns": cells.shape[1], "cells": text}
