"""The widgets of an interactive figure, and what they do."""

from __future__ import annotations

import asyncio
import contextlib
import html
import re
from collections.abc import Iterator
from typing import Any

import ipywidgets
import numpy as np
import plotly.graph_objects as go

from tensortap.errors import NotFound
from tensortap.viz.figures import training_figure
from tensortap.viz.figures.encoding import Figure, untyped
from tensortap.viz.interaction import FORMATS, FigureChoice, curves_of

_NO_FORMAT = "no format"


class Explorer:
    """A figure, widgets to choose what it shows, and the loss curve.

    `figure` shows the choice, `detail` the cell of a heatmap that was clicked, `loss` the curve
    from which to choose a step; all three are plotly widgets. `box` contains everything.
    """

    def __init__(self, choice: FigureChoice, train_stats: Any) -> None:
        self.choice = choice
        self._train_stats = train_stats
        self._quiet = False  # whether changes of widgets are our own
        self._task: Any = None
        self._shown: Figure = {"data": [], "layout": {}}
        self.figure, self.detail, self.loss = (go.FigureWidget() for _ in range(3))
        self._upper, self._middle, self._lower = (ipywidgets.VBox([]) for _ in range(3))
        self._loss_version = -1  # the version of the table that the loss shows
        self._message = ipywidgets.HTML()
        self._make_widgets()
        self.box = ipywidgets.VBox([])
        self._arrange()
        self.draw()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        for widget in (self.figure, self.detail, self.loss):
            widget._repr_mimebundle_()  # moves changes since its creation into its state
        return self.box._repr_mimebundle_(**options)

    # -- widgets -------------------------------------------------------------------------

    def _make_widgets(self) -> None:
        choice, table = self.choice, self.choice.table
        auto = ipywidgets.Layout(width="auto")
        self.kinds = ipywidgets.Dropdown(
            options=table.tensor_kinds(), value=choice.kind, description="kind"
        )
        self.search = ipywidgets.Text(placeholder="search layers (regex)", layout=auto)
        self.layers = ipywidgets.SelectMultiple(
            options=table.layers(choice.kind), value=tuple(choice.names),
            layout=ipywidgets.Layout(width="auto", height="130px"),
        )  # fmt: skip
        many = choice.view == "lines"
        select = ipywidgets.SelectMultiple if many else ipywidgets.Dropdown
        self.metrics = select(
            options=table.statistics(), description="statistic",
            value=tuple(choice.metrics) if many else choice.metrics[0],
        )  # fmt: skip
        steps = self._steps()
        self.step = ipywidgets.SelectionSlider(
            options=steps, value=choice.step if choice.step in steps else steps[-1],
            description="step", continuous_update=False, layout=ipywidgets.Layout(width="100%"),
        )  # fmt: skip
        formats = dict.fromkeys([_NO_FORMAT, *FORMATS, choice.dtype or _NO_FORMAT])
        self.dtype = ipywidgets.Dropdown(
            options=list(formats), value=choice.dtype or _NO_FORMAT, description="format"
        )
        self.axis = ipywidgets.Dropdown(
            options=[("automatic", None), ("logarithmic", True), ("linear", False)],
            value=choice.log, description="axis",
        )  # fmt: skip
        self.again = ipywidgets.Button(description="refresh", icon="refresh", layout=auto)
        self.again.on_click(lambda _: self.refresh())
        for widget in (self.kinds, self.layers, self.metrics, self.step, self.dtype, self.axis):
            widget.observe(self._on_choice, "value")
        self.search.observe(self._on_search, "value")

    def _arrange(self) -> None:
        left = [self.kinds, self.metrics, self.dtype, self.axis, self.again]
        if self.choice.view == "exponents":
            left.remove(self.metrics)
        top = ipywidgets.HBox([
            ipywidgets.VBox(left, layout=ipywidgets.Layout(width="320px")),
            ipywidgets.VBox([self.search, self.layers], layout=ipywidgets.Layout(flex="1 1 auto")),
        ])  # fmt: skip
        loss = [self._upper] if curves_of(self._train_stats, self.choice.table) else []
        self.box.children = (top, self.step, *loss, self._message, self._middle, self._lower)

    def _steps(self) -> list[int]:
        steps: list[int] = self.choice.table.steps(self.choice.kind).tolist()
        return steps or [0]

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
        choice = self.choice
        if change["owner"] is self.kinds:
            choice.choose_kind(change["new"])
            self._update_options(choice.table.layers(choice.kind))
        choice.names = list(self.layers.value)
        metric = self.metrics.value
        metrics = [metric] if isinstance(metric, str) else list(metric)
        choice.metrics = metrics or choice.table.statistics()[:1]
        choice.step = self.step.value
        choice.dtype = None if self.dtype.value == _NO_FORMAT else self.dtype.value
        choice.log = self.axis.value
        self.draw()

    def _on_search(self, change: Any) -> None:
        try:
            pattern = re.compile(change["new"], re.IGNORECASE)
        except re.error as error:
            self._show_error(f"not a regular expression: {error}")
            return
        layers = self.choice.table.layers(self.choice.kind)
        if pattern.pattern:
            layers = [name for name in layers if pattern.search(name)]
            self.choice.choose_matching(layers)
        self._update_options(layers)
        self._on_choice({"owner": self.layers})

    def _update_options(self, layers: list[str]) -> None:
        """Offer these layers and all steps, and keep what is chosen."""
        steps, nearest = self._steps(), self.choice.nearest(self.step.value)
        with self._own_changes():
            self.layers.options = layers
            self.layers.value = tuple(name for name in self.choice.names if name in set(layers))
            self.step.options = steps
            self.step.value = steps[-1] if nearest is None else nearest

    def choose_step(self, step: float) -> None:
        """Go to the captured step nearest to a step."""
        nearest = self.choice.nearest(step)
        if nearest is not None:
            self.step.value = nearest  # the widget's event does the rest

    def _on_curve(self, trace: Any, points: Any, _: Any) -> None:
        if points.xs:
            self.choose_step(points.xs[0])

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
        self.detail = _show(self._lower, self.choice.exponents([layer], step))
        with self._own_changes():
            self.step.value = self.choice.nearest(step)
        self.choice.step = step
        self._draw_loss()

    # -- drawing -------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw what is chosen."""
        try:
            self._shown = self.choice.figure()
        except (NotFound, ValueError) as error:
            self._show_error(str(error))
            return
        self._message.value = ""
        self.figure = _show(self._middle, self._shown)
        for number, trace in enumerate(self._shown["data"]):
            if self.choice.view == "heatmap" and "customdata" in trace:
                self.figure.data[number].on_click(self._on_cell)
            elif self.choice.view == "lines":
                self.figure.data[number].on_click(self._on_curve)
        self._draw_loss()

    def _draw_loss(self) -> None:
        curves = curves_of(self._train_stats, self.choice.table)
        if not curves:
            return
        choice = self.choice
        figure = training_figure(curves, step=choice.step, height=170, theme=choice.theme)
        if self._loss_version == choice.table.version:
            self.loss.layout.shapes = figure["layout"]["shapes"]
            return
        self._loss_version = choice.table.version
        self.loss = _show(self._upper, figure)
        self.loss.data[-1].on_click(self._on_curve)  # the trace that has every step

    def _show_error(self, words: str) -> None:
        self._message.value = f'<span style="color:#b4231f">{html.escape(words)}</span>'

    def refresh(self) -> bool:
        """Read new records; return whether there were any."""
        choice = self.choice
        if not choice.table.refresh():
            return False
        was_last = self.step.value == self.step.options[-1]
        self._update_options(choice.table.layers(choice.kind))
        if was_last:  # stay at the newest step
            with self._own_changes():
                self.step.value = self.step.options[-1]
            if choice.view == "exponents":
                choice.step = self.step.value
        self.draw()
        return True

    def follow(self, seconds: float) -> None:
        """Refresh every so many seconds while the kernel runs; 0 stops it."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if seconds <= 0:
            return

        async def refresh_forever() -> None:
            while True:
                await asyncio.sleep(seconds)
                self.refresh()

        self._task = asyncio.get_running_loop().create_task(refresh_forever())


def _show(box: Any, figure: Figure) -> Any:
    """Put a new widget of a figure into a box, and close the one that was there.

    A widget that is updated would show its first state when the page is loaded again. Arrays stay
    base 64: plotly would turn them into JSON, which has no NaN.
    """
    widget, old = go.FigureWidget(figure), box.children
    box.children = (widget,)
    for each in old:
        each.close()
    return widget
