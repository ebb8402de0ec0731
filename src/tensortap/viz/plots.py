"""The figures as people ask for them: on a run, a live session, a tracker or a LogFrame.

    from tensortap import viz

    viz.scalar_line(run, tt="Activation", layer="output", scalar_metric=["rm2", "min_abs"])
    viz.scalar_global_heatmap(run, tt="Gradient", scalar_metric="rm2", inc=50)
    viz.exp_hist(run, layer="output", tt="Activation", step=100, dtype_annotation="float8_e4m3fn")

Each gives a plotly figure, which a notebook shows and `save` writes to a file.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.errors import MissingExtra, TensortapError
from tensortap.readers.live import LiveReader
from tensortap.record import Kind
from tensortap.table.selection import (
    Layers,
    check_statistics,
    choose_kind,
    choose_layers,
    choose_metrics,
    choose_rank,
    choose_step,
)
from tensortap.table.sources import VALUE
from tensortap.table.table import Table, table_of
from tensortap.viz.figures import (
    exponents_figure,
    heatmap_figure,
    lines_figure,
    tensor_figure,
    training_figure,
)
from tensortap.viz.figures.encoding import with_arrays

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tensortap.viz.figures.encoding import Figure


def need_plotly() -> Any:
    """plotly's figures, or an error that says how to get them."""
    try:
        import plotly.graph_objects
    except ImportError:
        raise MissingExtra("figures need plotly: pip install 'tensortap[view]'") from None
    return plotly.graph_objects


def wrap(figure: Figure) -> go.Figure:
    """A figure dict as a plotly figure."""
    return need_plotly().Figure(with_arrays(figure))


def source_table(source: Any, df: Any) -> Table:
    """The table of what was given, in either way."""
    if (source is None) == (df is None):
        raise TypeError("say what to draw: a run, a live session, a tracker, or df=a LogFrame")
    given = df if source is None else source
    # a live session in another process is not asked again for all that it has told already
    reader = getattr(given, "reader", given)
    if not isinstance(reader, LiveReader):
        return table_of(given)
    table = _live.get(reader)
    if table is None:
        table = _live[reader] = table_of(reader)
    else:
        table.refresh()
    return table


_live: weakref.WeakKeyDictionary[LiveReader, Table] = weakref.WeakKeyDictionary()


def scalar_line(
    source: Any = None,
    *,
    tt: Kind | str | None = None,
    layer: Layers = None,
    scalar_metric: str | Iterable[str] = "rm2",
    rank: int | None = None,
    step: int | None = None,
    log: bool | None = None,
    col_wrap: int | None = None,
    panels: str | None = None,
    theme: str = "light",
    df: Any = None,
) -> go.Figure:
    """Statistics of layers over the steps of training, as small multiples.

    `tt` is the kind of tensor (``"Activation"``, ``"Gradient"``, ``"Weight"`` …), `layer` a name,
    several, or a compiled pattern. `panels` is ``"metric"`` or ``"name"``: what gets a panel of
    its own. `step` is marked; `log` is by default as the values need it.
    """
    table = source_table(source, df)
    kind, key = choose_kind(table, tt)
    names, metrics = choose_layers(table, kind, layer, key), choose_metrics(table, scalar_metric)
    if metrics != [VALUE]:
        check_statistics(table, kind, names)
    figure = lines_figure(
        table,
        names=names,
        kind=kind,
        metrics=metrics,
        rank=choose_rank(table, rank),
        log=log,
        step=step,
        col_wrap=col_wrap,
        panels=panels,
        theme=theme,
    )
    return wrap(figure)


def scalar_global_heatmap(
    source: Any = None,
    *,
    tt: Kind | str | None = None,
    scalar_metric: str = "rm2",
    inc: int = 1,
    layer: Layers = None,
    rank: int | None = None,
    step: int | None = None,
    log: bool | None = None,
    theme: str = "light",
    df: Any = None,
) -> go.Figure:
    """A statistic of all layers over all steps; `inc` is how many steps share a column.

    What is not finite has a colour of its own, and alerts are marked.
    """
    table = source_table(source, df)
    kind, key = choose_kind(table, tt)
    names, metrics = choose_layers(table, kind, layer, key), choose_metrics(table, scalar_metric)
    if metrics != [VALUE]:
        check_statistics(table, kind, names)
    figure = heatmap_figure(
        table,
        kind=kind,
        metric=metrics[0],
        inc=inc,
        names=names,
        rank=choose_rank(table, rank),
        step=step,
        log=log,
        theme=theme,
    )
    return wrap(figure)


