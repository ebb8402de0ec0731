"""Figures with widgets, in Jupyter, VS Code and Colab.

    viz.interactive(viz.exp_hist, run, layer=["output"], tt="Activation", step=0, col_wrap=3)

A click on the loss curve chooses the step. A click on a cell of the heatmap opens the exponent
histogram of that layer at that step.
"""

from __future__ import annotations

import dataclasses
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
_FEW = 6  # layers that are selected by default
_VIEWS = {"scalar_line": "lines", "scalar_global_heatmap": "heatmap", "exp_hist": "exponents"}


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
    """Show a figure with widgets for layers, kind, statistic, step and number format.

    `f` is ``viz.scalar_line``, ``viz.scalar_global_heatmap`` or ``viz.exp_hist``; the other
    arguments are its own. `train_stats` is a frame or a dict of curves, by default the training
    statistics of the source; a click on a curve chooses the step. `follow` refreshes every so many
    seconds, as the button ``refresh`` does once.
    """
    view = _VIEWS.get(getattr(f, "__name__", ""))
    if view is None:
        raise TypeError(f"f must be viz.{', viz.'.join(_VIEWS)}; got {f!r}")
    prepare_colab()
    table = plots.source_table(source, df)
    kind, key = choose_kind(table, tt)
    names = choose_layers(table, kind, layer, key)
    if layer is None and view != "heatmap":
        names = names[:_FEW]
    if view == "exponents":
        step = choose_step(table, kind, names, step)
    choice = FigureChoice(
        table, view, kind, names, choose_metrics(table, scalar_metric), step,
        choose_rank(table, rank), dtype_annotation, inc, log, col_wrap, theme,
    )  # fmt: skip
    plots.need_plotly()
    try:
        import anywidget  # noqa: F401  plotly's widgets need it
        import ipywidgets  # noqa: F401
    except ImportError:
        raise MissingExtra(
            "interactive figures need ipywidgets and anywidget: pip install 'tensortap[notebook]'"
        ) from None
    from tensortap.viz.explorer import Explorer

    explorer = Explorer(choice, train_stats)
    if follow is not None:
        explorer.follow(follow)
    return explorer


def prepare_colab() -> None:
    """Allow third-party widgets if this is Colab."""
    if "google.colab" in sys.modules:
        importlib.import_module("google.colab.output").enable_custom_widget_manager()


@dataclasses.dataclass
class FigureChoice:
    """What is chosen, and the figure of it; independent of widgets."""

    table: Table
    view: str
    kind: str
    names: list[str]
    metrics: list[str]
    step: int | None
    rank: int | None
    dtype: str | None
    inc: int
    log: bool | None
    col_wrap: int | None
    theme: str

    def choose_kind(self, kind: str) -> None:
        """Switch to another kind, and keep the chosen names that it has."""
        self.kind = kind
        layers = self.table.layers(kind)
        kept = [name for name in self.names if name in set(layers)]
        self.names = layers if self.view == "heatmap" else kept or layers[:_FEW]

    def choose_matching(self, names: list[str]) -> None:
        """Choose names that a search has found."""
        self.names = names if self.view == "heatmap" else names[:_FEW]

    def nearest(self, step: float) -> int | None:
        """Return the captured step nearest to a step."""
        steps = self.table.steps(self.kind)
        return int(steps[np.abs(steps - step).argmin()]) if len(steps) else None

    def figure(self) -> Figure:
        """Return the figure of what is chosen."""
        if not self.names:
            return message_figure(f"no layer of {self.kind} is chosen", theme=self.theme)
        if self.view == "exponents":
            return self.exponents(self.names, self.step)
        common: dict[str, Any] = {
            "kind": self.kind, "names": self.names, "rank": self.rank, "log": self.log,
            "step": self.step, "theme": self.theme,
        }  # fmt: skip
        if self.view == "heatmap":
            return heatmap_figure(self.table, metric=self.metrics[0], inc=self.inc, **common)
        return lines_figure(self.table, metrics=self.metrics, col_wrap=self.col_wrap, **common)

    def exponents(self, names: list[str], step: int | None) -> Figure:
        """Return the exponent histograms of layers at a step, by default the first one."""
        return exponents_figure(
            self.table, name=names, kind=self.kind, rank=self.rank,
            step=(self.nearest(0) or 0) if step is None else step,
            dtype_annotation=self.dtype, col_wrap=self.col_wrap, log=bool(self.log),
            theme=self.theme,
        )  # fmt: skip


def curves_of(stats: Any, table: Table) -> dict[str, tuple[Any, Any]]:
    """Return training statistics of a frame, a dict or a run; of the table, if `stats` is None.

    >>> curves_of({"loss": [2.0, 1.0]}, None)
    {'loss': (array([0, 1]), array([2., 1.]))}
    """
    if stats is None:
        return dict(table.metrics())
    if hasattr(stats, "columns") and hasattr(stats, "to_numpy"):
        steps = stats["step"] if "step" in stats.columns else stats.index
        columns = [name for name in stats.columns if stats[name].dtype.kind in "iuf"]
        stats = {"step": steps, **{str(name): stats[name].to_numpy() for name in columns}}
        stats.pop("rank", None)
    if not isinstance(stats, Mapping):
        return dict(table_of(stats).metrics())
    curves = {}
    for name, values in stats.items():
        if name != "step":
            x = np.asarray(stats.get("step", range(len(values))), np.int64)
            order = np.argsort(x, kind="stable")
            curves[str(name)] = x[order], np.asarray(values, np.float64)[order]
    return curves
