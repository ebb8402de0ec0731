"""The figures that users call: on a run, a live session, a tracker or a LogFrame.

    from tensortap import viz

    viz.scalar_line(run, tt="Activation", layer="output", scalar_metric=["rm2", "min_abs"])
    viz.scalar_global_heatmap(run, tt="Gradient", scalar_metric="rm2", inc=50)
    viz.exp_hist(run, layer="output", tt="Activation", step=100, dtype_annotation="float8_e4m3fn")

Each returns a plotly figure, which a notebook shows and `save` writes to a file.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.core.arguments import (
    check_choice,
    check_count,
    check_path,
    check_positive,
    checked,
)
from tensortap.core.errors import MissingExtra, NotFound, TensortapError
from tensortap.core.record import Kind
from tensortap.core.rooms import offer
from tensortap.live.reader import LiveReader
from tensortap.rooms.figures.figures.exponents import Formats, exponents_figure
from tensortap.rooms.figures.figures.heatmap import heatmap_figure
from tensortap.rooms.figures.figures.lines import lines_figure
from tensortap.rooms.figures.figures.tensors import tensor_figure
from tensortap.rooms.figures.figures.theme import themed, with_arrays
from tensortap.rooms.figures.figures.training import training_figure
from tensortap.rooms.figures.selection import (
    Layers,
    check_statistics,
    choose_kind,
    choose_layers,
    choose_metrics,
    choose_step,
)
from tensortap.table.columns import VALUE
from tensortap.table.frames import choose_rank
from tensortap.table.table import Table, table_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tensortap.rooms.figures.figures.theme import Figure

Tensors = Kind | str | Iterable[Kind | str] | None
_UNSET: Any = object()
_IMAGES = ("png", "svg", "pdf", "jpg", "jpeg", "webp")
_live_tables: weakref.WeakKeyDictionary[LiveReader, Table] = weakref.WeakKeyDictionary()


def need_plotly() -> Any:
    """Return ``plotly.graph_objects``, or raise MissingExtra."""
    try:
        import plotly.graph_objects
    except ImportError:
        raise MissingExtra.of("figures need plotly", "view") from None
    return plotly.graph_objects


def plotly_figure(figure: Figure, theme: str = "light") -> go.Figure:
    """Return a figure dict as a plotly figure in the colors of a theme."""
    graph_objects = need_plotly()
    if "ipykernel" in sys.modules:
        import plotly.io as pio

        # as HTML, too: else a notebook that is exported does not show it. plotly's own renderer
        # stores one copy of its script per notebook
        if pio.renderers.default == "plotly_mimetype":
            pio.renderers.default = "plotly_mimetype+notebook"
    drawn: go.Figure = graph_objects.Figure(with_arrays(themed(figure, theme)))
    return drawn


def source_table(source: Any, df: Any) -> Table:
    """Return the table of what the user gave as `source` or as `df`."""
    if (source is None) == (df is None):
        raise TypeError("pass a run, a live session or a tracker, or df=<a LogFrame>")
    given = df if source is None else source
    reader = getattr(given, "reader", given)
    if not isinstance(reader, LiveReader):
        return table_of(given)
    # keep the table of a remote session, so that only new records are fetched
    table = _live_tables.get(reader)
    if table is None:
        table = _live_tables[reader] = table_of(reader)
    else:
        table.refresh()
    return table


def check_options(theme: str, col_wrap: int | None = None, inc: int = 1) -> None:
    """Raise for options of figures that make no sense, naming the option."""
    check_choice("theme", theme, ("light", "dark"))
    check_count("inc", inc)
    if col_wrap is not None:
        check_count("col_wrap", col_wrap)


def choose_facets(
    source: Any, df: Any, tt: Tensors, layer: Layers, metric: Any = _UNSET
) -> tuple[Table, dict[str, list[str]], list[str]]:
    """Return table, names by kind, and statistics; raise NotFound for what does not exist."""
    table = source_table(source, df)
    given = [tt] if tt is None or isinstance(tt, (str, Kind)) else list(tt)
    if not given:
        raise ValueError("tt must not be empty: leave it out for the first kind")
    kinds = [choose_kind(table, each) for each in given]
    metrics = [] if metric is _UNSET else choose_metrics(table, metric)
    by_kind: dict[str, list[str]] = {}
    for i, (kind, key) in enumerate(kinds, 1):  # two states of an optimizer are one kind
        try:
            names = choose_layers(table, kind, layer, key)
        except NotFound:
            if i == len(kinds) and not by_kind:
                raise
            continue  # another kind has the layers
        if metrics != [VALUE]:
            check_statistics(table, kind, names)
        by_kind[kind] = list(dict.fromkeys([*by_kind.get(kind, []), *names]))
    return table, by_kind, metrics


@checked
def scalar_line(
    source: Any = None,
    *,
    tt: Tensors = None,
    layer: Layers = None,
    scalar_metric: str | Iterable[str] = "rm2",
    kind: str = "line",
    rank: int | str | None = None,
    step: int | None = None,
    log: bool | None = None,
    col_wrap: int | None = None,
    panels: str | None = None,
    theme: str = "light",
    df: Any = None,
) -> go.Figure:
    """Draw statistics of layers over the steps of training, as small multiples.

    `tt` is the kind of tensor (``"Activation"``, ``"Gradient"``, ``"Weight"`` …); several kinds
    get one panel each. `layer` is a name, several names, or a compiled pattern. `kind` is
    ``"line"`` or ``"scatter"``. `panels` chooses one panel per ``"metric"`` or per ``"name"``.
    `step` is marked. `log` is by default on where values span decades. `rank` is by default
    ``"whole"`` in all figures: what the ranks recorded of a tensor is merged; a number shows one
    rank, ``"all"`` every rank.
    """
    check_options(theme, col_wrap)
    check_choice("kind", kind, ("line", "scatter"))
    if panels is not None:
        check_choice("panels", panels, ("metric", "name"))
    table, names, metrics = choose_facets(source, df, tt, layer, scalar_metric)
    table, rank = choose_rank(table, rank)
    figure = lines_figure(
        table, names=names, kind=next(iter(names)), metrics=metrics, log=log, step=step,
        rank=rank, scatter=kind == "scatter", col_wrap=col_wrap, panels=panels,
    )  # fmt: skip
    return plotly_figure(figure, theme)


@checked
def scalar_global_heatmap(
    source: Any = None,
    *,
    tt: Kind | str | None = None,
    scalar_metric: str = "rm2",
    inc: int = 1,
    layer: Layers = None,
    rank: int | str | None = None,
    step: int | None = None,
    log: bool | None = None,
    relative: bool = False,
    theme: str = "light",
    df: Any = None,
) -> go.Figure:
    """Draw a statistic of all layers over all steps, `inc` steps per column.

    NaN and Inf have their own colors, and alerts are marked. If `relative`, colors show how far
    each value is from the median of its layer.
    """
    check_options(theme, inc=inc)
    table, by_kind, (metric,) = choose_facets(source, df, tt, layer, scalar_metric)
    table, rank = choose_rank(table, rank)
    ((kind, layers),) = by_kind.items()
    figure = heatmap_figure(
        table,
        kind=kind,
        names=layers,
        metric=metric,
        inc=inc,
        rank=rank,
        step=step,
        log=log,
        relative=relative,
    )
    return plotly_figure(figure, theme)


@checked
def exp_hist(
    source: Any = None,
    *,
    layer: Layers = None,
    tt: Tensors = None,
    step: int | None = None,
    rank: int | str | None = None,
    dtype_annotation: Formats = None,
    log: bool = False,
    col_wrap: int | None = None,
    theme: str = "light",
    df: Any = None,
) -> go.Figure:
    """Draw how the values of layers are spread over powers of two, at a step (the last one).

    `dtype_annotation` draws the range of a number format (``"float8_e4m3fn"``), of several, or of
    the dtype that a tensor had (True), with the shares that it would lose. Several `tt` get panels
    of their own.
    """
    check_options(theme, col_wrap)
    table, names, _ = choose_facets(source, df, tt, layer)
    table, rank = choose_rank(table, rank)
    first = next(iter(names))
    figure = exponents_figure(
        table, name=names, kind=first, step=choose_step(table, first, names[first], step),
        rank=rank, dtype_annotation=dtype_annotation, log=log, col_wrap=col_wrap,
    )  # fmt: skip
    return plotly_figure(figure, theme)


@checked
def training(
    source: Any = None,
    *,
    scalar_metric: Sequence[str] | None = None,
    rank: int | str | None = None,
    step: int | None = None,
    theme: str = "light",
    df: Any = None,
) -> go.Figure:
    """Draw the training statistics, those of ``tracker.step(loss=…)``, over the steps."""
    check_options(theme)
    table, rank = choose_rank(source_table(source, df), rank)
    figure = training_figure(table, names=scalar_metric, rank=rank, step=step, height=260)
    return plotly_figure(figure, theme)


@checked
def tensor(
    x: Any, *, index: Sequence[int] | None = None, title: str = "", theme: str = "light"
) -> go.Figure:
    """Draw a tensor: a matrix as a heatmap, a vector as a line.

    A tensor with more axes shows the last two, at `index` of the others (default 0). A large
    matrix is drawn in tiles, in which every NaN and infinity stays visible.
    """
    import numpy as np

    from tensortap.rooms.figures.reals import matrix_at
    from tensortap.values.view import array_of

    array = array_of(x)
    if array is None:
        try:
            array = np.asarray(x)
        except ValueError as error:
            raise TypeError(f"not a tensor: {error}") from None
    matrix, label = matrix_at(array, index)
    return plotly_figure(tensor_figure(matrix, title=title or label), theme)


@checked
def report(source: Any, path: str | Path) -> Path:
    """Write a report of a run, a live session, a tracker or a LogFrame into one HTML file."""
    written: Path = offer("run.report")(source, path)
    return written


@checked
def save(figure: go.Figure, path: str | Path, *, width: int = 1000, scale: float = 2.0) -> Path:
    """Write a figure as ``.html`` (one file, no network needed), ``.png``, ``.svg`` or ``.pdf``.

    Images need kaleido, and an installed Chromium or Chrome.
    """
    if not hasattr(figure, "write_html"):
        raise TypeError(f"figure must be a plotly figure, got {figure!r:.80}")
    check_path("path", path)
    check_count("width", width)
    check_positive("scale", scale)
    path = Path(path)
    form = path.suffix.lower().lstrip(".")
    if form in ("html", "htm"):
        figure.write_html(path, include_plotlyjs=True, config={"displaylogo": False})
    elif form in _IMAGES:
        path.write_bytes(_image(figure, form, width, scale))
    else:
        raise ValueError(f"{path.name}: a figure is saved as .html, .png, .svg or .pdf")
    return path


def _image(figure: go.Figure, form: str, width: int, scale: float) -> bytes:
    try:
        import kaleido
    except ImportError:
        raise MissingExtra.of("images need kaleido", "view") from None
    options = {
        "format": "jpeg" if form == "jpg" else form, "width": figure.layout.width or width,
        "height": figure.layout.height or 400, "scale": scale,
    }  # fmt: skip
    # without MathJax, which would be fetched from the network
    page = kaleido.PageGenerator(mathjax=False)
    # choreographer logs tracebacks of messages that it then ignores; failures are raised
    log = logging.getLogger("choreographer")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return bytes(kaleido.calc_fig_sync(figure, opts=options, kopts={"page_generator": page}))
    except Exception as error:
        if type(error).__name__ == "ChromeNotFoundError":
            raise TensortapError(
                "images need a browser: install chromium (Debian: apt-get install chromium), or "
                "save as .html"
            ) from None
        raise TensortapError(f"the browser could not draw the figure: {error}") from error
    finally:
        log.setLevel(level)