def exp_hist(
    source: Any = None,
    *,
    layer: Layers = None,
    tt: Kind | str | None = None,
    step: int | None = None,
    rank: int | None = None,
    dtype_annotation: str | None = None,
    over: str | None = None,
    log: bool = False,
    col_wrap: int | None = None,
    theme: str = "light",
    df: Any = None,
) -> go.Figure:
    """How the values of layers are spread over powers of two, at a step (the last one).

    `dtype_annotation` (``"float8_e4m3fn"``) draws the range of a format over it, and says which
    shares would be lost. ``over="steps"`` shows all steps as a heatmap, ``"ridge"`` as curves.
    """
    table = source_table(source, df)
    kind, key = choose_kind(table, tt)
    names = choose_layers(table, kind, layer, key)
    check_statistics(table, kind, names)
    figure = exponents_figure(
        table,
        name=names,
        kind=kind,
        step=choose_step(table, kind, names, step),
        rank=choose_rank(table, rank),
        dtype_annotation=dtype_annotation,
        over=over,
        log=log,
        col_wrap=col_wrap,
        theme=theme,
    )
    return wrap(figure)


def training(
    source: Any = None,
    *,
    scalar_metric: Sequence[str] | None = None,
    rank: int | None = None,
    step: int | None = None,
    theme: str = "light",
    df: Any = None,
) -> go.Figure:
    """The training statistics, those of ``tracker.step(loss=…)``, over the steps."""
    table = source_table(source, df)
    figure = training_figure(
        table, names=scalar_metric, rank=choose_rank(table, rank), step=step, height=260,
        theme=theme,
    )  # fmt: skip
    return wrap(figure)


def tensor(
    x: Any, *, index: Sequence[int] | None = None, title: str = "", theme: str = "light"
) -> go.Figure:
    """A tensor: a matrix as a heatmap, a vector as a line.

    Of more than two axes the last two are shown, at `index` of those before them (all 0).
    Large ones are shown in tiles; no NaN and no infinity is lost by that.
    """
    from tensortap.frameworks.view import array_of

    array = array_of(x)
    if array is None:
        import numpy as np

        try:
            array = np.asarray(x)
        except ValueError as error:
            raise TypeError(f"no tensor: {error}") from None
    lead = max(0, array.ndim - 2)
    at = tuple(index) if index is not None else (0,) * lead
    if len(at) != lead:
        raise ValueError(
            f"the shape is {array.shape}: index has {lead} numbers, one for each axis but the last "
            f"two, not {len(at)}"
        )
    if array.size:
        try:
            array = array[at]
        except IndexError:
            raise ValueError(f"no {list(at)} in a tensor of the shape {array.shape}") from None
    if lead and not title:
        title = f"[{', '.join(map(str, at))}, :, :]"
    return wrap(tensor_figure(array, title=title, theme=theme))


def save(figure: go.Figure, path: str | Path, *, width: int = 1000, scale: float = 2.0) -> Path:
    """Write a figure: ``.html`` (one file that needs no network), ``.png``, ``.svg`` or ``.pdf``.

    Images are drawn by kaleido with the Chromium or Chrome that is installed.
    """
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind in ("html", "htm"):
        figure.write_html(path, include_plotlyjs=True, config={"displaylogo": False})
        return path
    if kind not in ("png", "svg", "pdf", "jpg", "jpeg", "webp"):
        raise ValueError(f"{path.name}: a figure is saved as .html, .png, .svg or .pdf")
    path.write_bytes(_image(figure, kind, width, scale))
    return path


def _image(figure: go.Figure, kind: str, width: int, scale: float) -> bytes:
    try:
        import kaleido
    except ImportError:
        raise MissingExtra("images need kaleido: pip install 'tensortap[view]'") from None
    options = {
        "format": "jpeg" if kind == "jpg" else kind,
        "width": figure.layout.width or width,
        "height": figure.layout.height or 400,
        "scale": scale,
    }
    # without MathJax, which would be fetched
    page = kaleido.PageGenerator(mathjax=False)
    # its channel may log a traceback for a message that it then ignores; what fails is raised
    channel = logging.getLogger("choreographer")
    level = channel.level
    channel.setLevel(logging.CRITICAL)
    try:
        found = kaleido.calc_fig_sync(figure, opts=options, kopts={"page_generator": page})
    except Exception as error:
        if type(error).__name__ == "ChromeNotFoundError":
            raise TensortapError(
                "images are drawn by a browser, and there is none: install chromium (Debian: "
                "apt-get install chromium), or save as .html"
            ) from None
        raise TensortapError(f"the browser could not draw this: {error}") from error
    finally:
        channel.setLevel(level)
    return bytes(found)
