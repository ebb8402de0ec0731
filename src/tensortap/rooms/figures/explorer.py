"""Figures with widgets, in Jupyter, VS Code and Colab.

    viz.interactive(viz.exp_hist, run, layer=["output"], tt="Activation", step=0, col_wrap=3)

A click on the loss curve chooses the step. A click on a cell of the heatmap opens the exponent
histogram of that layer at that step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tensortap.core.arguments import checked
from tensortap.core.errors import MissingExtra, NotFound
from tensortap.rooms.figures import plots
from tensortap.rooms.figures.figures.exponents import (
    LOGGED,
    Formats,
    exponents_figure,
    format_names,
)
from tensortap.rooms.figures.figures.heatmap import heatmap_figure
from tensortap.rooms.figures.figures.lines import lines_figure
from tensortap.rooms.figures.figures.theme import Figure, message_figure, themed, untyped
from tensortap.rooms.figures.figures.training import training_figure
from tensortap.rooms.figures.selection import Layers, choose_step
from tensortap.table.frames import choose_rank
from tensortap.table.table import Table, table_of

try:
    import anywidget  # plotly's widgets need it
    import ipywidgets
    import plotly.graph_objects as go
except ImportError:
    needs = "interactive figures need plotly, ipywidgets and anywidget"
    raise MissingExtra.of(needs, "notebook") from None

FEW = 6  # layers that are selected by default
_FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32")
_NO_FORMAT = "no format"
_AXES = [("automatic", None), ("logarithmic", True), ("linear", False)]
_layout = ipywidgets.Layout


# A notebook stores the script of every widget, and that of plotly has 5 MB. Here one widget of the
# kernel has it, and figures wait for it. Without plotly's bundle in the known form they have it.
_BUNDLE, _, _EXPORTS = str(go.FigureWidget._esm).rpartition("export{")
_DEFAULT = re.search(r"([\w$]+) as default\}", _EXPORTS)
_WAIT = """
const plotly = async () => {
  while (!globalThis.tensortapPlotly) await new Promise((done) => setTimeout(done, 30));
  const made = globalThis.tensortapPlotly;
  return typeof made === "function" ? made() : made;
};
export default () => {
  const widget = plotly();
  return {
    initialize: async (context) => (await widget).initialize?.(context),
    render: async (context) => (await widget).render?.(context),
  };
};
"""


class FigureWidget(go.FigureWidget):  # type: ignore[misc]
    """A figure whose script is that of `_shared_plotly`."""

    _esm = go.FigureWidget._esm if _DEFAULT is None else _WAIT


@functools.cache
def _shared_plotly() -> tuple[Any, ...]:
    """Return the widget that has plotly's script; one per kernel, and so per notebook."""
    if _DEFAULT is None:
        return ()
    script = f"{_BUNDLE}\nglobalThis.tensortapPlotly = {_DEFAULT[1]};\nexport default {{}};\n"
    return (type("PlotlyScript", (anywidget.AnyWidget,), {"_esm": script})(),)


