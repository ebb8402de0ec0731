"""Exponent histograms at one step, with ranges of formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.rooms.figures.figures.parts import (
    FLAT_AXIS,
    PanelGrid,
    axis_id,
    axis_name,
    left_out_note,
    panel_grid,
    panel_title,
)
from tensortap.rooms.figures.figures.theme import (
    COLORS,
    Figure,
    colored,
    layout,
    message_figure,
    share,
    some_names,
    text,
)
from tensortap.rooms.formats.losses import Limits, has_limits, limits, losses
from tensortap.runs.arrow import numbers
from tensortap.table.columns import Exponents, exponents, has_tag
from tensortap.table.table import Table, locked

if TYPE_CHECKING:
    from tensortap.table.sources import Integers

_MAX_PANELS = 48

Formats = bool | str | Sequence[str] | None
LOGGED = "logged dtype"  # the dtype that each tensor had
_POWERS = {"tickprefix": "2<sup>", "ticksuffix": "</sup>", **FLAT_AXIS}  # an axis


class StepExponents(NamedTuple):
    """The values of a tensor at one step, all calls and ranks together."""

    exponents: Exponents
    zeros: int
    nans: int
    infs: int
    dtype: str
    below: int  # values whose exponents lie below the counted range
    above: int


@locked
def exponents_figure(
    table: Table,
    *,
    name: str | Sequence[str] | Mapping[str, Sequence[str]],
    kind: str,
    step: int,
    rank: int | None = None,
    dtype_annotation: Formats = None,
    col_wrap: int | None = None,
    log: bool = False,
) -> Figure:
    """Return how the values of tensors are spread over powers of two at a step.

    `dtype_annotation` draws the range of a number format, with the shares that it would lose;
    of several, or of the dtype that each tensor had (True). Several names, or names by kind,
    become small multiples.
    """
    by_kind = dict(name) if isinstance(name, Mapping) else {kind: _listed(name)}
    places = [(each, own) for own, names in by_kind.items() for each in names]
    formats = format_names(dtype_annotation)
    read = ((place, _read(table, *place, step, rank)) for place in places[:_MAX_PANELS])
    shown = {place: values for place, values in read if values is not None}
    if not shown:
        names = some_names([each for each, _ in places])
        return message_figure(f"no exponents of {names} ({kind}) at step {step}")
    targets = {place: _limits(formats, values) for place, values in shown.items()}
    several = len(shown) > 1
    columns = col_wrap or (min(3, len(shown)) if several else 1)
    extra = 15 * max(0, len(formats) - 1)  # pixels: one line of text per format
    grid = panel_grid(len(shown), columns, 200 if several else 320, top=56 + extra, gap=70 + extra)
    made = layout(
        height=grid.height,
        margin={"l": 52, "r": 16, "t": grid.top, "b": grid.bottom},
        bargap=0,
        showlegend=False,
        hovermode="x",
        annotations=[],
        shapes=[],
        meta={"names": [each for each, _ in shown], "kind": kind, "step": step},
    )
    data = []
    span = _exponent_range(shown.values(), {each for own in targets.values() for each in own})
    for panel, ((each, own), values) in enumerate(shown.items()):
        mine = targets[each, own]
        trace, highest = _bars(values, mine[0] if len(mine) == 1 else None)
        data.append({**trace, "xaxis": axis_id("x", panel), "yaxis": axis_id("y", panel)})
        _add_axes(made, grid, panel, span, highest, log)
        words = each if several else f"{each} · {own} · step {step:,}"
        words = f"{each} · {own}" if len(by_kind) > 1 else words
        title = {**panel_title(words, grid, panel), "yshift": 18 + extra}
        font = {"size": 11, "color": COLORS.dim}
        facts = {"text": _facts(values, mine, several), "yshift": 2, "font": font, "align": "left"}
        made["annotations"] += [title, {**title, **facts}]
        _add_ranges(made, panel, mine, labeled=panel == 0 or formats == (LOGGED,))
    made["annotations"] += left_out_note(min(len(places), _MAX_PANELS), len(places))
    return {"data": data, "layout": made}


def _listed(name: str | Sequence[str]) -> list[str]:
    return [name] if isinstance(name, str) else list(name)


def format_names(given: Formats) -> tuple[str, ...]:
    """Return the number formats that `dtype_annotation` names; raise for unknown ones.

    >>> format_names(True), format_names("float16"), format_names(None)
    (('logged dtype',), ('float16',), ())
    """
    if given is None or isinstance(given, bool):
        return (LOGGED,) if given else ()
    names = tuple(dict.fromkeys(_listed(given)))
    for name in names:
        if name != LOGGED:
            limits(name)
    return names


def _limits(formats: Iterable[str], values: StepExponents) -> list[Limits]:
    """Return the limits of formats; an integer dtype that was logged has none."""
    names = (values.dtype if name == LOGGED else name for name in formats)
    return [limits(name) for name in dict.fromkeys(names) if has_limits(name)]


def _read(table: Table, name: str, kind: str, step: int, rank: int | None) -> StepExponents | None:
    """Return the exponents of a tensor at a step, or None if it was not captured."""
    rows = table.series(kind, name, rank)
    rows = _without_recomputed(table, rows[table.step[rows] == step])
    if not len(rows):
        return None

    def total(statistic: str) -> int:
        counts = table.column(statistic)[rows] if table.has(statistic) else np.zeros(1)
        return int(np.nan_to_num(counts).sum())

    each = exponents(table, rows)
    if not each.counts.any() and not total("count"):
        return None
    whole = Exponents(
        each.low,
        each.counts.sum(axis=1, keepdims=True),
        np.fmin.reduce(each.min_abs)[None],
        np.fmax.reduce(each.max_abs)[None],
    )
    infs = total("posinfs") + total("neginfs")
    dtype = table.dtypes[table.dtype[rows[0]]]
    below, above = (int(counts.sum()) for counts in outside_range(table, rows))
    return StepExponents(whole, total("zeros"), total("nans"), infs, dtype, below, above)


def _without_recomputed(table: Table, rows: Integers) -> Integers:
    """Return `rows` without those that activation checkpointing computed a second time."""
    keys = np.stack([table.step[rows], table.rank[rows]])
    if len(rows) < 2 or np.unique(keys, axis=1).shape[1] == len(rows):
        return rows
    return rows[~has_tag(table.take(rows, ["tags"]), "recompute")]


def outside_range(table: Table, rows: Integers) -> tuple[Integers, Integers]:
    """Return how many values of each row lie below and above the counted exponents.

    Runs and sessions count all exponents; a LogFrame may be limited to a range.
    """
    if not table.is_clipped:
        return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    taken = table.take(rows, ["below", "above"])
    return numbers(taken.column("below")), numbers(taken.column("above"))


def _exponent_range(shown: Iterable[StepExponents], targets: Iterable[Limits]) -> tuple[int, int]:
    """Return a range that covers all exponents, and the formats."""
    ends = [end for target in targets for end in (target.zero - 2, target.top + 3)]
    for values in shown:
        filled = np.flatnonzero(values.exponents.counts.any(axis=1)) + values.exponents.low
        ends += [int(filled[0]) - 1, int(filled[-1]) + 2] if len(filled) else []
    return (min(ends), max(ends)) if ends else (-8, 8)


def _add_axes(
    made: Figure, grid: PanelGrid, panel: int, ends: tuple[int, int], highest: float, log: bool
) -> None:
    """Add the axes of a panel, with room for labels above the highest bar."""
    across, up = grid.domain(panel)
    made[axis_name("x", panel)] = {
        "domain": across, "anchor": axis_id("y", panel), "range": list(ends), "tick0": 0,
        "nticks": 10 if grid.panels > 1 else 24, **_POWERS, **({"matches": "x"} if panel else {}),
    }  # fmt: skip
    made[axis_name("y", panel)] = {
        "domain": up, "anchor": axis_id("x", panel), "ticksuffix": " %", "nticks": 5,
        **({"type": "log"} if log else {"range": [0, 1.16 * highest or 1.0]}),
    }  # fmt: skip


def _add_ranges(made: Figure, panel: int, formats: Sequence[Limits], labeled: bool) -> None:
    """Add the ends of number formats as lines, a color for each, and their names."""
    place = {"xref": axis_id("x", panel), "yref": f"{axis_id('y', panel)} domain"}
    for row, target in enumerate(formats):
        color, over = COLORS.lines[(row + 1) % len(COLORS.lines)], math.log2(target.over)
        made["shapes"] += [
            {**place, "type": "line", "y0": 0, "y1": 1, "x0": at, "x1": at,
             "line": {"width": 1.4, "color": color, "dash": dash}}
            for at, dash in ((target.zero, "dot"), (target.normal, "dash"), (over, "solid"))
        ]  # fmt: skip
        if labeled:
            made["annotations"].append({
                **place, "x": over, "xanchor": "right", "y": 1, "yanchor": "top",
                "yshift": -13 * row, "showarrow": False, "text": text(target.dtype),
                "font": {"size": 10, "color": color},
            })  # fmt: skip


_HOVER = (
    "2<sup>%{text}</sup> ≤ |x| &lt; twice that<br>"
    "%{customdata:,} values, %{y:.4~g} %<extra></extra>"
)


def _bars(values: StepExponents, target: Limits | None) -> tuple[dict[str, Any], float]:
    """Return a bar per exponent, of the share in percent, and the highest share."""
    counts = values.exponents.counts[:, 0]
    filled = np.flatnonzero(counts)
    bins = np.arange(filled[0], filled[-1] + 1) if len(filled) else filled
    exponents = (values.exponents.low + bins).tolist()
    shares = (counts[bins] / max(1, int(counts.sum())) * 100).tolist()
    return {
        "type": "bar", "x": exponents, "offset": 0, "width": 1, "y": shares,
        "customdata": counts[bins].tolist(), "text": [str(n) for n in exponents],
        "marker": {
            "color": [_fate(n, target) for n in exponents],
            "line": {"width": 0.6, "color": COLORS.page},
        },
        "textposition": "none", "hovertemplate": _HOVER,
    }, max(shares, default=0.0)  # fmt: skip


def _fate(exponent: int, target: Limits | None) -> str:
    if target is None:
        return COLORS.good
    if exponent < target.zero or exponent > target.top:
        return COLORS.bad
    return COLORS.fair if exponent < target.normal else COLORS.good


# -- the subtitle --------------------------------------------------------------------------


def _facts(values: StepExponents, targets: Sequence[Limits], short: bool) -> str:
    """Return the subtitle: one line of lost shares per format, and values without an exponent."""
    lost = [" · ".join(_lost_shares(values.exponents, target, short)) for target in targets]
    if len(targets) > 1:
        pairs = zip(targets, lost, strict=True)
        lost = [f"{text(target.dtype)}: {shares}" for target, shares in pairs]
    counts = (
        (values.below, "below the counted range", COLORS.bad),
        (values.above, "above the counted range", COLORS.bad),
        (0 if short and targets else values.zeros, "zero", COLORS.dim),
        (values.nans, "NaN", COLORS.nan),
        (values.infs, "Inf", COLORS.nan),
    )
    words = lost[-1:] + [colored(f"{n:,} {word}", color) for n, word, color in counts if n]
    if not (targets or short):
        words.append(text(values.dtype))
    return "<br>".join([*lost[:-1], " · ".join(words)])


def _lost_shares(exponents: Exponents, target: Limits, short: bool) -> list[str]:
    """Return the shares that a format loses; a range where the exponents leave it open."""
    loss = losses(exponents, target)
    total = int(loss.values[0])
    if not total:
        return ["no nonzero values"]
    words = []
    for name, least, most, color in (
        ("underflow", loss.underflow, loss.underflow_at_most, COLORS.bad),
        ("subnormal", loss.subnormal, loss.subnormal, COLORS.fair),
        ("overflow", loss.overflow, loss.overflow_at_most, COLORS.bad),
    ):
        if not most[0] and short:
            continue
        low, high = (share(int(count[0]) / total) for count in (least, most))
        shares = low if low == high else f"{low.removesuffix(' %')}–{high}"
        words.append(colored(f"{shares} {name}", color if most[0] else COLORS.dim))
    return words or ["no loss"]
