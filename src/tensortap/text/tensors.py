"""A tensor in one line of plain text: shape, dtype, range with a sketch, and what is wrong.

For example ``[3, 196, 196] bf16 x∈[-2.1 ▁▂▅█▇▂▁ 2.6] μ=0.01 σ=0.5 NaN 12!``
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from tensortap.core.record import Summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"
_GAP = "·"  # an interval without a value; a space would be swallowed by HTML
_SAMPLE = 1 << 16
_LONGEST = 60  # characters of a string that are shown
_EXACT = 1 << 53  # a float64 tells integers apart up to here

_FLOAT = re.compile(r"b?(?:float|complex)(\d+)(?:_(\w+))?")
_INTEGER = re.compile(r"(u?)int(\d+)")
_CODE = re.compile(r"([<>])([iufc])(\d+)")  # what only NumPy has: other byte orders, longdouble
# "fn" (no Inf) goes without saying; the one dtype that has Inf must not look the same
_IEEE = {"float8_e4m3": "f8e4m3ieee"}


def short_dtype(name: str) -> str:
    """Return the short name of a dtype; an unknown name as it is."""
    if name in _IEEE:
        return _IEEE[name]
    if match := _CODE.fullmatch(name):
        return f"{match[1].strip('<')}{match[2]}{8 * int(match[3])}"
    if match := _INTEGER.fullmatch(name):
        return f"{'u' if match[1] else 'i'}{match[2]}"
    if match := _FLOAT.fullmatch(name):
        letters = ("b" if name[0] == "b" else "") + ("c" if "complex" in name else "f")
        return letters + match[1] + re.sub(r"(\d)fnu?$", r"\1", match[2] or "")
    return name


def number(x: float, digits: int = 3) -> str:
    """Format a number with three significant digits, in scientific notation if huge or tiny."""
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "Inf" if x > 0 else "-Inf"
    if x == 0:
        return "0"
    rounded = f"{x:.{digits - 1}e}"
    power = int(rounded.partition("e")[2])
    if -4 < power < max(5, digits):
        text = f"{x:.{max(digits - 1 - power, 0)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return _scientific(rounded)


def short(value: object) -> str:
    """Describe a plain Python value in a few words; anything else by its type."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        # not in full: Python does not print an int of more than 4300 digits
        return str(value) if abs(value) < 1 << 64 else f"int of {value.bit_length()} bits"
    if isinstance(value, float):
        return number(value, 6)
    if isinstance(value, complex):
        imag = number(value.imag, 6)
        return f"{number(value.real, 6)}{imag if imag.startswith('-') else '+' + imag}j"
    if isinstance(value, (str, bytes)):
        kept = value[:_LONGEST]
        return repr(kept) if len(kept) == len(value) else f"{kept!r}… ({len(value)})"
    return f"<{type(value).__name__}>"


