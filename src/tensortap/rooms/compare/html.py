"""Write a comparison report as one self-contained HTML file.

The size of the file is bounded: a large report gets a coarser timeline, and details only of the
first differences. The page says what is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.page.encoding import typed
from tensortap.rooms.compare.provenance import rows_of
from tensortap.rooms.compare.report import CompareReport, Difference, missing_rows
from tensortap.rooms.compare.text import figures_of_row
from tensortap.rooms.figures.figures.parts import flat_trace
from tensortap.rooms.figures.figures.theme import COLORS, Figure, Floats, labels, layout, scale
from tensortap.rooms.report.html_file import (
    HtmlReport,
    details,
    escape,
    header,
    html_table,
    section,
    write_html_file,
)

_DETAILS = 200
_ROWS, _COLUMNS = 400, 500  # cells of the timeline

# states of a timeline cell, the larger the worse: a cell of several records shows the worst
NONE, SAME, CLOSE, ONLY_B, ONLY_A, DIFFERS = range(6)


def write_html(report: CompareReport, path: str | Path) -> Path:
    """Write a report into a file."""
    return write_html_file(path, render(report))


def render(report: CompareReport) -> str:
    """Return the page as text."""
    made = HtmlReport()
    shown = report.differences[:_DETAILS]
    verdict = "agree" if report else "differ"
    body = "\n".join(_parts(report, made, shown))
    return made.page(f"{verdict} · tensortap compare", body)


def _parts(report: CompareReport, made: HtmlReport, shown: tuple[Difference, ...]) -> Iterator[str]:
    verdict = "✓ The runs agree" if report else "✗ The runs differ"
    sides = [("A", report.a), ("B", report.b)]
    counts = [("compared", report.compared), ("the same", report.equal)]
    counts += [(words, count) for count, words in report.counted]
    yield header(verdict, "agree" if report else "differ", sides, counts)
    yield "<main>"
    rows = [row[:3] for row in rows_of(report.provenance)[:500]]
    config = [row for row in rows if row[0].startswith("config ")]
    if config:
        yield section("Config", html_table(config, ["", "A", "B"]))
    yield _first(report)
    rows = rows[len(config) :]
    if rows:
        table = html_table(rows, ["", "A", "B"])
        yield section("Around the runs", details(f"{len(rows):,} differences", table))
    timeline = timeline_of(report)
    figure = made.figure(timeline_figure(timeline), "layers by steps, colored by difference")
    note = (
        "Every record in the order of execution: gray is the same, green within the tolerance, "
        "orange to brown differs. Click a cell that differs to see its details."
    )
    if timeline.left_out:
        note += f" {timeline.left_out:,} rows have no room; those that differ come first."
    yield section("Timeline", figure, note)
    if shown:
        note = f"The first {len(shown):,} of {len(report.differences):,}; --json has all."
        listed = "".join(_detail(each, timeline) for each in shown)
        few = len(shown) == len(report.differences)
        yield section("Differences in the order of execution", listed, "" if few else note)
    elif report:
        yield section("Differences", "<p>Nothing differs.</p>")
    if report.missing:
        yield _missing(report)
    yield "</main>"


def _first(report: CompareReport) -> str:
    first, lines = report.first, []
    if first is not None:
        lines += [
            f'<div class="name">{escape(first.key)}</div>',
            f"<p>{escape(first.comparison.line)}</p>",
            *(f'<span class="why">{escape(text)}</span>' for text in first.explanations),
        ]
    bitwise = report.bitwise_text and f"first bitwise difference: {report.bitwise_text}"
    words = (report.culprit, bitwise)
    lines += [f"<p>{escape(text)}</p>" for text in words if text]
    if not lines:
        return ""
    title = "First difference" if first is not None else "Bits"
    return f'<section id="first"><h2>{title}</h2>{"".join(lines)}</section>'


def _detail(each: Difference, timeline: Timeline) -> str:
    found = each.comparison
    words = [f'<span class="why">{escape(text)}</span>' for text in each.explanations]
    texts = [found.line, *(f"{part.path}: {part.line}" for part in found.parts[:20])]
    words += [f"<p>{escape(text)}</p>" for text in texts if text]
    largest, relative, _, share = figures_of_row(found)
    facts = [largest and f"max|Δ| {largest}", relative and f"relative {relative}", share]
    by = "" if each.by == "value" else f"by {each.by} only"
    summary = " · ".join(filter(None, [str(each.key), by, *facts]))
    row = timeline.row_of.get((each.key.name, each.key.kind))
    column = int(np.searchsorted(timeline.steps, each.key.step, "right")) - 1
    return details(summary, "".join(words), "" if row is None else f"figure0:{row},{column}")


def _missing(report: CompareReport) -> str:
    found = missing_rows(report.missing)
    rows = found[:_DETAILS]
    table = html_table(rows, ["name", "kind", "records", "steps", "ranks", ""], numbers=[2])
    more = f" {len(found) - len(rows):,} more are not here." if len(found) > len(rows) else ""
    allowed = "Missing records are allowed (--allow-missing)." if report.allow_missing else ""
    return section("Records that only one run has", table, allowed + more)


# -- the timeline --------------------------------------------------------------------------


class Timeline(NamedTuple):
    """Names and kinds in the order of execution, by steps."""

    rows: list[tuple[str, str]]
    steps: NDArray[np.int64]  # the first step of each column
    states: NDArray[np.uint8]
    sizes: Floats  # the relative difference of each cell; infinite where no figure measures it
    left_out: int  # number of rows left out; they agree, unless all rows differ

    @property
    def row_of(self) -> dict[tuple[str, str], int]:
        """Return the row of each name and kind."""
        return {each: row for row, each in enumerate(self.rows)}


def timeline_of(report: CompareReport) -> Timeline:
    """Return the worst state and size of each cell."""
    worst = report.sizes()
    sizes = [*worst.values(), *(0.0 for _ in report.missing), *map(_size, report.differences)]
    states = [
        *(CLOSE if size else SAME for size in worst.values()),
        *(ONLY_A if each.side == "a" else ONLY_B for each in report.missing),
        *(DIFFERS for _ in report.differences),
    ]
    keys = [each.key for each in report.missing] + [each.key for each in report.differences]
    places = [*worst, *((key.name, key.kind, key.step) for key in keys)]
    numbers: dict[tuple[str, str], int] = {}
    row = np.array([numbers.setdefault(place[:2], len(numbers)) for place in places], np.int64)
    step = np.array([place[2] for place in places], np.int64)
    steps, column = np.unique(step, return_inverse=True)
    state = np.array(states, np.uint8)
    severe = np.zeros(len(numbers), np.uint8)
    np.maximum.at(severe, row, state)
    # differing rows first if not all fit, but in their order
    kept = np.sort(np.argsort(severe < ONLY_B, kind="stable")[:_ROWS])
    position = np.full(len(numbers), -1)
    position[kept] = np.arange(len(kept))
    bucket = max(1, math.ceil(len(steps) / _COLUMNS))
    shape = len(kept), len(steps[::bucket])
    shown = position[row] >= 0
    cells = position[row][shown], column[shown] // bucket
    drawn, largest = np.zeros(shape, np.uint8), np.zeros(shape)
    np.maximum.at(drawn, cells, state[shown])
    is_worst = state[shown] == drawn[cells]
    at = cells[0][is_worst], cells[1][is_worst]
    np.maximum.at(largest, at, np.array(sizes, np.float64)[shown][is_worst])
    every = list(numbers)
    rows = [every[i] for i in kept]
    return Timeline(rows, steps[::bucket], drawn, largest, len(every) - len(kept))


def _size(difference: Difference) -> float:
    found = difference.comparison
    if found.nonfinite or not found.count:  # different shapes, text, a container
        return math.inf
    return found.max_rel if found.rel_l2 is None else found.rel_l2


def timeline_figure(timeline: Timeline) -> Figure:
    """Return the timeline as a heatmap: one trace for each state that occurs."""
    rows = labels([f"{name} · {kind}" for name, kind in timeline.rows])
    x, states = typed(timeline.steps), timeline.states
    data = []
    for state, color, word in (
        (SAME, COLORS.grid, "the same"),
        (ONLY_A, COLORS.fair, "only in A"),
        (ONLY_B, COLORS.neginf, "only in B"),
    ):
        mask = states == state
        if mask.any():
            hover = f"%{{y}}<br>step %{{x}}<br>{word}<extra></extra>"
            data.append(flat_trace(mask, x, rows, color, name=word, hovertemplate=hover))
    ranges = (
        (CLOSE, COLORS.size[:4], "within the tolerance"),
        (DIFFERS, COLORS.sign[4:], "differs"),
    )
    for state, ramp, word in ranges:
        mask = states == state
        if mask.any():
            data.append(_sizes_trace(timeline.sizes, mask, x, rows, ramp, word))
    plain = {"showgrid": False, "zeroline": False}
    made = layout(
        height=min(max(220, 92 + 18 * len(rows)), 900),
        xaxis={**plain, "title": {"text": "step"}},
        yaxis={**plain, "type": "category", "autorange": "reversed", "ticklen": 0},
        margin={"t": 16},
    )
    return {"data": data, "layout": made}


def _sizes_trace(
    sizes: Floats, mask: NDArray[np.bool_], x: Any, y: list[str], ramp: Sequence[str], word: str
) -> dict[str, Any]:
    """Return cells colored by the decade of their relative difference, from 1e-8 to 10."""
    with np.errstate(divide="ignore"):
        decade = np.clip(np.log10(sizes), -8, 1)
    ticks = {"tickvals": [-8, -5, -2, 1], "ticktext": ["≤1e-8", "1e-5", "0.01", "≥10"]}
    bar = {"title": {"text": word, "side": "right"}, "len": 1.0, **ticks}
    return {
        "type": "heatmap", "name": word, "x": x, "y": y, "zmin": -8, "zmax": 1,
        "z": typed(np.where(mask, decade, np.nan).astype(np.float32)),
        "customdata": typed(np.where(np.isfinite(sizes), sizes, np.nan).astype(np.float32)),
        "colorscale": scale(ramp), "hoverongaps": False, "showscale": word == "differs",
        "colorbar": bar,
        "hovertemplate": f"%{{y}}<br>step %{{x}}<br>{word}, "
        "relative %{customdata:.3g}<extra></extra>",
    }  # fmt: skip
