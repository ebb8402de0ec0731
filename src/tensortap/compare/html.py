"""Write a comparison report as one self-contained HTML file.

The size of the file is bounded: a large report gets a coarser timeline, and details only of the
first differences. The page says what is left out.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.compare.compared_run import Disagreement
from tensortap.compare.pictures import pictures_of
from tensortap.compare.provenance import rows_of
from tensortap.compare.report import CompareReport, Difference, gaps
from tensortap.compare.result import as_json, figures_of
from tensortap.compare.text import lacks
from tensortap.errors import TensortapError
from tensortap.viz.html_file import html_file, shortened, static_text, write_html_file

PICTURES = 80
_SECONDS = 60.0  # bytes of all pictures
_DETAILS = 2000
_CELLS = 1_000_000
_ROWS = 3000
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
        "call": key.call, "rank": key.rank, "by": each.by, "level": _level(_size(each)),
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
    severe: dict[tuple[str, str, int], int] = {}

    def note(name: str, kind: str, step: int, code: int) -> None:
        at = name, kind, step
        severe[at] = max(code, severe.get(at, 0))

    for (name, kind, step), size in report.worst.items():
        note(name, kind, step, SAME if not size else CLOSE + _level(size))
    for lone in report.missing:
        key = lone.key
        note(key.name, key.kind, key.step, ONLY_A if lone.side == "a" else ONLY_B)
    for each in report.differences:
        key = each.key
        code = EXPECTED if each.expected else DIFFERS + _level(_size(each))
        note(key.name, key.kind, key.step, code)
    every = dict.fromkeys((name, kind) for name, kind, _ in severe)
    rows = _most_telling(list(every), severe)
    steps = sorted({step for _, _, step in severe})
    bucket = max(1, math.ceil(len(rows) * len(steps) / _CELLS))
    columns = {step: number // bucket for number, step in enumerate(steps)}
    numbers = {row: number for number, row in enumerate(rows)}
    cells = np.zeros((len(rows), len(steps[::bucket])), np.uint8)
    for (name, kind, step), code in severe.items():
        number = numbers.get((name, kind))
        if number is not None:
            at = number, columns[step]
            cells[at] = max(cells[at], code)
    return Timeline(rows, steps[::bucket], bucket, cells, len(every) - len(rows))


def _most_telling(
    rows: list[tuple[str, str]], severe: dict[tuple[str, str, int], int]
) -> list[tuple[str, str]]:
    """Return the rows that fit: differing ones first, in their order."""
    if len(rows) <= _ROWS:
        return rows
    worst = dict.fromkeys(rows, 0)
    for (name, kind, _), code in severe.items():
        worst[name, kind] = max(worst[name, kind], code)
    kept = set(sorted(rows, key=lambda row: worst[row] < ONLY_B)[:_ROWS])
    return [row for row in rows if row in kept]


def _size(difference: Difference) -> float:
    found = difference.comparison
    if found.nonfinite or not found.count:  # different shapes, text, a container
        return math.inf
    return found.rel_l2 if found.rel_l2 is not None else found.max_rel


def _level(size: float) -> int:
    """Return the color level of a relative difference; the last level is for no measure."""
    low, high = _DECADES
    if not size < math.inf:
        return _LEVELS
    if size <= 0:
        return 0
    share = (math.log10(size) - low) / (high - low)
    return round((_LEVELS - 1) * min(1.0, max(0.0, share)))


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
