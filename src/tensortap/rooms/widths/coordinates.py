"""`coord_check`: measure how outputs grow with the width of a model in its first steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.core.arguments import check_count, checked
from tensortap.rooms.figures.figures.theme import COLORS, layout, text
from tensortap.values.registry import parts

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from tensortap.rooms.widths.torch import WidthTraining

OUTPUT, CHANGE = "output", "change"


class WidthSize(NamedTuple):
    """The mean magnitude of an output, or of its change since the first step."""

    module: str
    quantity: str
    step: int
    width: int
    seed: int
    size: float


class GrowthExponent(NamedTuple):
    """The power of the width with which a size grows, and its confidence interval of 95 %."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Return grows or shrinks if the whole interval is farther than 0.1 from 0, else stable."""
        if self.low > 0.1:
            return "grows"
        return "shrinks" if self.high < -0.1 else "stable"

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


class LayerGrowth(NamedTuple):
    """The exponents of one module.

    `initial` is of the output before training, `output` and `change` are of the last step. None if
    a size is 0.
    """

    module: str
    initial: GrowthExponent | None
    output: GrowthExponent | None
    change: GrowthExponent | None
    verdict: str


@dataclass(frozen=True, slots=True)
class CoordCheck:
    """Growth of every module with the width; true if all are stable.

    A module grows if its output or its change does, and shrinks if its change does: an output may
    shrink at initialization and still learn at every width.
    """

    layers: tuple[LayerGrowth, ...]
    sizes: tuple[WidthSize, ...]

    def __bool__(self) -> bool:
        return all(layer.verdict == "stable" for layer in self.layers)

    def __str__(self) -> str:
        rows = [("module", "verdict", "initial output", "output", "change")]
        for layer in self.layers:
            exponents = (layer.initial, layer.output, layer.change)
            texts = ("0" if each is None else str(each) for each in exponents)
            rows.append((layer.module, layer.verdict, *texts))  # type: ignore[arg-type]
        lengths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(n) for cell, n in zip(row, lengths, strict=True)).rstrip()
            for row in rows
        )

    def frame(self) -> pd.DataFrame:
        """Return all sizes as a frame: module, quantity, step, width, seed, size."""
        from tensortap.table.kinds import need_pandas

        return need_pandas("CoordCheck.frame()").DataFrame(list(self.sizes))

    def figure(self, *, step: int | None = None, theme: str = "light") -> go.Figure:
        """Return the sizes of every module over the width, of the last or another step."""
        from tensortap.rooms.figures.plots import plotly_figure

        step = max(row.step for row in self.sizes) if step is None else step
        found: dict[tuple[str, str], dict[int, list[float]]] = {}  # sizes of all seeds by width
        for row in self.sizes:
            if row.step == step:
                line = found.setdefault((row.module, row.quantity), {})
                line.setdefault(row.width, []).append(row.size)
        if not found:
            raise ValueError(f"step must be one of the recorded steps, got {step}")
        colors = COLORS.lines
        modules = list(dict.fromkeys(module for module, _ in found))
        data = [
            {
                "type": "scatter", "mode": "lines+markers", "name": text(f"{module} ({quantity})"),
                "x": list(line), "y": [float(np.mean(values)) for values in line.values()],
                "line": {"color": colors[modules.index(module) % len(colors)],
                         "dash": "solid" if quantity == OUTPUT else "dot"},
            }
            for (module, quantity), line in found.items()
        ]  # fmt: skip
        ticks = sorted({row.width for row in self.sizes})
        made = layout(
            height=420,
            xaxis={"type": "log", "title": f"width (step {step})", "tickvals": ticks},
            yaxis={"type": "log", "title": "mean |x|", "exponentformat": "power"},
            showlegend=True,
            legend={"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top"},
        )
        return plotly_figure({"data": data, "layout": made}, theme)


