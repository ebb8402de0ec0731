"""What stands around a picture: the heading, the figures below, axes and the colour bar."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tensortap.films.canvas import Canvas, badge_width, fitted, moving_width, text_width
from tensortap.films.look import Look
from tensortap.films.scales import Range, ticks, whole_ticks
from tensortap.films.style import Box, Measures, Style
from tensortap.record import Kind, Summary
from tensortap.text.tensors import number
from tensortap.viz.colors import NAN_COLOR, NEGINF_COLOR, POSINF_COLOR, STEPS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def heading(
    canvas: Canvas, style: Style, at: Measures, look: Look, note: str, aside: str = ""
) -> None:
    """Name, kind, shape, dtype, rank and device, the note of the picture and the message."""
    if not at.header:
        return
    colors = style.colors
    room = canvas.width - 2 * at.margin
    y = at.margin * 0.8 + at.title * 0.65
    step_room = _step_width(at.title) + at.margin
    canvas.text(at.margin, y, fitted(look.name, at.title, room - step_room), at.title, colors.ink)
    y += at.title * 0.65 + at.text * 0.8
    words, message = second_line(look, note, aside, at.text, room, at.margin)
    if message:
        canvas.text(canvas.width - at.margin, y, message, at.text, colors.accent, "right")
    canvas.text(at.margin, y, words, at.text, colors.dim)


def second_line(
    look: Look, note: str, aside: str, size: int, room: float, gap: float
) -> tuple[str, str]:
    """What is known about the tensor, and the message; what matters least gives way first."""
    message = fitted(look.message, size, room) if look.message else ""
    asked = text_width(message, size) + gap if message else 0.0
    words = ""
    for level in range(_LEVELS):
        words = " · ".join(facts(look, note, aside, level))
        if text_width(words, size) + min(asked, room * _MESSAGE) <= room:
            break
    else:
        words = fitted(words, size, room - min(asked, room * _MESSAGE_AT_LEAST))
    left = room - text_width(words, size) - gap
    return words, fitted(message, size, left) if message else ""


_MESSAGE, _MESSAGE_AT_LEAST = 0.45, 0.2  # of a line is the message's, if it is so long
_LEVELS = 7


def facts(look: Look, note: str = "", aside: str = "", level: int = 0) -> list[str]:
    """Kind, shape and dtype, rank and device, and the notes; fewer from level to level.

    The shape and what is not shown as it is are said at every level.
    """
    words = []
    asides = aside.split(" · ")[: 0 if level > 4 else -1 if level else None]
    if look.kind is not Kind.VALUE and level < 4:
        words.append(look.kind.value.replace("_", " ").lower())
    shape = f"[{', '.join(map(str, look.shape))}]" if look.shape else ""
    dtype = look.dtype if level < 6 or not shape else ""
    words.append(" ".join(filter(None, (shape, dtype))))
    if (look.world_size > 1 or look.rank) and level < 3:
        words.append(f"rank {look.rank} of {max(look.world_size, look.rank + 1)}")
    if level < 2:
        words.append(look.device)
    return [word for word in (*words, note, *asides) if word]


@functools.cache
def _step_width(size: int) -> int:
    return text_width("step 0,000,000", size)


def figures(canvas: Canvas, style: Style, at: Measures, look: Look) -> None:
    """The step, what the finite values are, and how many are not finite."""
    if not at.header:
        return
    colors = style.colors
    y = at.margin * 0.8 + at.title * 0.65
    right = canvas.width - at.margin
    width = canvas.text(right, y, f"{look.step:,}", at.title, colors.ink, "right", moving=True)
    canvas.text(right - width - at.title * 0.35, y, "step", at.text, colors.dim, "right")
    y = canvas.height - at.footer / 2 - at.margin * 0.1
    if look.summary is None:
        return
    x = float(right)
    for words, color in _badges(look.summary, at, right - at.margin):
        x -= canvas.badge(x, y, words, at.text, color) + at.text * 0.5
    left = float(at.margin)
    shown, each = _arranged(_numbers(look.summary), at, x - left)
    for label, value in shown:
        begin = left
        if label:
            left += canvas.text(left, y, label, at.text, colors.dim) + at.text * 0.45
        if value:
            left += canvas.text(left, y, value, at.text, colors.ink, moving=True)
        left = max(left + at.text * 0.8, begin + each)


Figures = list[tuple[str, str]]


def _numbers(summary: Summary) -> list[Figures]:
    """What is said of the values, from much to little."""
    if not summary.count:
        return [[("empty", "")]]
    if not summary.finite:
        return [[("nothing is finite", "")], [("none finite", "")]]
    if summary.count == 1:
        return [[("value", number(summary.min, 6))], [("", number(summary.min))]]
    names = ("min", "max", "mean", "std")
    low, high, mean, std = [(name, number(getattr(summary, name))) for name in names]
    ends = ("", f"{low[1]} … {high[1]}")
    return [[low, high, mean, std], [low, high, mean], [ends, mean], [ends], []]


def _arranged(choices: list[Figures], at: Measures, room: float) -> tuple[Figures, float]:
    """The first that has room, and how wide a column is: numbers shall not dance about."""
    steady = text_width("-0.00000", at.text)
    for number_of, shown in enumerate(choices):
        widths = [
            (text_width(label, at.text) + at.text * 0.45 if label else 0.0)
            + (max(moving_width(value, at.text), steady) if value else 0.0)
            + at.text * 0.8
            for label, value in shown
        ]
        if number_of == 0 and max(at.text * 9.4, *widths, 0.0) * len(shown) <= room:
            return shown, at.text * 9.4
        if sum(widths) <= room:
            return shown, 0.0
    return [], 0.0


def _badges(summary: Summary, at: Measures, room: float) -> list[tuple[str, tuple[int, int, int]]]:
    """How many are not finite; the counts are shortened where they have no room."""
    counts = (
        ("-Inf", summary.neginfs, NEGINF_COLOR),
        ("+Inf", summary.posinfs, POSINF_COLOR),
        ("NaN", summary.nans, NAN_COLOR),
    )
    said = [(f"{name} {n:,}", color) for name, n, color in counts if n]
    if sum(badge_width(words, at.text) + at.text * 0.5 for words, _ in said) > room:
        said = [(f"{name} {_short(n)}", color) for name, n, color in counts if n]
    return said


def _short(count: int) -> str:
    """
    >>> _short(999), _short(1_234), _short(56_789_000)
    ('999', '1k', '56M')
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count // size}{unit}"
    return str(count)


