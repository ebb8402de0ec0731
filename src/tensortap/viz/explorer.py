"""The widgets of an interactive figure, and what happens when one of them is used."""

from __future__ import annotations

import asyncio
import html
import re
from typing import Any

import ipywidgets
import numpy as np
import plotly.graph_objects as go

from tensortap.errors import NotFound
from tensortap.viz.figures import training_figure
from tensortap.viz.figures.encoding import Figure, untyped
from tensortap.viz.widgets import FEW, FORMATS, State, curves_of

_NONE = "no format"


class Explorer:
    """A figure, widgets to choose what it shows, and the loss curve.

    `figure` is what is chosen, `detail` what a click on a heatmap has opened, `loss` the curve to
    choose a step from: plotly's widgets all three. `box` is the whole.
    """

    def __init__(self, state: State, train_stats: Any) -> None:
        self.state = state
        self._given = train_stats
        self._busy = False
        self._task: Any = None
        self._shown: Figure = {"data": [], "layout": {}}
        self.figure, self.detail, self.loss = (go.FigureWidget() for _ in range(3))
        self._upper, self._middle, self._lower = (ipywidgets.VBox([]) for _ in range(3))
        self._curves = -1  # the version of the table that the loss is of
        self._say = ipywidgets.HTML()
        self._controls()
        self.box = ipywidgets.VBox([])
        self._arrange()
        self.draw()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        for widget in (self.figure, self.detail, self.loss):
            widget._repr_mimebundle_()  # what has changed since it was made becomes its state
        return self.box._repr_mimebundle_(**options)

    # -- controls --------------------------------------------------------------------

    def _controls(self) -> None:
        state, table = self.state, self.state.table
        wide = {"layout": ipywidgets.Layout(width="auto")}
        self.kinds = ipywidgets.Dropdown(
            options=table.tensor_kinds(), value=state.kind, description="kind"
        )
        self.search = ipywidgets.Text(
            placeholder="search layers (regex)", continuous_update=True, **wide
        )
        tall = ipywidgets.Layout(width="auto", height="130px")
        self.layers = ipywidgets.SelectMultiple(
            options=table.layers(state.kind), value=tuple(state.names), layout=tall
        )
        many = state.view == "lines"
        pick = ipywidgets.SelectMultiple if many else ipywidgets.Dropdown
        self.metrics = pick(
            options=table.statistics(),
            value=tuple(state.metrics) if many else state.metrics[0],
            description="statistic",
        )
        steps = state.steps() or [0]
        self.step = ipywidgets.SelectionSlider(
            options=steps,
            value=state.step if state.step in steps else steps[-1],
            description="step",
            continuous_update=False,
            layout=ipywidgets.Layout(width="100%"),
        )
        formats = [_NONE, *dict.fromkeys([*FORMATS, *([state.dtype] if state.dtype else [])])]
        self.dtype = ipywidgets.Dropdown(
            options=formats, value=state.dtype or _NONE, description="format"
        )
        self.axis = ipywidgets.Dropdown(
            options=[("as needed", None), ("logarithmic", True), ("linear", False)],
            value=state.log,
            description="axis",
        )
        self.again = ipywidgets.Button(description="refresh", icon="refresh", **wide)
        self.again.on_click(lambda _: self.refresh())
        for widget in (
            self.kinds, self.layers, self.metrics, self.step, self.dtype, self.axis
        ):  # fmt: skip
            widget.observe(self._on_choice, "value")
        self.search.observe(self._on_search, "value")

    def _arrange(self) -> None:
        first = [self.kinds, self.metrics, self.dtype, self.axis]
        if self.state.view == "exponents":
            first.remove(self.metrics)
        left = ipywidgets.VBox([*first, self.again], layout=ipywidgets.Layout(width="320px"))
        right = ipywidgets.VBox(
            [self.search, self.layers], layout=ipywidgets.Layout(flex="1 1 auto")
        )
        parts = [ipywidgets.HBox([left, right]), self.step]
        if curves_of(self._given, self.state.table):
            parts.append(self._upper)
        self.box.children = (*parts, self._say, self._middle, self._lower)

    # -- what happens ----------------------------------------------------------------

    def _on_choice(self, change: Any) -> None:
        if self._busy:
            return
        state = self.state
        if change["owner"] is self.kinds:
            state.choose_kind(change["new"])
            self._fit()
        state.names = list(self.layers.value)
        metric = self.metrics.value
        state.metrics = [metric] if isinstance(metric, str) else list(metric)
        state.metrics = state.metrics or [state.table.statistics()[0]]
        state.step = self.step.value
        state.dtype = None if self.dtype.value == _NONE else self.dtype.value
        state.log = self.axis.value
        self.draw()

    def _on_search(self, change: Any) -> None:
        try:
            pattern = re.compile(change["new"], re.IGNORECASE)
        except re.error as error:
            self._say.value = _said(f"no regular expression: {error}")
            return
        self._say.value = ""
        self._fit(pattern)
        self._on_choice({"owner": self.layers})

    def _fit(self, pattern: re.Pattern[str] | None = None) -> None:
        """Offer the layers and steps that there are now, and keep what is chosen."""
        state = self.state
        there = state.table.layers(state.kind)
        if pattern is not None and pattern.pattern:
            there = [name for name in there if pattern.search(name)]
            state.names = there if state.view == "heatmap" else there[:FEW]
        steps = state.steps() or [0]
        at = state.nearest(self.step.value)
        self._busy = True
        try:
            self.layers.options = there
            self.layers.value = tuple(name for name in state.names if name in set(there))
            self.step.options = steps
            self.step.value = at if at is not None else steps[-1]
        finally:
            self._busy = False

    def choose_step(self, step: float) -> None:
        """Go to the captured step that is nearest: everything shows that one."""
        at = self.state.nearest(step)
        if at is not None:
            self.step.value = at  # the rest follows from it

    def _on_curve(self, trace: Any, points: Any, _: Any) -> None:
        if points.xs:
            self.choose_step(points.xs[0])

    def _on_cell(self, trace: Any, points: Any, _: Any) -> None:
        if not points.point_inds:
            return
        custom = self._shown["data"][points.trace_index].get("customdata")
        if custom is None:
            return
        place = points.point_inds[0]
        found = untyped(custom) if isinstance(custom, dict) else np.array(custom, float)
        layer, step = found[tuple(np.atleast_1d(place))][:2]
        if np.isnan(layer):
            return
        self.open(self._shown["layout"]["meta"]["layers"][int(layer)], int(step))

    def open(self, layer: str, step: int) -> None:
        """Show the exponent histogram of a layer at a step, below the heatmap."""
        self.detail = _show(self._lower, self.state.exponents([layer], step))
        self._busy = True
        try:
            self.step.value = self.state.nearest(step)
        finally:
            self._busy = False
        self.state.step = step
        self._draw_loss()

    # -- drawing ---------------------------------------------------------------------

    def draw(self) -> None:
        """Draw what is chosen."""
        try:
            self._shown = self.state.figure()
            self._say.value = ""
        except (NotFound, ValueError) as error:
            self._say.value = _said(str(error))
            return
        self.figure = _show(self._middle, self._shown)
        for number, trace in enumerate(self._shown["data"]):
            if self.state.view == "heatmap" and "customdata" in trace:
                self.figure.data[number].on_click(self._on_cell)
            elif self.state.view == "lines":
                self.figure.data[number].on_click(self._on_curve)
        self._draw_loss()

    def _draw_loss(self) -> None:
        curves = curves_of(self._given, self.state.table)
        if not curves:
            return
        state = self.state
        figure = training_figure(curves, step=state.step, height=170, theme=state.theme)
        if self._curves == state.table.version:
            self.loss.layout.shapes = figure["layout"]["shapes"]
            return
        self._curves = state.table.version
        self.loss = _show(self._upper, figure)
        self.loss.data[-1].on_click(self._on_curve)  # the trace that has every step

    def refresh(self) -> bool:
        """Take in what is new; whether anything was."""
        if not self.state.table.refresh():
            return False
        last = self.step.value == self.step.options[-1]
        self._fit()
        if last:  # who looks at the newest goes on doing so
            self._busy = True
            self.step.value = self.step.options[-1]
            self._busy = False
            if self.state.view == "exponents":
                self.state.step = self.step.value
        self.draw()
        return True

    def follow(self, seconds: float) -> None:
        """Refresh every so often, as long as the notebook's kernel runs; 0 ends it."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if seconds <= 0:
            return

        async def again() -> None:
            while True:
                await asyncio.sleep(seconds)
                self.refresh()

        # the loop of the notebook's kernel; where there is none, nothing can follow
        self._task = asyncio.get_running_loop().create_task(again())


def _show(place: Any, figure: Figure) -> Any:
    """A widget of a figure, in the place of the one that was there.

    A new one each time: inside a box a widget shows what it was made with, and a page that is
    loaded again shows that, too. Arrays stay bytes: of a matrix JSON would be made, which has no
    NaN.
    """
    made = go.FigureWidget(figure)
    gone = place.children
    place.children = (made,)
    for widget in gone:
        widget.close()
    return made


def _said(words: str) -> str:
    return f'<span style="color:#b4231f">{html.escape(words)}</span>'