def _scientific(text: str) -> str:
    """Return ``1.50e-07`` as ``1.5e-7``."""
    mantissa, exponent = text.split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def sketch(array: NDArray[Any], summary: Summary, width: int = 8) -> str:
    """Draw a histogram between minimum and maximum, one block character per interval.

    Only a sketch: of a large array it looks at an evenly spaced sample of at most 65,536
    values, always the same ones. `·` stands for an interval where none was seen.
    """
    import numpy as np

    from tensortap.stats.conversion import as_real

    low, high = summary.min, summary.max
    if not summary.finite or low == high or array.dtype == np.bool_ or not math.isfinite(high):
        return ""
    if _is_integer(array.dtype.name) and high - low < 8 * width:
        # as many integers in each interval, or the sketch shows a comb that is not there
        each = -(-int(high - low + 1) // width)
        width = -(-int(high - low + 1) // each)
        high = low + each * width
    sample = _sample(array)
    # in a unit near the largest: the range of float64 itself is wider than float64
    unit = -math.frexp(summary.max_abs)[1] - 1
    with np.errstate(all="ignore"):
        x = as_real(sample)
        x = np.ldexp(x[np.isfinite(x)], unit)
        first, last = math.ldexp(low, unit), math.ldexp(high, unit)
        where = ((x - first) * (width / (last - first))).clip(0, width - 1).astype(np.int64)
    counts = np.bincount(where, minlength=width)
    counts[[0, -1]] = counts[[0, -1]].clip(1)  # minimum and maximum exist, sampled or not
    return bars(counts.tolist())


def bars(counts: Sequence[int]) -> str:
    """Draw counts, one block character each; `·` stands for 0.

    >>> bars([1, 0, 8])
    '▁·█'
    """
    levels = [-(-count * len(_BLOCKS) // max(counts)) if count else 0 for count in counts]
    return "".join(_BLOCKS[level - 1] if level else _GAP for level in levels)


def sparkline(numbers: Sequence[float]) -> str:
    """Numbers in the order of time, a block character each; `!` is one that is not finite.

    >>> sparkline([3.0, 2.0, 1.0, float("nan"), 0.0]), sparkline([5.0, 5.0]), sparkline([])
    ('█▆▃!▁', '▄▄', '')
    """
    finite = [x for x in numbers if math.isfinite(x)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    # halves: the range of float64 itself is wider than float64
    span = high / 2 - low / 2
    top = len(_BLOCKS) - 1
    return "".join(
        "!"
        if not math.isfinite(x)
        else _BLOCKS[round((x / 2 - low / 2) / span * top) if span else top // 2]
        for x in numbers
    )


def _sample(array: NDArray[Any]) -> NDArray[Any]:
    native = array.dtype.newbyteorder("=")
    step = -(-array.size // _SAMPLE)
    if step == 1:
        return array.ravel().astype(native, copy=False)
    # a step that divides the length of a row would see a few columns only
    while any(math.gcd(step, n) > 1 for n in array.shape):
        step += 1
    return array.flat[::step].astype(native, copy=False)


def _is_integer(dtype: str) -> bool:
    return re.fullmatch(r">?[iu]\d+", short_dtype(dtype)) is not None


def line(summary: Summary, dtype: str, shape: tuple[int, ...], sketch: str = "") -> str:
    """Return the line for a tensor with a known summary."""
    words = [f"[{', '.join(map(str, shape))}]"] if shape else []
    words += [short_dtype(dtype), _body(summary, dtype, sketch)]
    counts = (("NaN", summary.nans), ("+Inf", summary.posinfs), ("-Inf", summary.neginfs))
    wrong = [(name, n) for name, n in counts if n]
    if summary.count == 1:
        words += [f"{name}!" for name, _ in wrong]
    elif len(wrong) == 1 and wrong[0][1] == summary.count:
        words += [f"all {wrong[0][0]} {summary.count}!"]
    else:
        words += [f"{name} {n}!" for name, n in wrong]
    return " ".join(filter(None, words))


def _body(s: Summary, dtype: str, sketch: str) -> str:
    """Describe the finite values."""
    if not s.count:
        return "empty"
    if not s.finite:
        return ""
    if dtype == "bool":
        return _truth(s)
    name = "|z|" if re.fullmatch(r">?b?c\d+", short_dtype(dtype)) else "x"
    if s.count == 1:
        value = _figure(s.min, dtype, 6)
        return value if name == "x" else f"{name}={value}"
    if s.zeros == s.count:
        return "all zeros"
    if s.min == s.max:
        value = _figure(s.min, dtype, 6)
        return f"all {value}" if name == "x" and s.finite == s.count else f"{name}={value}"
    middle = f" {sketch} " if sketch else " "
    low, high = _figure(s.min, dtype), _figure(s.max, dtype)
    return f"{name}∈[{low}{middle}{high}] μ={number(s.mean)} σ={number(s.std)}"


def _truth(s: Summary) -> str:
    true = s.count - s.zeros
    if s.count == 1:
        return str(bool(true))
    if not true or not s.zeros:
        return f"all {bool(true)}"
    percent = 100 * true / s.count
    # rounding must not make "all" of "nearly all"
    return f"{'>99.9' if percent > 99.9 else number(percent)}% True"


def _figure(x: float, dtype: str, digits: int = 3) -> str:
    """Format one value; short integers in full."""
    if _is_integer(dtype) and abs(x) < (_EXACT if digits > 3 else 1e7):
        return str(int(x))
    return number(x, digits)


def describe_array(
    array: NDArray[Any], dtype_name: str | None = None, shape: tuple[int, ...] | None = None
) -> str:
    """Return the line for an array; dtype and shape may be those of the original tensor."""
    from tensortap.stats import summarize_array

    dtype = dtype_name or array.dtype.name
    shape = array.shape if shape is None else shape
    try:
        summary = summarize_array(array)
    except TypeError:  # dates, strings, objects: shape and dtype are still worth a line
        return f"[{', '.join(map(str, shape))}] {dtype}" if shape else dtype
    return line(summary, dtype, shape, sketch(array, summary))


def styled(line: str) -> Text:
    """Return the line with colors for a terminal; non-finite values are red."""
    from rich.text import Text

    text = Text(line)
    shape = re.match(r"\[[\d, ]*\]", line)
    start = shape.end() if shape else 0
    if shape:
        text.stylize("dim", 0, start)
    if dtype := re.compile(r"\s*(\S+)").match(line, start):
        text.stylize("cyan", *dtype.span(1))
    text.highlight_regex(r"(?<=∈)\[[^\]]*\]", "green")
    text.highlight_regex(rf"[{_BLOCKS}{_GAP}]+", "blue")
    text.highlight_regex(r"(?:all )?(?:NaN|[+-]Inf)(?: \d+)?!", "bold red")
    return text


class FittedTable:
    """A rich table that is built when it is printed, for the width of the console.

    >>> from rich.console import Console
    >>> from rich.table import Table
    >>> Console(width=40).print(FittedTable(lambda width: Table(f"{width} wide", box=None)))
    40 wide
    """

    def __init__(self, build: Callable[[int], Table]) -> None:
        self.build = build

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield self.build(options.max_width)