def bar_width(at: Measures) -> int:
    """What a colour bar takes, its numbers included."""
    return round(at.small * 5.6) if at.header else 0


def color_bar(canvas: Canvas, at: Measures, box: Box, pixels: NDArray[np.uint32]) -> Box:
    """The bar along the right edge of a box, largest value on top; where it is."""
    import numpy as np

    width = round(at.small * 1.1)
    left = box.right - bar_width(at) + round(at.small * 1.3)
    bar = Box(left, box.top, left + width, box.bottom)
    steps = np.linspace(STEPS - 1, 0, bar.height).round().astype(np.int64)
    canvas.pixels[bar.top : bar.bottom, bar.left : bar.right] = pixels[steps][:, None]
    return bar


def bar_ticks(canvas: Canvas, style: Style, at: Measures, bar: Box, limits: Range) -> None:
    """The numbers beside a colour bar."""
    most = max(2, bar.height // (at.small * 3))
    beside_bar(canvas, style, at, bar, limits, ticks(*limits, most))


def beside_bar(
    canvas: Canvas,
    style: Style,
    at: Measures,
    bar: Box,
    limits: Range,
    found: list[tuple[float, str]],
) -> None:
    """Words beside a colour bar, each at its value."""
    colors = style.colors
    low, high = limits
    for value, words in found:
        y = bar.bottom - 1 - (value - low) / (high - low) * (bar.height - 1)
        canvas.fill(bar.right, round(y), bar.right + 3, round(y) + 1, colors.dim)
        canvas.text(bar.right + 6, y, words, at.small, colors.dim, moving=True)


def cell_axes(canvas: Canvas, style: Style, at: Measures, box: Box, shape: tuple[int, int]) -> None:
    """Rows and columns, counted from 0, along the left and the lower edge of a box."""
    if not at.header:
        return
    colors = style.colors
    rows, columns = shape
    for row in whole_ticks(rows, max(1, box.height // (at.small * 3))):
        y = box.top + (row + 0.5) * box.height / rows
        canvas.fill(box.left - 4, int(y), box.left - 1, int(y) + 1, colors.dim)
        canvas.text(box.left - 7, y, str(row), at.small, colors.dim, "right")
    for column in whole_ticks(columns, max(1, box.width // (at.small * 5))):
        x = box.left + (column + 0.5) * box.width / columns
        canvas.fill(int(x), box.bottom + 1, int(x) + 1, box.bottom + 4, colors.dim)
        canvas.text(
            x, box.bottom + 5 + at.small * 0.65, str(column), at.small, colors.dim, "middle"
        )


def plot_axes(
    canvas: Canvas,
    style: Style,
    at: Measures,
    box: Box,
    *,
    across: list[tuple[float, str]],
    up: list[tuple[float, str]],
    moving: bool = True,
) -> None:
    """A panel with thin lines: ticks are (share of the way, words)."""
    colors = style.colors
    canvas.fill(*box, colors.panel)
    for share, words in up:
        y = round(box.bottom - 1 - share * (box.height - 1))
        canvas.fill(box.left, y, box.right, y + 1, colors.line)
        if at.header:
            canvas.text(box.left - 6, y, words, at.small, colors.dim, "right", moving=moving)
    for share, words in across:
        x = round(box.left + share * (box.width - 1))
        canvas.fill(x, box.bottom, x + 1, box.bottom + 3, colors.dim)
        if at.header:
            y = box.bottom + 5 + round(at.small * 0.65)
            canvas.text(x, y, words, at.small, colors.dim, "middle", moving=moving)


def shares(limits: Range, found: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Ticks as shares of the way through a range."""
    low, high = limits
    return [((value - low) / (high - low), words) for value, words in found]


def words_in_the_middle(canvas: Canvas, style: Style, at: Measures, box: Box, words: str) -> None:
    """Where there is nothing to draw, why."""
    if at.header:
        x, y = (box.left + box.right) / 2, (box.top + box.bottom) / 2
        text = fitted(words, at.title, box.width)
        canvas.text(x, y, text, at.title, style.colors.dim, "middle")
