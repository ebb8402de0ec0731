"""Write a comparison report as one self-contained HTML file.

The size of the file is bounded: a large report gets a coarser timeline, and details only of the
first differences. The page says what is left out.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.errors import TensortapError
from tensortap.page.encoding import Figure, Floats, labels, typed
from tensortap.rooms.compare.provenance import rows_of
from tensortap.rooms.compare.report import CompareReport, Difference, gaps
from tensortap.rooms.compare.result import Comparison
from tensortap.rooms.compare.text import figures_of_row, lacks
from tensortap.rooms.figures import reals
from tensortap.rooms.figures.figures.panels import axis_id, axis_name, panel_grid, panel_title
from tensortap.rooms.figures.figures.theme import LIGHT, layout, scale
from tensortap.rooms.figures.figures.traces import flat_trace
from tensortap.rooms.figures.html_file import (
    HtmlReport,
    count_cards,
    details,
    escape,
    header,
    html_table,
    section,
    write_html_file,
)
from tensortap.runs.assemble import Disagreement
from tensortap.stats.conversion import as_real, is_number
from tensortap.values.view import array_of

PICTURES = 20  # differences whose tensors are drawn; each takes up to 66 kB
_SECONDS = 60.0  # that drawing all pictures may take
_DETAILS = 200
_ROWS, _COLUMNS = 400, 500  # cells of the timeline
_SIDE = 64  # cells of a picture, at most
_AT_ONCE = 1 << 22  # elements that are converted at once

Progress = Callable[[int, int], object]

# states of a timeline cell, the larger the worse: a cell of several records shows the worst
NONE, SAME, CLOSE, ONLY_B, ONLY_A, EXPECTED, DIFFERS = range(7)


def write_html(
    report: CompareReport,
    path: str | Path,
    *,
    pictures: int = PICTURES,
    progress: Progress | None = None,
) -> Path:
    """Write a report; `pictures` is the number of differences whose tensors are drawn."""
    return write_html_file(path, render(report, pictures=pictures, progress=progress))


def render(
    report: CompareReport, *, pictures: int = PICTURES, progress: Progress | None = None
) -> str:
    """Return the page as text."""
    made = HtmlReport()
    shown = report.differences[:_DETAILS]
    if report.first is not None and not any(each is report.first for each in shown):
        shown = *shown[:-1], report.first  # all earlier ones were expected
    drawn = _pictures(report, shown, pictures, progress)
    verdict = "agree" if report else "differ"
    body = "\n".join(_parts(report, made, shown, drawn))
    return made.page(f"{verdict} · tensortap compare", body)


def _parts(
    report: CompareReport,
    made: HtmlReport,
    shown: tuple[Difference, ...],
    drawn: dict[int, Figure],
) -> Iterator[str]:
    verdict = "✓ The runs agree" if report else "✗ The runs differ"
    sides = [("A", report.a), ("B", report.b)]
    yield header(verdict, "agree" if report else "differ", sides, count_cards(_counts(report)))
    yield "<main>"
    yield _first(report)
    rows = [row[:3] for row in rows_of(report.provenance)[:500]]
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
        listed = "".join(
            _detail(each, made, drawn.get(number), timeline) for number, each in enumerate(shown)
        )
        few = len(shown) == len(report.differences)
        yield section("Differences in the order of execution", listed, "" if few else note)
    elif report:
        yield section("Differences", "<p>Nothing differs.</p>")
    if report.missing:
        yield _missing(report)
    yield "</main>"


def _counts(report: CompareReport) -> Iterator[tuple[str, int, str]]:
    yield "compared", report.compared, ""
    yield "the same", report.equal, ""
    for name, count, css in (
        ("by statistics only", report.by_statistics, "warn"),
        ("differ", len(report.differences), "bad"),
        ("of them as expected", sum(bool(each.expected) for each in report.differences), ""),
        ("only in A", sum(each.side == "a" for each in report.missing), "warn"),
        ("only in B", sum(each.side == "b" for each in report.missing), "warn"),
        ("ignored", report.ignored, ""),
    ):
        if count:
            yield name, count, css


def _first(report: CompareReport) -> str:
    first, lines = report.first, []
    if first is not None:
        key = first.key
        lines += [
            f'<div class="name">{escape(key.name)}</div>',
            f'<div class="dim">{escape(_place(first))}</div>',
            f"<p>{escape(first.comparison.line)}</p>",
            *(f'<span class="why">{escape(text)}</span>' for text in first.explanations),
        ]
    bitwise = report.bitwise_text and f"first bitwise difference: {report.bitwise_text}"
    words = (report.culprit, bitwise, report.tolerance_text)
    lines += [f"<p>{escape(text)}</p>" for text in words if text]
    if not lines:
        return ""
    title = "First difference" if first is not None else "Bits"
    return f'<section id="first"><h2>{title}</h2>{"".join(lines)}</section>'


def _place(each: Difference) -> str:
    key = each.key
    call = f" · call {key.call}" if key.call else ""
    rank = "all ranks" if key.rank < 0 else f"rank {key.rank}"
    by = "" if each.by == "value" else f" · by {each.by} only"
    return f"{key.kind} · step {key.step:,}{call} · {rank}{by}"


def _detail(each: Difference, made: HtmlReport, picture: Figure | None, timeline: Timeline) -> str:
    found = each.comparison
    words = [f'<span class="why">{escape(text)}</span>' for text in each.explanations]
    texts = [
        found.reason,
        each.expected and f"expected: {each.expected}",
        *found.notes,
        *(f"{part.path}: {part.line}" for part in found.parts[:20]),
    ]
    words += [f"<p>{escape(text)}</p>" for text in texts if text]
    if picture is not None:
        words.append(made.figure(picture, f"values of {each.key.name} in both runs"))
    words.append(html_table(_figures(found), numbers=[1]))
    largest, relative, _, share = figures_of_row(found)
    facts = [largest and f"max|Δ| {largest}", relative and f"relative {relative}", share]
    summary = " · ".join([each.key.name, _place(each), *filter(None, facts)])
    row = timeline.row_of.get((each.key.name, each.key.kind))
    column = int(np.searchsorted(timeline.steps, each.key.step, "right")) - 1
    return details(summary, "".join(words), "" if row is None else f"figure0:{row},{column}")


def _figures(found: Comparison) -> Iterator[tuple[str, str]]:
    """Yield the figures of a comparison that are known, with their names."""
    if found.worst is not None and found.values:
        where = f"worst element, {list(found.worst)}" if found.worst else "values"
        yield where, " and ".join(str(value)[:60] for value in found.values)
    for name, figure in (
        ("max |Δ|", found.max_abs),
        ("mean |Δ|", found.mean_abs),
        ("max relative", found.max_rel),
        ("‖Δ‖ / ‖b‖", found.rel_l2),
        ("cosine", found.cosine),
        ("ulps", found.ulps),
        ("atol that would pass", found.passing_atol),
        ("rtol that would pass", found.passing_rtol),
    ):
        if figure is not None:
            yield name, f"{figure:.6g}"
    if found.count:
        yield "differing elements", f"{found.mismatches:,} of {found.count:,}"
    if found.nonfinite:
        yield "not finite in one run", f"{found.nonfinite:,}"
    for name, pair in (("shape", found.shapes), ("dtype", found.dtypes)):
        if pair is not None:
            same = pair[0] == pair[1]
            yield name, str(pair[0]) if same else f"{pair[0]} and {pair[1]}"


def _missing(report: CompareReport) -> str:
    found = gaps(report.missing)
    rows = [
        [
            gap.name, gap.kind, f"{gap.count:,}", gap.steps,
            ", ".join("all" if rank < 0 else str(rank) for rank in gap.ranks[:50]), lacks(gap),
        ]
        for gap in found[:_DETAILS]
    ]  # fmt: skip
    table = html_table(rows, ["name", "kind", "records", "steps", "ranks", ""], numbers=[2])
    more = f" {len(found) - len(rows):,} more are not here." if len(found) > len(rows) else ""
    allowed = "Missing records are allowed (--allow-missing)." if report.allow_missing else ""
    return section("Records that only one run has", table, allowed + more)


# -- the timeline --------------------------------------------------------------------------


class Timeline(NamedTuple):
    """Names and kinds in the order of execution, by steps."""

    rows: list[tuple[str, str]]
    steps: NDArray[np.int64]
    """The first step of each column."""
    states: NDArray[np.uint8]
    sizes: Floats
    """The relative difference of each cell; infinite where no figure measures it."""
    left_out: int
    """Number of rows left out; they agree, unless all rows differ."""

    @property
    def row_of(self) -> dict[tuple[str, str], int]:
        """Return the row of each name and kind."""
        return {each: row for row, each in enumerate(self.rows)}


def timeline_of(report: CompareReport) -> Timeline:
    """Return the worst state and size of each cell."""
    worst = report.worst
    sizes = [*worst.values(), *(0.0 for _ in report.missing), *map(_size, report.differences)]
    states = [
        *(CLOSE if size else SAME for size in worst.values()),
        *(ONLY_A if each.side == "a" else ONLY_B for each in report.missing),
        *(EXPECTED if each.expected else DIFFERS for each in report.differences),
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
    colors = LIGHT
    rows = labels([f"{name} · {kind}" for name, kind in timeline.rows])
    x, states = typed(timeline.steps), timeline.states
    data = []
    for state, color, word in (
        (SAME, colors.grid, "the same"),
        (EXPECTED, colors.dim, "differs as expected"),
        (ONLY_A, colors.fair, "only in A"),
        (ONLY_B, colors.neginf, "only in B"),
    ):
        mask = states == state
        if mask.any():
            hover = f"%{{y}}<br>step %{{x}}<br>{word}<extra></extra>"
            data.append(flat_trace(mask, x, rows, color, name=word, hovertemplate=hover))
    ranges = (
        (CLOSE, colors.size[:4], "within the tolerance"),
        (DIFFERS, colors.sign[4:], "differs"),
    )
    for state, ramp, word in ranges:
        mask = states == state
        if mask.any():
            data.append(_sizes_trace(timeline.sizes, mask, x, rows, ramp, word))
    plain = {"showgrid": False, "zeroline": False}
    made = layout(
        "light",
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


# -- pictures ------------------------------------------------------------------------------


def _pictures(
    report: CompareReport, shown: Sequence[Difference], most: int, progress: Progress | None
) -> dict[int, Figure]:
    """Return pictures by index of the difference: first one per name, then the others."""
    found: dict[int, Figure] = {}
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
            drawn = picture_of(*report.look(shown[number].key))
        except (Disagreement, TensortapError, OSError):
            drawn = None
        if drawn is not None:
            found[number] = drawn
        if progress is not None:
            progress(done, len(chosen))
    return found


def picture_of(a: Any, b: Any) -> Figure | None:
    """Return both tensors and their difference side by side; None if one is not a tensor.

    Each cell is the value of its block that is farthest from zero.
    """
    one, other = array_of(a), array_of(b)
    if one is None or other is None or not all(is_number(x.dtype) and x.size for x in (one, other)):
        return None
    panels = [("A", shrink(one)), ("B", shrink(other))]
    largest = max(_largest(cells) for _, cells in panels)
    limits = [largest, largest]
    if one.shape == other.shape:
        panels.append(("A − B", shrink(one, other)))
        limits.append(_largest(panels[-1][1]))
    grid = panel_grid(len(panels), len(panels), 240, top=34, bottom=20)
    data, axes, titles = [], {}, []
    for number, ((title, cells), limit) in enumerate(zip(panels, limits, strict=True)):
        at = {"xaxis": axis_id("x", number), "yaxis": axis_id("y", number)}
        data.append({
            "type": "heatmap", "z": typed(cells.astype(np.float32)), "zmin": -limit or -1.0,
            "zmax": limit or 1.0, "colorscale": scale(LIGHT.sign), "showscale": False,
            "hoverongaps": False, "hovertemplate": f"{title} %{{z:.4g}}<extra></extra>", **at,
        })  # fmt: skip
        bad = ~np.isfinite(cells)
        if bad.any():
            rows, columns = (typed(np.arange(size)) for size in cells.shape)
            hover = f"{title} not finite<extra></extra>"
            data.append(flat_trace(bad, columns, rows, LIGHT.nan, hovertemplate=hover, **at))
        across, down = grid.domain(number)
        plain = {"showgrid": False, "zeroline": False, "showticklabels": False, "ticks": ""}
        axes[axis_name("x", number)] = {**plain, "domain": across, "anchor": at["yaxis"]}
        axes[axis_name("y", number)] = {
            **plain, "domain": down, "anchor": at["xaxis"], "autorange": "reversed",
        }  # fmt: skip
        titles.append(panel_title(f"{title}, ±{limit:.3g}", grid, number, LIGHT))
    margin = {"l": 8, "r": 8, "t": grid.top, "b": grid.bottom}
    made = layout("light", height=grid.height, annotations=titles, margin=margin, **axes)
    return {"data": data, "layout": made}


def shrink(a: NDArray[Any], b: NDArray[Any] | None = None) -> Floats:
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
        return reals.shrink(_real(*sides), _SIDE, _SIDE, 0.0)
    edges = [columns * i // min(_SIDE, columns) for i in range(min(_SIDE, columns) + 1)]
    strips = ([side[:, i:j] for side in sides] for i, j in itertools.pairwise(edges))
    return np.hstack([reals.shrink(_real(*strip), _SIDE, 1, 0.0) for strip in strips])


def _real(one: NDArray[Any], other: NDArray[Any] | None = None) -> Floats:
    """Return a matrix as real numbers, or the difference of two: 0 where they are the same."""
    x = as_real(one)
    if other is None:
        return x
    y = as_real(other)
    with np.errstate(invalid="ignore", over="ignore"):
        difference: Floats = x - y
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


def _largest(cells: Floats) -> float:
    finite = cells[np.isfinite(cells)]
    return float(np.abs(finite).max()) if finite.size else 0.0