class Explorer:
    """A figure, widgets to choose what it shows, and the loss curve.

    `figure` shows the choice, `detail` the cell of a heatmap that was clicked, `loss` the curve
    from which to choose a step; all three are plotly widgets. `box` contains everything. `view` is
    ``"lines"``, ``"heatmap"`` or ``"exponents"``, `chosen` what the widgets show first, and options
    of figures. `curves` returns the training statistics.
    """

    def __init__(
        self, view: str, table: Table, chosen: dict[str, Any], curves: Callable[[], Any]
    ) -> None:
        self._view, self._table, self._curves, self._chosen = view, table, curves, chosen
        self._step: int | None = chosen["step"]  # the marked step, None until one is chosen
        self._quiet = False  # whether changes of widgets are our own
        self._shown: Figure = {"data": [], "layout": {}}
        self._loss_version = -1  # the version of the table that the loss shows
        # widgets, once there is something to show
        self.figure: Any = None
        self.detail: Any = None
        self.loss: Any = None
        self._upper, self._middle, self._lower = (ipywidgets.VBox([]) for _ in range(3))
        self._message = ipywidgets.HTML()
        self._make_widgets(chosen)
        left = [self.kinds, self.metrics, self.dtype, self.axis, self.again]
        if view == "exponents":
            left.remove(self.metrics)
        top = ipywidgets.HBox([
            ipywidgets.VBox(left, layout=_layout(width="320px")),
            ipywidgets.VBox([self.layers], layout=_layout(flex="1 1 auto")),
        ])  # fmt: skip
        loss = [self._upper] if curves() else []
        below = (self.step, *loss, self._message, self._middle, self._lower)
        self.box = ipywidgets.VBox([top, *below, *_shared_plotly()])
        self.draw()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        for widget in filter(None, (self.figure, self.detail, self.loss)):
            widget._repr_mimebundle_()  # moves changes since its creation into its state
        return self.box._repr_mimebundle_(**options)

    # -- widgets -------------------------------------------------------------------------

    def _make_widgets(self, chosen: dict[str, Any]) -> None:
        kinds, several = self._table.tensor_kinds(), len(chosen["kinds"]) > 1
        self.kinds = _select("kind", kinds, chosen["kinds"], several)
        statistics, several = self._table.statistics(), self._view == "lines"
        self.metrics = _select("statistic", statistics, chosen["metrics"], several)
        auto = _layout(width="auto")
        self.layers = ipywidgets.SelectMultiple(
            options=self._layers(), value=tuple(chosen["names"]),
            layout=_layout(width="auto", height="130px"),
        )  # fmt: skip
        steps = self._steps()
        self.step = ipywidgets.SelectionSlider(
            options=steps, value=self._step if self._step in steps else steps[-1],
            description="step", continuous_update=False, layout=_layout(width="100%"),
        )  # fmt: skip
        own = ", ".join(chosen["dtype"]) or _NO_FORMAT
        formats = list(dict.fromkeys([_NO_FORMAT, LOGGED, *_FORMATS, own]))
        self.dtype = ipywidgets.Dropdown(options=formats, value=own, description="format")
        self.axis = ipywidgets.Dropdown(options=_AXES, value=chosen["log"], description="axis")
        self.again = ipywidgets.Button(description="refresh", icon="refresh", layout=auto)
        self.again.on_click(lambda _: self.refresh())
        for widget in (self.kinds, self.layers, self.metrics, self.step, self.dtype, self.axis):
            widget.observe(self._on_choice, "value")

    def _layers(self) -> list[str]:
        each = map(self._table.layers, _values(self.kinds))
        return list(dict.fromkeys(name for layers in each for name in layers))

    def _names(self) -> dict[str, list[str]]:
        layers = {kind: set(self._table.layers(kind)) for kind in _values(self.kinds)}
        own = {kind: [n for n in self.layers.value if n in layers[kind]] for kind in layers}
        return {kind: names for kind, names in own.items() if names}

    def _steps(self) -> list[int]:
        each = map(self._table.steps, _values(self.kinds))
        return sorted({step for steps in each for step in steps.tolist()}) or [0]

    def _nearest(self, step: float) -> int:
        return min(self._steps(), key=lambda each: abs(each - step))

    @contextlib.contextmanager
    def _own_changes(self) -> Iterator[None]:
        """Change widgets without drawing."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    # -- events --------------------------------------------------------------------------

    def _on_choice(self, change: Any) -> None:
        if self._quiet:
            return
        if change["owner"] is self.kinds:
            layers = self._layers()
            kept = [name for name in self.layers.value if name in set(layers)]
            self._offer(layers, layers if self._view == "heatmap" else kept or layers[:FEW])
        self._step = self.step.value
        self.draw()

    def _offer(self, layers: Sequence[str], names: Sequence[str]) -> None:
        """Offer these layers and all steps; choose these names, and keep the step."""
        nearest = self._nearest(self.step.value)
        with self._own_changes():
            self.layers.options = layers
            self.layers.value = tuple(name for name in names if name in set(layers))
            self.step.options = self._steps()
            self.step.value = nearest

    def _on_curve(self, trace: Any, points: Any, _: Any) -> None:
        if points.xs:
            self.step.value = self._nearest(points.xs[0])  # the widget's event does the rest

    def _on_cell(self, trace: Any, points: Any, _: Any) -> None:
        custom = self._shown["data"][points.trace_index].get("customdata")
        if custom is None or not points.point_inds:
            return
        cells = untyped(custom) if isinstance(custom, dict) else np.array(custom, float)
        layer, step = cells[tuple(np.atleast_1d(points.point_inds[0]))][:2]
        if not np.isnan(layer):
            self.open(self._shown["layout"]["meta"]["layers"][int(layer)], int(step))

    def open(self, layer: str, step: int) -> None:
        """Show the exponent histogram of a layer at a step, below the heatmap."""
        kind = _values(self.kinds)[0]
        self.detail = self._show(self._lower, self._exponents({kind: [layer]}, step))
        with self._own_changes():
            self.step.value = self._nearest(step)
        self._step = step
        self._draw_loss()

    # -- drawing -------------------------------------------------------------------------

    def _figure(self) -> Figure:
        names = self._names()
        if not names:
            kinds = " or ".join(_values(self.kinds)) or "any kind"
            return message_figure(f"no layer of {kinds} is chosen")
        if self._view == "exponents":
            return self._exponents(names, self._steps()[0] if self._step is None else self._step)
        kind, metrics = next(iter(names)), _values(self.metrics) or self._table.statistics()[:1]
        common = {"kind": kind, "log": self.axis.value, "step": self._step}
        common |= {"rank": self._chosen["rank"]}
        if self._view == "heatmap":
            common |= {"names": names[kind], "metric": metrics[0], "inc": self._chosen["inc"]}
            return heatmap_figure(self._table, **common)
        common |= {"names": names, "metrics": metrics, "col_wrap": self._chosen["col_wrap"]}
        return lines_figure(self._table, **common)

    def _exponents(self, names: Mapping[str, Sequence[str]], step: int) -> Figure:
        dtypes = None if self.dtype.value == _NO_FORMAT else self.dtype.value.split(", ")
        return exponents_figure(
            self._table, name=names, kind=next(iter(names)), step=step, dtype_annotation=dtypes,
            col_wrap=self._chosen["col_wrap"], log=bool(self.axis.value), rank=self._chosen["rank"],
        )  # fmt: skip

    def draw(self) -> None:
        try:
            self._shown = self._figure()
        except (NotFound, ValueError) as error:
            self._show_error(str(error))
            return
        self._message.value = ""
        self.figure = self._show(self._middle, self._shown)
        clicked = {"heatmap": self._on_cell, "lines": self._on_curve}.get(self._view)
        for trace in self.figure.data if clicked else ():
            trace.on_click(clicked)
        self._draw_loss()

    def _draw_loss(self) -> None:
        curves = self._curves()
        if not curves:
            return
        figure = themed(training_figure(curves, step=self._step, height=170), self._chosen["theme"])
        if self._loss_version == self._table.version:
            self.loss.layout.shapes = figure["layout"]["shapes"]
            return
        self._loss_version = self._table.version
        self.loss = self._show(self._upper, figure)
        self.loss.data[-1].on_click(self._on_curve)  # the trace that has every step

    def _show(self, box: Any, figure: Figure) -> Any:
        """Put a new widget of a figure into a box, and close the one that was there.

        A widget that is updated would show its first state when the page is loaded again. Arrays
        stay base 64: plotly would turn them into JSON, which has no NaN.
        """
        widget, old = FigureWidget(themed(figure, self._chosen["theme"])), box.children
        box.children = (widget,)
        for each in old:
            each.close()
        return widget

    def _show_error(self, words: str) -> None:
        self._message.value = f'<span style="color:#b4231f">{html.escape(words)}</span>'

    def refresh(self) -> bool:
        """Read new records; return whether there were any."""
        if not self._table.refresh():
            return False
        was_last = self.step.value == self.step.options[-1]
        self._offer(self._layers(), self.layers.value)
        if was_last:  # stay at the newest step
            with self._own_changes():
                self.step.value = self.step.options[-1]
            if self._view == "exponents":
                self._step = self.step.value
        self.draw()
        return True


def _select(label: str, options: Sequence[str], values: Sequence[str], several: bool) -> Any:
    """Return a widget for one choice, or for several."""
    if several:
        return ipywidgets.SelectMultiple(options=options, value=tuple(values), description=label)
    return ipywidgets.Dropdown(options=options, value=values[0], description=label)


def _values(widget: Any) -> list[str]:
    return list(widget.value) if isinstance(widget.value, tuple) else [widget.value]


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
        "dtype": format_names(dtype_annotation), "log": log, "inc": inc, "col_wrap": col_wrap,
        "rank": rank, "theme": theme,
    }  # fmt: skip
    return Explorer(view, table, chosen, functools.partial(curves_of, train_stats, table))


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
