"""Figures with widgets, in Jupyter, VS Code and Colab.

    viz.interactive(viz.exp_hist, run, layer=["output"], tt="Activation", step=0, col_wrap=3)

A click on the loss curve chooses the step. A click on a cell of the heatmap opens the exponent
histogram of that layer at that step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tensortap.core.arguments import checked
from tensortap.core.errors import MissingExtra
from tensortap.rooms.figures import plots
from tensortap.rooms.figures.figures.exponents import Formats, format_names
from tensortap.rooms.figures.selection import Layers, choose_step
from tensortap.table.frames import choose_rank
from tensortap.table.table import Table, table_of

if TYPE_CHECKING:
    from tensortap.rooms.figures.explorer import Explorer

_VIEWS = {"scalar_line": "lines", "scalar_global_heatmap": "heatmap", "exp_hist": "exponents"}


@checked
def interactive(
    f: Any = plots.scalar_global_heatmap,
    source: Any = None,
    *,
    df: Any = None,
    tt: plots.Tensors = None,
    layer: Layers = None,
    scalar_metric: str | Iterable[str] = "rm2",
    step: int | None = None,
    rank: int | str | None = None,
    dtype_annotation: Formats = None,
    inc: int = 1,
    log: bool | None = None,
    train_stats: Any = None,
    col_wrap: int | None = None,
    theme: str = "light",
) -> Explorer:
    """Show a figure with widgets for layers, kind, statistic, step and number format.

    `f` is ``viz.scalar_line``, ``viz.exp_hist`` or ``viz.scalar_global_heatmap``, which may be left
    out: ``viz.interactive(run)``. The other arguments are its own.
    `train_stats` is a dict, a frame, a series or a dataclass of curves with
    ``steps``, or a run; by default the training statistics of the source. A click on a curve
    chooses the step. The button ``refresh`` reads new records.
    """
    if source is None and not callable(f):  # interactive(run)
        f, source = plots.scalar_global_heatmap, f
    view = _VIEWS.get(getattr(f, "__name__", ""))
    if view is None:
        raise TypeError(f"f must be viz.{', viz.'.join(_VIEWS)}; got {f!r}")
    plots.check_options(theme, col_wrap, inc)
    plots.need_plotly()
    try:
        import anywidget  # noqa: F401  plotly's widgets need it

        from tensortap.rooms.figures.explorer import FEW, Explorer
    except ImportError:
        raise MissingExtra.of(
            "interactive figures need ipywidgets and anywidget", "notebook"
        ) from None
    table, by_kind, metrics = plots.choose_facets(source, df, tt, layer, scalar_metric)
    if view == "heatmap" and len(by_kind) * len(metrics) > 1:
        raise ValueError("scalar_global_heatmap shows one kind of tensor and one statistic")
    table, rank = choose_rank(table, rank)
    few = None if layer is not None or view == "heatmap" else FEW
    names = dict.fromkeys(name for own in by_kind.values() for name in own[:few])
    kind, own = next(iter(by_kind.items()))
    chosen = {
        "kinds": list(by_kind), "names": list(names), "metrics": metrics,
        "step": choose_step(table, kind, own, step) if view == "exponents" else step,
        "dtype": format_names(dtype_annotation), "log": log,
    }  # fmt: skip
    return Explorer(
        view, table, chosen, functools.partial(curves_of, train_stats, table), inc=inc,
        col_wrap=col_wrap, rank=rank, theme=theme,
    )  # fmt: skip


def curves_of(stats: Any, table: Table) -> dict[str, tuple[Any, Any]]:
    """Return the curves of `train_stats`; without it, those of the table.

    Accepts a dict, a frame, a series or a dataclass with ``steps``, ``step``, ``global_step`` or
    ``iteration`` (of a frame the index counts without it), or a run.

    >>> curves_of({"steps": [0, 50], "loss": [2.0, 1.0]}, None)
    {'loss': (array([ 0, 50]), array([2., 1.]))}
    """
    if stats is None:
        return dict(table.metrics())
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type) and _is_steps(vars(stats)):
        stats = {name: values for name, values in vars(stats).items() if values is not None}
    if hasattr(stats, "to_frame") and hasattr(stats, "name"):  # a series
        stats = stats.to_frame(stats.name or "loss")
    if hasattr(stats, "columns") and hasattr(stats, "to_numpy") and stats.columns.nlevels == 1:
        numbers = [name for name in stats.columns if stats[name].dtype.kind in "iuf"]
        columns = {str(name): stats[name].to_numpy() for name in numbers if name != "rank"}
        stats = columns if _is_steps(columns) else {"steps": stats.index.to_numpy(), **columns}
    if not isinstance(stats, Mapping):
        try:
            return dict(table_of(stats).metrics())
        except TypeError:
            raise TypeError(f"train_stats must be {_FORMS}; got {stats!r:.100}") from None
    steps = next((values for name, values in stats.items() if _is_steps([name])), None)
    curves = {
        str(name): _curve(str(name), steps, values)
        for name, values in stats.items() if not _is_steps([name])
    }  # fmt: skip
    if not curves:
        raise ValueError(f"train_stats has no curve: pass {_FORMS}")
    return curves


_FORMS = "a dict like {'steps': [0, 50], 'loss': [2.0, 1.0]}, a frame, a series, or a run"


def _is_steps(names: Iterable[Any]) -> bool:
    known = ("steps", "step", "global_step", "iteration", "iterations")
    return any(str(name).lower() in known for name in names)


def _curve(name: str, steps: Any, values: Any) -> tuple[Any, Any]:
    """Return one curve by rising steps; raise if it is not numbers, or has other lengths."""
    try:
        y = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"train_stats: {name!r} must be numbers, got {values!r:.80}") from None
    x = np.asarray(np.arange(y.size) if steps is None else steps)
    if x.dtype.kind not in "iuf" or (x % 1 != 0).any():
        raise TypeError(f"train_stats: steps must be whole numbers, got {steps!r:.80}")
    if y.ndim != 1 or x.shape != y.shape:
        raise ValueError(
            f"train_stats: {name!r} has the shape {y.shape} for steps of shape {x.shape}; each "
            "curve needs one number per step"
        )
    order = np.argsort(x, kind="stable")
    return x[order].astype(np.int64), y[order]
