"""Figures with something to choose from: in Jupyter, VS Code and Colab.

    viz.interactive(viz.exp_hist, run, layer=["output"], tt="Activation", step=0, col_wrap=3)

A click on the loss curve chooses the step; a click on a cell of the heatmap opens the exponent
histogram of that layer at that step.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.errors import MissingExtra
from tensortap.record import Kind
from tensortap.table.selection import (
    Layers,
    choose_kind,
    choose_layers,
    choose_metrics,
    choose_rank,
    choose_step,
)
from tensortap.table.table import Table, table_of
from tensortap.viz import plots
from tensortap.viz.figures import exponents_figure, heatmap_figure, lines_figure
from tensortap.viz.figures.encoding import Figure
from tensortap.viz.figures.theme import message_figure

if TYPE_CHECKING:
    from tensortap.viz.explorer import Explorer

FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32")
FEW = 6  # layers that are chosen when nobody has said which


def interactive(
    f: Callable[..., Any] = plots.exp_hist,
    source: Any = None,
    *,
    df: Any = None,
    tt: Kind | str | None = None,
    layer: Layers = None,
    scalar_metric: str | Iterable[str] = "rm2",
    step: int | None = None,
    rank: int | None = None,
    dtype_annotation: str | None = None,
    inc: int = 1,
    log: bool | None = None,
    train_stats: Any = None,
    col_wrap: int | None = None,
    follow: float | None = None,
    theme: str = "light",
) -> Explorer:
    """A figure with widgets for layers, kind, statistic, step and format.

    `f` is ``viz.scalar_line``, ``viz.scalar_global_heatmap`` or ``viz.exp_hist``, the others its
    arguments. `train_stats` is a frame or a dict of curves, by default those of the run; a click on
    a curve chooses the step. `follow` looks for what is new every so many seconds, as the button
    ``refresh`` does once.
    """
    view = _VIEWS.get(getattr(f, "__name__", ""))
    if view is None:
        raise TypeError(f"interactive takes viz.{', viz.'.join(_VIEWS)}, not {f!r}")
    prepare_colab()
    table = plots.source_table(source, df)
    state = State(
        table, view, tt, layer, scalar_metric, step, rank, dtype_annotation, inc, log, col_wrap,
        theme,
    )  # fmt: skip
    plots.need_plotly()
    try:
        import anywidget
        import ipywidgets
    except ImportError:
        raise MissingExtra(
            "interactive figures need ipywidgets and anywidget: pip install 'tensortap[notebook]'"
        ) from None
    assert anywidget  # plotly's widgets stand on it
    assert ipywidgets
    from tensortap.viz.explorer import Explorer

    found = Explorer(state, train_stats)
    if follow is not None:
        found.follow(follow)
    return found


_VIEWS = {
    "scalar_line": "lines",
    "scalar_global_heatmap": "heatmap",
    "exp_hist": "exponents",
}


def prepare_colab() -> None:
    """Colab shows widgets of others only when it is told to."""
    if "google.colab" in sys.modules:
        importlib.import_module("google.colab.output").enable_custom_widget_manager()


class State:
    """What is chosen, and the figure of it; no widget, so that it can be thought about alone."""

    def __init__(
        self,
        table: Table,
        view: str,
        tt: Kind | str | None,
        layer: Layers,
        metric: str | Iterable[str],
        step: int | None,
        rank: int | None,
        dtype: str | None,
        inc: int,
        log: bool | None,
        col_wrap: int | None,
        theme: str,
    ) -> None:
        self.table, self.view, self.theme = table, view, theme
        self.inc, self.log, self.col_wrap, self.dtype = inc, log, col_wrap, dtype
        self.rank = choose_rank(table, rank)
        self.kind, key = choose_kind(table, tt)
        names = choose_layers(table, self.kind, layer, key)
        self.names = names if layer is not None or view == "heatmap" else names[:FEW]
        self.metrics = choose_metrics(table, metric)
        if view == "exponents":
            self.step: int | None = choose_step(table, self.kind, self.names, step)
        else:
            self.step = step

    def choose_kind(self, kind: str) -> None:
        """Another kind; names that it has not are replaced by its first ones."""
        self.kind = kind
        there = self.table.layers(kind)
        kept = [name for name in self.names if name in set(there)]
        self.names = there if self.view == "heatmap" else kept or there[:FEW]

    def steps(self) -> list[int]:
        """The steps that can be chosen."""
        found: list[int] = self.table.steps(self.kind).tolist()
        return found

    def nearest(self, step: float) -> int | None:
        """The captured step that is nearest."""
        steps = self.table.steps(self.kind)
        return int(steps[np.abs(steps - step).argmin()]) if len(steps) else None

    def figure(self) -> Figure:
        """What is chosen, as a figure."""
        if not self.names:
            return message_figure(f"no layer of {self.kind} is chosen", theme=self.theme)
        common: dict[str, Any] = {"kind": self.kind, "rank": self.rank, "theme": self.theme}
        if self.view == "heatmap":
            return heatmap_figure(
                self.table, metric=self.metrics[0], inc=self.inc, names=self.names, log=self.log,
                step=self.step, **common,
            )  # fmt: skip
        if self.view == "lines":
            return lines_figure(
                self.table, names=self.names, metrics=self.metrics, log=self.log, step=self.step,
                col_wrap=self.col_wrap, **common,
            )  # fmt: skip
        return self.exponents(self.names, self.step)

    def exponents(self, names: list[str], step: int | None) -> Figure:
        """The exponent histograms of layers at a step."""
        at = self.nearest(0) if step is None else step
        return exponents_figure(
            self.table, name=names, kind=self.kind, step=at or 0, rank=self.rank,
            dtype_annotation=self.dtype, col_wrap=self.col_wrap, log=bool(self.log),
            theme=self.theme,
        )  # fmt: skip


def curves_of(stats: Any, table: Table) -> dict[str, tuple[Any, Any]]:
    """Training statistics from a frame, a dict, a run; None: those of the table.

    >>> curves_of({"loss": [2.0, 1.0]}, None)
    {'loss': (array([0, 1]), array([2., 1.]))}
    """
    if stats is None:
        return dict(table.metrics())
    if hasattr(stats, "columns") and hasattr(stats, "to_numpy"):
        steps = stats["step"] if "step" in stats.columns else stats.index
        named = {
            str(name): stats[name].to_numpy()
            for name in stats.columns
            if name not in ("step", "rank") and stats[name].dtype.kind in "iuf"
        }
        return {name: _curve(steps, values) for name, values in named.items()}
    if isinstance(stats, Mapping):
        steps = stats.get("step")
        return {
            str(name): _curve(range(len(values)) if steps is None else steps, values)
            for name, values in stats.items()
            if name != "step"
        }
    return dict(table_of(stats).metrics())


def _curve(steps: Any, values: Any) -> tuple[Any, Any]:
    x, y = np.asarray(steps, np.int64), np.asarray(values, np.float64)
    order = np.argsort(x, kind="stable")
    return x[order], y[order]