@checked
def coord_check(
    make_model: Callable[[int], Any],
    *,
    widths: Sequence[int],
    data: Any,
    steps: int = 5,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Any = None,
    seeds: int = 3,
) -> CoordCheck:
    """Train a model in several widths, and say which outputs grow or shrink with the width.

    ``make_model(width)`` returns a torch module, or a pair of module and optimizer. `data` is one
    batch ``(inputs, targets)``, or a loader of them, whose first batch is used in every step.
    `loss` is a function of outputs and targets, by default cross-entropy for integer targets,
    otherwise the mean squared error. `optimizer` is a function of the model, by default Adam with a
    learning rate of 0.001. Everything is repeated with `seeds` random seeds. An exponent within
    0.1 of 0 is stable.
    """
    check_count("steps", steps, 2)
    check_count("seeds", seeds)
    wanted = sorted(set(widths))
    if len(wanted) < 2 or wanted[0] < 1:
        raise ValueError(f"widths must be at least two positive numbers, got {list(widths)}")
    sizes: list[WidthSize] = []
    torch = next(parts("tensortap.rooms.widths"), None)
    if torch is None:
        raise TypeError("make_model must return a torch module, and torch is not imported")
    with torch.own_random_state() as set_seed:
        batch = _first_batch(data)
        for seed in range(seeds):
            set_seed(seed)
            for width in wanted:
                training = torch.WidthTraining(make_model(width), batch, loss, optimizer)
                sizes += _train(training, width, seed, steps)
    return CoordCheck(tuple(_growths(sizes, steps - 1)), tuple(sizes))


def _first_batch(data: Any) -> tuple[Any, Any]:
    batch = data if isinstance(data, (tuple, list)) else next(iter(data))
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(f"data must be (inputs, targets), or a loader of them; got {batch!r:.80}")
    return batch[0], batch[1]


def _train(training: WidthTraining, width: int, seed: int, steps: int) -> list[WidthSize]:
    found: list[WidthSize] = []
    first: dict[str, Any] = {}
    for step in range(steps):
        outputs = training.step()
        first = first or outputs
        for name, output in outputs.items():
            found.append(WidthSize(name, OUTPUT, step, width, seed, float(np.abs(output).mean())))
            if step and name in first:
                change = float(np.abs(output - first[name]).mean())
                found.append(WidthSize(name, CHANGE, step, width, seed, change))
    return found


def _growths(sizes: Iterable[WidthSize], last: int) -> Iterable[LayerGrowth]:
    points: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for row in sizes:
        points.setdefault((row.module, row.quantity, row.step), []).append((row.width, row.size))
    for module in dict.fromkeys(module for module, _, _ in points):
        initial, output, change = (
            growth_exponent(points.get((module, quantity, step), ()))
            for quantity, step in ((OUTPUT, 0), (OUTPUT, last), (CHANGE, last))
        )
        found = [each.verdict for each in (output, change) if each is not None]
        verdict = "stable"
        if "grows" in found:
            verdict = "grows"
        elif change is not None and change.verdict == "shrinks":
            verdict = "shrinks"
        yield LayerGrowth(module, initial, output, change, verdict)


def growth_exponent(points: Iterable[tuple[int, float]]) -> GrowthExponent | None:
    """Fit ``size = c * width**exponent``; None if a size is 0 or not finite.

    >>> growth_exponent([(2, 3.0), (4, 6.0), (8, 12.0), (8, 12.0)]).value
    1.0
    """
    x, y = (np.array(each, np.float64) for each in zip(*points, strict=True))
    if not (np.isfinite(y).all() and (y > 0).all()):
        return None
    x, y = np.log2(x), np.log2(y)
    spread = ((x - x.mean()) ** 2).sum()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    free = len(x) - 2
    if free < 1:
        return GrowthExponent(slope, -math.inf, math.inf)
    rest = y - y.mean() - slope * (x - x.mean())
    error = _student_quantile(free) * math.sqrt(float((rest**2).sum()) / free / spread)
    return GrowthExponent(slope, slope - error, slope + error)


def _student_quantile(free: int) -> float:
    """Return the 97.5 % quantile of Student's distribution, to 1 % from 3 degrees of freedom on."""
    z = statistics.NormalDist().inv_cdf(0.975)
    powers = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96,
              (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)  # fmt: skip
    return z + math.fsum(each / free ** (i + 1) for i, each in enumerate(powers))
