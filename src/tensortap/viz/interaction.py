"""Figures with widgets, in Jupyter, VS Code and Colab.

    viz.interactive(viz.exp_hist, run, layer=["output"], tt="Activation", step=0, col_wrap=3)

A click on the loss curve chooses the step. A click on a cell of the heatmap opens the exponent
histogram of that layer at that step.
"""

from __future__ import annotations

import functools
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

if TYPE_CHECKING:
    from tensortap.viz.explorer import Explorer

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
    plots.need_plotly()
    try:
        import anywidget  # noqa: F401  plotly's widgets need it

        from tensortap.viz.explorer import FEW, Explorer
    except ImportError:
        raise MissingExtra(
            "interactive figures need ipywidgets and anywidget: pip install 'tensortap[notebook]'"
        ) from None
    prepare_colab()
    table = plots.source_table(source, df)
    kind, key = choose_kind(table, tt)
    names = choose_layers(table, kind, layer, key)
    if layer is None and view != "heatmap":
        names = names[:FEW]
    chosen = {
        "kind": kind, "names": names, "metrics": choose_metrics(table, scalar_metric),
        "step": choose_step(table, kind, names, step) if view == "exponents" else step,
        "dtype": dtype_annotation, "log": log,
    }  # fmt: skip
    explorer = Explorer(
        view, table, chosen, functools.partial(curves_of, train_stats, table), inc=inc,
        col_wrap=col_wrap, rank=choose_rank(table, rank), theme=theme,
    )  # fmt: skip
    if follow is not None:
        explorer.follow(follow)
    return explorer


def prepare_colab() -> None:
    """Allow third-party widgets if this is Colab."""
    if "google.colab" in sys.modules:
        importlib.import_module("google.colab.output").enable_custom_widget_manager()


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
