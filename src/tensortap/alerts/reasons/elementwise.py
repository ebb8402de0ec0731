"""Reasons in operations on single elements."""

from __future__ import annotations

import math

import numpy as np

from tensortap.alerts.reasons.operands import (
    Operands,
    elements,
    limit,
    negatives,
    peak,
    reason_for,
    value_range,
)

# -- elementwise --------------------------------------------------------------------------------


@reason_for("div", "true_divide", "divide", "addcdiv")
def _division(x: Operands) -> str | None:
    above, below = x.first, x.second
    if x.name == "addcdiv":
        above, below = x.arrays.get("tensor1"), x.arrays.get("tensor2")
    if below is None:
        return None
    zeros = int((below == 0).sum())
    if zeros:
        whole = (
            "the denominator is 0" if below.ndim == 0 else f"{elements(zeros, 'the denominator')} 0"
        )
        undefined = above is not None and bool(((above == 0) & (below == 0)).any())
        return f"0/0: {whole}" if undefined else f"division by 0: {whole}"
    if above is not None and (both := np.isinf(above) & np.isinf(below)).any():
        return f"inf/inf: {elements(both.sum(), 'both sides')} infinite"
    made = x.outputs and (np.isinf(x.outputs[0]) & np.isfinite(below)).any()
    if made and above is not None and np.isfinite(above).all():
        least = np.abs(below).min()
        return (
            f"division overflows {x.dtype}: {peak(above):.4g} divided by numbers as small as "
            f"{least:.4g} exceeds {limit(x)}"
        )
    return None


@reason_for("exp", "expm1", "exp2", "sinh", "cosh")
def _exponential(x: Operands) -> str | None:
    if x.first is None or not np.isfinite(x.first).all():
        return None
    above = math.log2(x.largest) if x.name == "exp2" else math.log(x.largest)
    if x.name in ("sinh", "cosh"):
        above += math.log(2)
    largest = peak(x.first) if x.name in ("sinh", "cosh") else float(x.first.max())
    return f"{x.name} overflows {x.dtype} above {above:.2f}: largest input {largest:.4g}"


@reason_for("log", "log2", "log10", "log1p")
def _logarithm(x: Operands) -> str | None:
    if x.first is None:
        return None
    shifted, edge = (x.first + 1, "-1") if x.name == "log1p" else (x.first, "0")
    if negative := int((shifted < 0).sum()):
        below = "negative" if edge == "0" else "below -1"
        if edge == "0":
            return f"{x.name} of {negatives(negative, below)}"
        return f"{x.name} below -1: {elements(negative)} below -1"
    if zeros := int((shifted == 0).sum()):
        return f"{x.name} of {edge}: {elements(zeros)} {edge}"
    return None


@reason_for("sqrt", "rsqrt", "reciprocal")
def _root(x: Operands) -> str | None:
    if x.first is None:
        return None
    if x.name != "reciprocal" and (negative := int((x.first < 0).sum())):
        return f"{x.name} of {negatives(negative, 'negative')}"
    if x.name != "sqrt" and (zeros := int((x.first == 0).sum())):
        return f"{x.name} of 0: {elements(zeros)} 0"
    return None


@reason_for("pow", "integer_pow", "square")
def _power(x: Operands) -> str | None:
    base, exponent = x.first, x.second
    if "y" in x.scalars:  # of JAX
        exponent = np.array(float(x.scalars["y"]))
    if x.name == "square":
        exponent = np.array(2.0)
    if isinstance(x.scalars.get("self"), (int, float)):  # a number to the power of a tensor
        base, exponent = np.array(float(x.scalars["self"])), x.first
    if base is None or exponent is None:
        return None
    fraction = (base < 0) & (exponent != np.round(exponent)) & np.isfinite(base)
    if fraction.any():
        return f"{negatives(fraction.sum(), 'negative')} to a power that is not whole"
    if (zero := (base == 0) & (exponent < 0)).any():
        return f"0 to a negative power: {elements(zero.sum())} 0"
    if np.isfinite(base).all() and np.isfinite(exponent).all():
        return (
            f"power overflows {x.dtype}: {peak(base):.4g} to the power of {exponent.max():.4g} "
            f"exceeds {limit(x)}"
        )
    return None


_DOMAINS = {
    "acos": (-1, 1), "asin": (-1, 1), "atanh": (-1, 1), "acosh": (1, math.inf), "logit": (0, 1),
    "erfinv": (-1, 1), "erf_inv": (-1, 1),
}  # fmt: skip


@reason_for(*_DOMAINS)
def _domain(x: Operands) -> str | None:
    if x.first is None:
        return None
    low, high = _DOMAINS[x.name]
    span = f"[{low}, {high}]" if high < math.inf else f"[{low}, inf)"
    if outside := int(((x.first < low) | (x.first > high)).sum()):
        return f"{x.name} outside {span}: {elements(outside)} outside, {value_range(x.first)}"
    if edges := int(((x.first == low) | (x.first == high)).sum()):
        return f"{x.name} is infinite at {low} and {high}: {elements(edges)} there"
    return None


@reason_for("mul", "multiply", "addcmul")
def _product(x: Operands) -> str | None:
    one, other = x.first, x.second
    if x.name == "addcmul":
        one, other = x.arrays.get("tensor1"), x.arrays.get("tensor2")
    if one is None or other is None or np.isnan(one).any() or np.isnan(other).any():
        return None
    mixed = (np.isinf(one) & (other == 0)) | (np.isinf(other) & (one == 0))
    if mixed.any():
        return f"inf * 0: {elements(mixed.sum())} infinite on one side and 0 on the other"
    if np.isfinite(one).all() and np.isfinite(other).all():
        return f"product overflows {x.dtype}: {peak(one):.4g} times {peak(other):.4g}, {limit(x)}"
    return None


@reason_for("add", "sub", "subtract", "rsub", "add_any", "lerp")
def _difference(x: Operands) -> str | None:
    one, other = x.first, x.second
    if one is None or other is None or np.isnan(one).any() or np.isnan(other).any():
        return None
    alpha = x.scalars.get("alpha", 1)
    if isinstance(alpha, (int, float)):
        other = other * alpha
    if x.name in ("sub", "subtract", "rsub"):
        other = -other
    if (both := np.isinf(one) & np.isinf(other) & (np.sign(one) != np.sign(other))).any():
        return f"inf minus inf: {elements(both.sum(), 'both sides')} infinite"
    if np.isfinite(one).all() and np.isfinite(other).all():
        word = "sum" if x.name in ("add", "add_any", "lerp") else "difference"
        return f"{word} overflows {x.dtype}: {peak(one):.4g} and {peak(other):.4g}, {limit(x)}"
    return None


@reason_for("to_copy", "copy", "convert_element_type", "to")
def _cast(x: Operands) -> str | None:
    source = list(x.arrays.values())[-1] if x.arrays else None  # copy_ reads the target first
    if source is None or not np.isfinite(x.largest):
        return None
    beyond = np.isfinite(source) & (np.abs(source) > x.largest)
    if not beyond.any():
        return None
    count = int(beyond.sum())
    values = "1 value exceeds" if count == 1 else f"{count:,} values exceed"
    return (
        f"cast overflows {x.dtype}: {values} {x.largest:,.6g}, the largest is {peak(source):,.6g}"
    )
