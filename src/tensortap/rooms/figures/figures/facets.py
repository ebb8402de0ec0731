"""Heatmaps one below the other: one panel per kind of tensor and statistic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensortap.page.encoding import Figure, text
from tensortap.rooms.figures.figures.heatmap import heatmap_figure
from tensortap.rooms.figures.figures.panels import axis_id, axis_name, whole_ticks
from tensortap.rooms.figures.figures.theme import LEGEND_RIGHT, layout, note, theme_of
from tensortap.table.table import Table

_MARGINS = 92  # pixels of a heatmap's height beside its rows
_GAP = 52  # pixels between two panels, for ticks and the next title


def heatmaps_figure(
    table: Table,
    *,
    names: Mapping[str, Sequence[str]],
    metrics: Sequence[str],
    theme: str = "light",
    **options: Any,
) -> Figure:
    """Return one heatmap per kind in `names` and statistic, over a common axis of steps.

    ``layout.meta["panels"]`` has the `meta` of each heatmap; a single one is returned as it is.
    """
    places = [(kind, metric) for kind in names for metric in metrics]
    drawn = [
        heatmap_figure(table, kind=kind, metric=metric, names=names[kind], theme=theme, **options)
        for kind, metric in places
    ]
    filled = [figure["layout"] for figure in drawn if figure["data"]]
    if len(drawn) == 1 or not filled:
        return drawn[0]
    heights = [figure["layout"]["height"] - _MARGINS for figure in drawn]
    inner = sum(heights) + _GAP * (len(drawn) - 1)
    low, high = (pick(ends) for pick, ends in zip(
        (min, max), zip(*(each["xaxis"]["range"] for each in filled), strict=True), strict=True
    ))  # fmt: skip
    made = layout(
        theme, height=inner + _MARGINS, legend=LEGEND_RIGHT, shapes=[], annotations=[],
        meta={"panels": [figure["layout"]["meta"] for figure in drawn]},
    )  # fmt: skip
    data: list[dict[str, Any]] = []
    listed: set[str] = set()  # labels that are in the legend
    top = 0
    for number, (place, figure, height) in enumerate(zip(places, drawn, heights, strict=True)):
        domain = [max(0.0, 1 - (top + height) / inner), 1 - top / inner]
        top += height + _GAP
        own, x, y = figure["layout"], axis_id("x", number), axis_id("y", number)
        hidden = {"dtick"} if own is filled[-1] else {"dtick", "title"}
        steps = {key: each for key, each in own["xaxis"].items() if key not in hidden}
        matches = {"matches": "x"} if number else {}
        made[axis_name("x", number)] = {
            **steps, "range": [low, high], "anchor": y, **whole_ticks(high - low), **matches,
        }  # fmt: skip
        made[axis_name("y", number)] = {**own["yaxis"], "domain": domain, "anchor": x}
        # a heatmap without cells says why
        words = text(" · ".join(place)) if figure["data"] else own["annotations"][0]["text"]
        color = theme_of(theme).ink
        title = note(words, 0, domain[1], 12, color, xanchor="left", yanchor="bottom", yshift=4)
        made["annotations"].append(title)
        made["shapes"] += [{**each, "xref": x, "yref": f"{y} domain"} for each in own["shapes"]]
        for trace in figure["data"]:
            trace |= {"xaxis": x, "yaxis": y}
            if "colorbar" in trace:
                trace["colorbar"] |= {"len": height / inner, "y": sum(domain) / 2}
            elif trace["type"] == "scatter":
                trace["showlegend"] = trace["name"] not in listed
                listed.add(trace["name"])
            data.append(trace)
    made["showlegend"] = bool(listed)
    return {"data": data, "layout": made}
