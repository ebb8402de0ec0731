"""From values to colours: the range and the colour map of a film, and the pixels of its cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensortap.films.scales import Follower, Range, range_of
from tensortap.films.style import Style
from tensortap.record import Summary
from tensortap.viz.colors import (
    DIVERGING,
    NAN,
    NEGINF,
    POSINF,
    SEQUENTIAL,
    STEPS,
    color_table,
    pixel_table,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Shades:
    """The colours of a film, frame by frame.

    From the first frame on in which both signs occur, the range is symmetric and the map
    diverging, unless the style says otherwise.
    """

    def __init__(self, style: Style) -> None:
        self._style = style
        self._follower = Follower(style.range)
        self.symmetric = bool(style.symmetric)
        if style.symmetric is None and not isinstance(style.range, str):
            self.symmetric = style.range[0] == -style.range[1]
        self.limits: Range = (0.0, 1.0)
        self._load()

    def _load(self) -> None:
        chosen = self._style.colormap
        if isinstance(chosen, str) and chosen == "auto":
            chosen = DIVERGING if self.symmetric else SEQUENTIAL
        self.table = color_table(chosen)
        self.pixels = pixel_table(self.table)

    def see(self, summary: Summary | None) -> Range:
        """Take in what the next frame holds; the range in which it is drawn."""
        low, high = range_of(summary)
        free = self._style.symmetric is None and isinstance(self._style.range, str)
        if free and not self.symmetric and low < 0 < high:
            self.symmetric = True
            self._follower = Follower(self._style.range)
            self._load()
        self.limits = self._follower.next(low, high, symmetric=self.symmetric)
        return self.limits

    @property
    def middle(self) -> float:
        """Of the range: what is far from it must not get lost in a smaller picture."""
        low, high = self.limits
        return low / 2 + high / 2


def indices(values: NDArray[Any], limits: Range, finite: bool) -> NDArray[np.uint8]:
    """The colour of each value; `finite` says that all are, which saves looking.

    >>> import numpy as np
    >>> indices(np.array([0.0, 1.0, 5.0, np.nan, np.inf, -np.inf]), (0.0, 1.0), False).tolist()
    [0, 252, 252, 253, 254, 255]
    """
    import numpy as np

    with np.errstate(all="ignore"):
        share = shares_of(values, limits)
        share *= STEPS - 1
        share += 0.5
        if finite:
            return share.astype(np.uint8)
        share[np.isnan(values)] = NAN + 0.5
        share[values == np.inf] = POSINF + 0.5
        share[values == -np.inf] = NEGINF + 0.5
        return share.astype(np.uint8)


def shares_of(values: NDArray[Any], limits: Range) -> NDArray[Any]:
    """How far through a range values are, cut to 0 and 1; a new array."""
    import numpy as np

    low, high = limits
    if values.dtype == np.float32 and not (
        max(abs(low), abs(high)) < 1e38 and high - low > max(abs(low), abs(high)) * 1e-4
        and high - low > 1e-36
    ):  # fmt: skip
        values = values.astype(np.float64)
    if max(abs(low), abs(high)) > 1e300:  # differences may be larger than float64 holds
        values, low, high = values / 4, low / 4, high / 4
    with np.errstate(over="ignore", invalid="ignore"):
        share = values - low
        share *= 1 / (high - low) if high - low > 1e-300 else 0.0
    return np.clip(share, 0, 1, out=share)
