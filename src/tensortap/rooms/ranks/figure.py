"""A statistic of all ranks, over steps or over layers; ranks are grouped by their mesh."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.page.encoding import typed
from tensortap.rooms.figures.figures.heatmap import color_bar, color_range, column_range
from tensortap.rooms.figures.figures.parts import marks_trace, whole_ticks
from tensortap.rooms.figures.figures.theme import (
    COLORS,
    Figure,
    Floats,
    Integers,
    labels,
    layout,
    message_figure,
    scale,
    statistic_text,
    template_text,
)
from tensortap.rooms.ranks.mesh import MeshLayout, RankGroup, group_keys, rank_tree
from tensortap.rooms.ranks.ranks import RankMatrix, over_names, over_steps, uncompared
from tensortap.table.table import Table, locked

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROWS, _COLUMNS = 512, 500  # largest number of cells
_OPEN = 40  # ranks up to which all groups are open at first
_LABELS = 40  # layers up to which each one has a label
_MOST_OUTLIERS = 12  # ranks that are named
_ALL = "all"


class RankCells(NamedTuple):
    """Cells to draw: one rank per cell, in a closed group the one that matters most."""

    rank: Integers  # index into the ranks of the matrix; -1 where there is no record
    value: Floats
    difference: Floats  # to the median of the ranks that it is compared with
    deviation: Floats
    outlier: NDArray[np.bool_]
    nonfinite: NDArray[np.bool_]


@locked
def ranks_figure(
    table: Table,
    mesh: MeshLayout,
    *,
    kind: str,
    metric: str,
    name: str = "",
    step: int | None = None,
    names: Sequence[str] | None = None,
    opened: Collection[str] | None = None,
    minus_median: bool = False,
) -> Figure:
    """Return a heatmap of a statistic: ranks by steps of `name`, or by layers at `step`.

    Columns that have no room are left out: of the steps that share a column, the one stays at which
    a rank is farthest from the others. A closed group shows its farthest rank where one is far, and
    else its median rank. `opened` are the keys of open groups; None opens all if there are few
    ranks. In a mesh, a rank is compared with those that do the same with other data. ``rows``
    describes the rows, ``outliers`` names the ranks that are far, ``paths`` has the coordinates of
    all ranks, and the `customdata` of a cell is rank, column, value, difference to the median rank,
    deviations.
    """
    if step is None:
        matrix = over_steps(table, kind, name, metric)
    else:
        matrix = over_names(table, kind, step, metric, names)
    if not matrix.value.size:
        where = f"of {name}" if step is None else f"at step {step:,}"
        return {**message_figure(f"no {metric} {where} ({kind})"), "rows": []}
    outliers, total = _named_outliers(matrix, mesh), len(matrix.columns)
    matrix = _thinned(matrix, _COLUMNS)
    if opened is None:
        opened = group_keys(mesh) if len(mesh.coordinates) <= _OPEN else ()
    elif _ALL in opened:
        opened = group_keys(mesh)
    tree = rank_tree(mesh, opened, _ROWS)
    cells = _cells(matrix, tree)
    x = matrix.columns if step is None else np.arange(len(matrix.columns))
    column_names = [] if step is None else [table.index().names[i] for i in matrix.columns.tolist()]
    percent = bool(minus_median and (np.nan_to_num(matrix.value) >= 0).all())
    figure = _figure(matrix, cells, x, metric, minus_median, percent, column_names)
    rows = [_described(row, cells.outlier[i]) for i, row in enumerate(tree)]
    shown = {"columns": len(matrix.columns), "of_columns": total}
    paths = {rank: ".".join(map(str, place)) for rank, place in mesh.coordinates.items()}
    limits = uncompared(table)
    return {
        **figure, **shown, "rows": rows, "outliers": outliers, "paths": paths, "limits": limits,
    }  # fmt: skip


def _thinned(matrix: RankMatrix, most: int) -> RankMatrix:
    wide = math.ceil(len(matrix.columns) / most)
    if wide < 2:
        return matrix
    importance = _importance(matrix).max(axis=0)
    starts = range(0, len(importance), wide)
    return matrix.select(np.array([s + int(importance[s : s + wide].argmax()) for s in starts]))


def _importance(matrix: RankMatrix) -> Floats:
    """Return what sorts cells: NaN and Inf first, then those that are far, then the others."""
    return np.where(matrix.nonfinite, np.inf, matrix.deviation + 1e9 * matrix.far)


def _cells(matrix: RankMatrix, tree: Sequence[RankGroup]) -> RankCells:
    """Choose the rank of each cell: an outlier if there is one, else the middle one."""
    index = {rank: i for i, rank in enumerate(matrix.ranks.tolist())}
    columns = np.arange(len(matrix.columns))
    known = ~np.isnan(matrix.value) | matrix.nonfinite
    importance = _importance(matrix)
    chosen = np.full((len(tree), len(columns)), -1)
    for number, row in enumerate(tree):
        members = np.array([index[rank] for rank in row.ranks if rank in index], np.int64)
        if not len(members):
            continue
        if len(members) == 1:
            best = np.repeat(members, len(columns))
        else:
            # the ranks in order of their values; NaN last
            order = np.argsort(matrix.value[members], axis=0, kind="stable")
            count = (~np.isnan(matrix.value[members])).sum(axis=0)
            middle = order[np.maximum(count - 1, 0) // 2, columns]
            farthest = importance[members].argmax(axis=0)
            far = matrix.far[members].any(axis=0)
            best = members[np.where(far, farthest, middle)]
        chosen[number] = np.where(known[best, columns], best, -1)
    found = chosen >= 0
    value = np.where(found, matrix.value[chosen, columns], np.nan)
    return RankCells(
        chosen, value, value - matrix.median[chosen, columns],
        np.where(found, matrix.deviation[chosen, columns], np.nan),
        found & matrix.far[chosen, columns], found & matrix.nonfinite[chosen, columns],
    )  # fmt: skip


def _figure(
    matrix: RankMatrix,
    cells: RankCells,
    x: Integers,
    metric: str,
    minus_median: bool,
    percent: bool,
    names: list[str],
) -> Figure:
    words = statistic_text(metric)
    shown, title = cells.value, words
    if minus_median:
        shown, title = cells.difference, f"{words} − median"
        if percent:
            with np.errstate(divide="ignore", invalid="ignore"):
                shown = 100 * shown / np.abs(cells.value - cells.difference)
            title = f"{words} − median, %"
    logarithmic, z, limits = color_range(shown, False if minus_median else None)
    if minus_median:
        limits = _around_zero(shown)
    signed = minus_median or (not logarithmic and limits[0] < 0 < limits[1])
    y = np.arange(len(cells.rank))
    where = "%{text}" if names else "step %{customdata[1]:,}"
    trace = {
        "type": "heatmap", "x": typed(x), "y": typed(y), "z": typed(z.astype(np.float32)),
        "zmin": limits[0], "zmax": limits[1], "hoverongaps": False,
        "colorscale": scale(COLORS.sign if signed else COLORS.size),
        "colorbar": color_bar(title, limits, logarithmic),
        "customdata": typed(_custom(matrix, cells)),
        "hovertemplate": f"rank %{{customdata[0]}}<br>{where}<br>{template_text(words)} "
        "%{customdata[2]:.5~g}<br>%{customdata[3]:+.3~g} to the median rank"
        "<br>%{customdata[4]:,.1f} deviations<extra></extra>",
    }  # fmt: skip
    data = [trace, *_marks(cells, x, y)]
    plain = {"showgrid": False, "zeroline": False}
    made = layout(
        xaxis={**plain, **_x_axis(x, names)},
        yaxis={**plain, "range": [len(cells.rank) - 0.5, -0.5], "visible": False,
               "fixedrange": True},
        margin={"l": 4, "r": 8, "t": 8, "b": 42},
        showlegend=False,
        meta={"names": names, "labels": labels(names), "metric": metric},
    )  # fmt: skip
    return {"data": data, "layout": made}


def _around_zero(shown: Floats) -> tuple[float, float]:
    """Return the range of colors: outliers must not take them from all others."""
    sizes = np.abs(shown[np.isfinite(shown)])
    large = float(np.quantile(sizes, 0.98)) if len(sizes) else 0.0
    large = large or float(sizes.max(initial=0.0)) or 1.0
    return -large, large


def _custom(matrix: RankMatrix, cells: RankCells) -> NDArray[np.float64]:
    columns = np.broadcast_to(matrix.columns, cells.rank.shape)
    custom = np.stack(
        [matrix.ranks[cells.rank], columns, cells.value, cells.difference, cells.deviation], axis=-1
    )
    custom[cells.rank < 0] = np.nan
    return custom.astype(np.float64)


def _x_axis(x: Integers, names: list[str]) -> dict[str, Any]:
    if not names:
        steps = whole_ticks(float(x[-1] - x[0]))
        return {"title": {"text": "step"}, "range": column_range(x), **steps}
    by = math.ceil(len(names) / _LABELS)
    return {
        "tickvals": x[::by].tolist(), "ticktext": labels(names[::by], 28), "tickangle": 40,
        "range": [-0.5, len(names) - 0.5], "tickfont": {"size": 10},
    }  # fmt: skip


def _marks(cells: RankCells, x: Integers, y: Integers) -> list[dict[str, Any]]:
    """Return frames around outliers, and marks in tensors with NaN or Inf."""
    edges = np.append(x - np.append(1, np.diff(x)) / 2, 0.0)
    edges[-1] = 2.0 * x[-1] - edges[-2]
    edges[0] = column_range(x)[0] if len(x) > 1 else x[0] - 0.5
    across: list[float | None] = []
    down: list[float | None] = []
    padded = np.pad(cells.outlier.astype(np.int8), ((0, 0), (1, 1)))
    for row in np.flatnonzero(cells.outlier.any(axis=1)).tolist():
        change = np.diff(padded[row])
        for start, end in zip(np.flatnonzero(change > 0), np.flatnonzero(change < 0), strict=True):
            left, right = float(edges[start]), float(edges[end])
            across += [left, right, right, left, left, None]
            down += [row - 0.5, row - 0.5, row + 0.5, row + 0.5, row - 0.5, None]
    frames = {
        "type": "scatter", "mode": "lines", "x": across, "y": down, "hoverinfo": "skip",
        "line": {"color": COLORS.bad, "width": 1.5}, "name": "outliers",
    }  # fmt: skip
    data = [frames] if across else []
    if cells.nonfinite.any():
        rows, columns = np.nonzero(cells.nonfinite)
        data.append(marks_trace(
            x[columns], y[rows], COLORS.nan, symbol="square", size=7, edge=COLORS.page,
            name="NaN or Inf", customdata=typed(np.stack([rows, columns], axis=-1)),
            hoverinfo="skip",
        ))  # fmt: skip
    return data


def _described(row: RankGroup, outlier: NDArray[np.bool_]) -> dict[str, Any]:
    return {
        "key": row.key, "label": row.label, "depth": row.depth, "ranks": row.ranks,
        "leaf": row.is_leaf, "open": row.is_open, "outliers": int(outlier.sum()),
    }  # fmt: skip


def _named_outliers(matrix: RankMatrix, mesh: MeshLayout) -> list[dict[str, Any]]:
    """Return the ranks that are far most often, with their places."""
    counts = matrix.far.sum(axis=1)
    order = np.argsort(-counts, kind="stable")[:_MOST_OUTLIERS]
    found = [(int(matrix.ranks[i]), int(counts[i])) for i in order.tolist() if counts[i]]
    return [{"rank": rank, "columns": n, "place": mesh.place(rank)} for rank, n in found]
