"""The statistics of a JAX array, in whatever is compiled; `track.packed` lays them out.

On a CPU they are one call of C code from within the compiled function, where the extension is
built; XLA's own operations take ten times as long there, and a second to compile for each array.
Everywhere else they are JAX operations. What must be exact is done on the bits: XLA flushes
subnormal numbers on a CPU, and a comparison would take them for zeros.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tensortap.core.record import Summary
from tensortap.rooms.track.packed import (
    HEAD,
    MOST,
    NARROW,
    WIDE,
    PendingSummary,
    layout,
    unpack,
)  # fmt: skip
from tensortap.values.jax.adapter import Deferred

log = logging.getLogger("tensortap")

_TARGET = "tensortap_pack"
_IN_C = ("float32", "bfloat16", "float16")


def summary_at(words: Deferred, start: int, dtype: str, shape: tuple[int, ...]) -> PendingSummary:
    """Return the statistics that begin at a word; none if the program took another branch."""

    def resolve() -> Summary | None:
        found = np.frombuffer(words.view, np.uint32)
        return unpack(found[start : start + layout(dtype).words], dtype, shape)

    return PendingSummary(words.ready, resolve)


@functools.cache
def _registered() -> bool:
    """Return whether XLA knows the C code; register it at the first call."""
    try:
        from tensortap.rooms.track.jax import _xla  # type: ignore[attr-defined]  # C, optional

        reason: object = "it has no jax.ffi"
        for version in range(_xla.NEWEST, _xla.OLDEST - 1, -1):
            _xla.speak(version)
            try:
                jax.ffi.register_ffi_target(_TARGET, _xla.pack, platform="cpu")
                return True
            except Exception as error:  # it takes its own version of the interface only
                reason = error
    except ImportError:
        return False
    log.warning("tensortap: JAX does not take the C statistics, those of XLA serve: %s", reason)
    return False


def native() -> bool:
    """Return whether statistics are computed in C, which needs that all devices are CPUs."""
    platforms = jax.config.jax_platforms
    return platforms in (None, "", "cpu") and jax.default_backend() == "cpu" and _registered()


def can_reduce(dtype: Any) -> bool:
    """Return whether arrays of this dtype have statistics (random keys have none)."""
    try:
        layout(np.dtype(dtype).name)
    except TypeError:
        return False
    return True


def pack(x: jax.Array) -> jax.Array:
    """Return the statistics of an array as packed words; works in any trace."""
    kind = layout(x.dtype.name)
    if not 0 < x.size <= MOST:
        if x.size:
            raise ValueError(f"an array of {x.size} elements: at most {MOST} can be counted")
        return jnp.zeros(kind.words, jnp.uint32).at[0].set(NARROW)
    if x.dtype.name in _IN_C and native():
        words = jax.ShapeDtypeStruct((kind.words,), jnp.uint32)
        call = jax.ffi.ffi_call(_TARGET, words, vmap_method="sequential")
        found: jax.Array = call(x)
        return found
    return pack_in_jax(x)


def pack_in_jax(x: jax.Array) -> jax.Array:
    """`pack` in JAX operations alone."""
    kind = layout(x.dtype.name)
    # one dimension: what follows need not know about axes
    x = jnp.ravel(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int8)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return _integers(x, kind.bins, kind.wide)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = _magnitudes(x)
    return _floats(_bits(x), kind.first, kind.bins, kind.wide)


def _bits(x: jax.Array) -> jax.Array:
    """Return the bits of real numbers as float32, or float64 for float64."""
    if x.dtype == jnp.float64:
        return lax.bitcast_convert_type(x, jnp.uint64)
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    if x.dtype.name == "float8_e8m0fnu":
        field = lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint32)
        # 2**-127 is subnormal as a float32; 255 is NaN
        return jnp.where(field == 0, 1 << 22, jnp.where(field == 255, 0x7FC00000, field << 23))
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def _magnitudes(x: jax.Array) -> jax.Array:
    """Return the magnitudes of complex numbers, clipped to the range."""
    real, imag = jnp.abs(x.real), jnp.abs(x.imag)
    large = jnp.maximum(real, imag)
    ratio = jnp.minimum(real, imag) / jnp.where(large == 0, 1, large)
    size = large * jnp.sqrt(1 + ratio * ratio)
    nonfinite = jnp.isinf(real) | jnp.isinf(imag)
    size = jnp.where(nonfinite, jnp.inf, jnp.minimum(size, jnp.finfo(size.dtype).max))
    return jnp.where(jnp.isnan(real) | jnp.isnan(imag), jnp.nan, size)


def _floats(u: jax.Array, first: int, bins: int, wide: bool) -> jax.Array:
    word, signed, number = (
        (jnp.uint64, jnp.int64, jnp.float64) if wide else (jnp.uint32, jnp.int32, jnp.float32)
    )
    mantissa, bias = (52, 1023) if wide else (23, 127)
    top = 8 * np.dtype(word).itemsize - 1
    infinity = word((2 * bias + 1) << mantissa)
    a = u & word((1 << top) - 1)
    finite = a < infinity
    negative = u >> top

    # bits of the same sign are in order as integers
    key = lax.bitcast_convert_type(jnp.where(negative == 1, ~u ^ word(1 << top), u), signed)
    limits = jnp.iinfo(signed)
    low = jnp.min(jnp.where(finite, key, limits.max))
    high = jnp.max(jnp.where(finite, key, limits.min))
    min_abs = jnp.min(jnp.where(finite, a, infinity))

    def unkey(k: jax.Array) -> jax.Array:
        back = lax.bitcast_convert_type(k, word)
        return jnp.where(k < 0, ~back ^ word(1 << top), back)

    def place(a: jax.Array) -> jax.Array:
        """Return the exponent of each number above that of the smallest subnormal."""
        field = (a >> mantissa).astype(jnp.int32)
        subnormal = top - lax.clz(a).astype(jnp.int32)
        return jnp.where(field > 0, field + (mantissa - 1), subnormal)

    smallest = 1 - bias - mantissa
    ends = jnp.stack([unkey(low), unkey(high)]) & word((1 << top) - 1)
    max_abs = jnp.max(jnp.where(ends < infinity, ends, 0))
    unit = jnp.where(max_abs == 0, 0, place(max_abs) + (smallest + 1))
    # |x| / 2**unit, put together from whole numbers: no subnormal is ever read as a number
    field = (a >> mantissa).astype(jnp.int32)
    whole = a & word((1 << mantissa) - 1) | jnp.where(field > 0, word(1 << mantissa), word(0))
    power = jnp.maximum(field, 1) + (smallest - 1) - unit
    # where the power is too small for a normal number, so is what it would add
    scale = jnp.where(power + bias > 0, power + bias, 0).astype(word) << mantissa
    y = whole.astype(signed).astype(number) * lax.bitcast_convert_type(scale, number)
    y = jnp.where(finite, jnp.where(negative == 1, -y, y), 0)
    # what is no number, and zero, are bins of their own behind those of the exponents
    nonfinite = jnp.where(a > infinity, bins + 1, bins + 2 + negative.astype(jnp.int32))
    index = jnp.where(a == 0, bins, jnp.where(finite, place(a) - (first - smallest), nonfinite))
    seen = _histogram(index, bins + 4)
    extremes = [_split(unkey(low)), _split(unkey(high)), _split(min_abs)]
    # written out once, else every sum would put it together again
    averages = _averages(lax.optimization_barrier(y), finite)
    return _assemble(wide, unit, list(seen[bins:]), extremes, averages, seen[:bins])


def _integers(x: jax.Array, bins: int, wide: bool) -> jax.Array:
    word, number = (jnp.uint64, jnp.float64) if wide else (jnp.uint32, jnp.float32)
    signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
    low, high = jnp.min(x), jnp.max(x)
    large = x.astype(jnp.int64 if wide else jnp.int32) if signed else x.astype(word)
    a = large.astype(word)
    if signed:  # as unsigned, the size of the smallest integer is right as well
        a = jnp.where(large < 0, word(0) - a, a)
    width = 8 * np.dtype(word).itemsize
    zeros = jnp.sum(a == 0, dtype=jnp.uint32)
    max_abs = jnp.max(a)
    unit = width - lax.clz(max_abs).astype(jnp.int32)
    bias, mantissa = (1023, 52) if wide else (127, 23)
    scale = lax.bitcast_convert_type((bias - unit).astype(word) << mantissa, number)
    y = a.astype(number) * scale
    place = width - 1 - lax.clz(a).astype(jnp.int32)
    exponents = _histogram(jnp.where(a == 0, bins, place), bins)
    extremes = [_whole(v, number) for v in (low, high, jnp.min(a))]
    averages = _averages(jnp.where(large < 0, -y, y) if signed else y, None)
    nothing = jnp.zeros((), jnp.uint32)
    return _assemble(wide, unit, [zeros, nothing, nothing, nothing], extremes, averages, exponents)


def _averages(y: jax.Array, finite: jax.Array | None) -> list[jax.Array]:
    """Mean, variance, mean_abs, p2, p4 and p8, each as two words."""
    size = jnp.abs(y)
    n = jnp.asarray(y.size, y.dtype)
    if finite is not None:
        n = jnp.maximum(jnp.sum(finite, dtype=jnp.uint32), 1).astype(y.dtype)
    mean = jnp.sum(y) / n
    deviation = y - mean
    if finite is not None:
        deviation = jnp.where(finite, deviation, 0)
    # what rounding left of the mean is taken out of both
    rest = jnp.sum(deviation) / n
    variance = jnp.sum(deviation * deviation) / n - rest * rest
    p2 = size * size
    p4 = p2 * p2
    figures = [jnp.sum(p) / n for p in (size, p2, p4, p4 * p4)]
    nothing = jnp.zeros((), y.dtype)
    if y.dtype == jnp.float64:
        pairs = [_split(lax.bitcast_convert_type(v, jnp.uint64)) for v in (mean + rest, variance)]
        return pairs + [_split(lax.bitcast_convert_type(v, jnp.uint64)) for v in figures]
    halves = [(mean, rest), (variance, nothing), *((v, nothing) for v in figures)]
    return [lax.bitcast_convert_type(jnp.stack(pair), jnp.uint32) for pair in halves]


def _split(bits: jax.Array) -> jax.Array:
    """Return a figure as two words, from its bits."""
    if bits.dtype == jnp.uint64:
        return lax.bitcast_convert_type(bits, jnp.uint32)
    return jnp.stack([bits, jnp.zeros((), jnp.uint32)])


def _whole(v: jax.Array, number: Any) -> jax.Array:
    """Return an integer as two words, exactly."""
    if number is jnp.float64:
        return _split(lax.bitcast_convert_type(v.astype(jnp.float64), jnp.uint64))
    v = v.astype(jnp.uint32 if v.dtype == jnp.uint32 else jnp.int32)
    rest = v & 0xFFF
    halves = jnp.stack([(v - rest).astype(jnp.float32), rest.astype(jnp.float32)])
    return lax.bitcast_convert_type(halves, jnp.uint32)


def _histogram(index: jax.Array, bins: int) -> jax.Array:
    return jnp.zeros(bins, jnp.uint32).at[index].add(1, mode="drop")


def _assemble(
    wide: bool,
    unit: jax.Array,
    counts: list[jax.Array],
    extremes: list[jax.Array],
    averages: list[jax.Array],
    exponents: jax.Array,
) -> jax.Array:
    head = [jnp.full((), WIDE if wide else NARROW, jnp.uint32), unit.astype(jnp.uint32), *counts]
    vector = jnp.concatenate([jnp.stack(head), *extremes, *averages, exponents])
    assert vector.size == HEAD + exponents.size
    return vector
