"""Reference figures in exact arithmetic, one pair at a time."""

from __future__ import annotations

import decimal
import math
from fractions import Fraction
from types import SimpleNamespace

import ml_dtypes
import numpy as np

FLOATS = (
    "float16 float32 float64 bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float6_e2m3fn float6_e3m2fn "
    "float4_e2m1fn"
).split()
INTS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 int4 uint2".split()


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def is_int(dtype):
    return dtype.name in INTS


def numbers(array):
    """Elements as int or float of Python's, exactly."""
    one = int if is_int(array.dtype) else float
    return [one(x) for x in array.ravel()]


def root(x: Fraction) -> decimal.Decimal:
    with decimal.localcontext() as context:
        context.prec = 60
        context.Emax, context.Emin = decimal.MAX_EMAX, decimal.MIN_EMIN
        return (decimal.Decimal(x.numerator) / decimal.Decimal(x.denominator)).sqrt()


def ratio(x: Fraction, of: Fraction) -> float:
    """sqrt(x) / sqrt(of)."""
    with decimal.localcontext() as context:
        context.prec = 60
        context.Emax, context.Emin = decimal.MAX_EMAX, decimal.MIN_EMIN
        return float(root(x) / root(of))


def to_float(x: Fraction) -> float:
    try:
        return float(x)
    except OverflowError:
        return math.inf


def compare(a, b, *, atol, rtol, equal_nan=True):
    found = SimpleNamespace(pairs=a.size, finite=0, nonfinite=0, first_nonfinite=-1, mismatches=0)
    ds, rels, excess, factors, aa, bb, ab, dd = [], [], [], [0.0], 0, 0, 0, 0
    for i, (x, y) in enumerate(zip(numbers(a), numbers(b), strict=True)):
        if not (math.isfinite(x) and math.isfinite(y)):
            both_nan = x != x and y != y
            if not ((both_nan and equal_nan) or x == y):
                found.nonfinite += 1
                found.mismatches += 1
                if found.first_nonfinite < 0:
                    found.first_nonfinite = i
            continue
        found.finite += 1
        p, q = Fraction(x), Fraction(y)
        d = to_float(abs(p - q))
        size = abs(float(y))
        found.mismatches += d > atol + rtol * size
        ds.append(d)
        rels.append(0.0 if not d else d / size if size else math.inf)
        excess.append((d - rtol * size if d else -math.inf, -i))
        if d > atol:
            factors.append((d - atol) / size if size else math.inf)
        aa, bb, ab, dd = aa + p * p, bb + q * q, ab + p * q, dd + (p - q) ** 2
    found.max_abs = max(ds, default=0.0)
    found.mean_abs = math.fsum(ds) / len(ds) if ds and found.max_abs < 1e300 else found.max_abs
    found.max_rel = max(rels, default=0.0)
    finite = [r for r in rels if r < 1e300]
    found.mean_rel = math.fsum(rels) / len(rels) if len(finite) == len(rels) and rels else None
    best = max(excess, default=(0.0, 1))
    found.worst = -best[1] if found.max_abs else -1
    found.excess = best[0]
    found.factor = max(factors)
    if aa and bb:
        with decimal.localcontext() as context:
            context.prec = 60
            context.Emax, context.Emin = decimal.MAX_EMAX, decimal.MIN_EMIN
            dot = decimal.Decimal(Fraction(ab).numerator) / decimal.Decimal(
                Fraction(ab).denominator
            )
            found.cosine = float(dot / (root(Fraction(aa)) * root(Fraction(bb))))
    else:
        found.cosine = 1.0 if aa == bb else 0.0
    found.rel_l2 = 0.0 if not dd else ratio(Fraction(dd), Fraction(bb)) if bb else math.inf
    return found
