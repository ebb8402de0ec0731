"""The rules that come with tensortap, each made with thresholds of one's own.

A rule is a function ``rule(record, memory)`` that gives None, a sentence, or a `Finding`. It may
keep numbers in the `Memory`, which is its own for every tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from tensortap.alerts.alert import Finding, may_be_mask, module_of
from tensortap.errors import NotFound
from tensortap.record import Kind, Record, Summary

if TYPE_CHECKING:
    from tensortap.alerts.monitor import Memory

Rule = Callable[[Record, "Memory"], "Finding | str | None"]

_GRADIENTS = (Kind.GRADIENT, Kind.WEIGHT_GRADIENT)
_TENSORS = (Kind.ACTIVATION, *_GRADIENTS, Kind.WEIGHT, Kind.OPTIMISER_STATE)
_NUMBERS = (Kind.METRIC, Kind.VALUE)
_RATE = 0.05  # how fast what is typical follows what comes


def _named(rule: Rule, name: str, kinds: Collection[Kind]) -> Rule:
    """The rule with its name, and the kinds of records that it is asked about."""
    rule.__dict__["kinds"] = frozenset(kinds)
    rule.__name__ = name
    return rule


# -- values that are none ------------------------------------------------------------------


def nan() -> Rule:
    """A NaN: where the first one of a step is; what follows from it is not said again."""

    def rule(record: Record, memory: Memory) -> Finding | str | None:
        stats, value = record.stats, record.value
        if stats is not None:
            if not stats.nans:
                return None
            return _first(record, memory, "NaN", stats.nans)
        if type(value) is float and value != value:
            return _first(record, memory, "NaN", 1)
        return None

    return _named(rule, "nan", (*_TENSORS, *_NUMBERS, Kind.LOCAL))


def inf() -> Rule:
    """An infinity: where the first one of a step is; what follows from it is not said again.

    -Inf in an output is what masks are made of: it is said of what else is not finite after it.
    """

    def rule(record: Record, memory: Memory) -> Finding | str | None:
        stats, value = record.stats, record.value
        if stats is not None:
            if (not stats.posinfs and not stats.neginfs) or may_be_mask(record):
                return None
            return _first(record, memory, "Inf", stats.posinfs + stats.neginfs)
        if type(value) is float and math.isinf(value):
            return _first(record, memory, "Inf", 1)
        return None

    return _named(rule, "inf", (*_TENSORS, *_NUMBERS, Kind.LOCAL))


def _first(record: Record, memory: Memory, what: str, count: int) -> Finding | None:
    """Whether this is where it began in this step, and what that tells about its origin."""
    moment = memory.moment
    first = moment.first.setdefault(what, (record.name, record.kind))
    module = module_of(record)
    follows = first != (record.name, record.kind)
    if record.kind is Kind.ACTIVATION and not follows:
        # a weight that was not finite before has been alerted, or what it followed from was
        follows = any(name.startswith(f"{module}.") for name in moment.bad_weights)
    if follows:
        moment.followed += 1
        return None
    whole = record.stats.count if record.stats is not None else 1
    share = f" of {whole:,}" if whole > 1 else ""
    facts: dict[str, float] = {"found": count, "count": whole}
    earlier = moment.first.get("Inf") if what == "NaN" else moment.first.get("NaN")
    if earlier is not None and earlier != (record.name, record.kind):
        other = "Inf" if what == "NaN" else "NaN"
        why, origin = f"{other} was in {earlier[0]} ({earlier[1].value}) before it", earlier[0]
    elif moment.mask and moment.mask != record.name:
        why, origin = f"-Inf was in {moment.mask} (Activation) before it", moment.mask
    else:
        why, origin = _cause(record, memory, module)
    return Finding(f"{count:,} {what}{share}, the first of the step; {why}", origin, facts)


def _cause(record: Record, memory: Memory, module: str) -> tuple[str, str]:
    """Where the first non-finite value of a step comes from, as far as it was seen."""
    moment = memory.moment
    if record.kind is Kind.ACTIVATION:
        weights = "" if moment.weights_seen else " (its weights have not been seen before)"
        if moment.outputs:
            masks = f"; {moment.masks:,} more had -Inf, as masks have" if moment.masks else ""
            return f"all {moment.outputs:,} outputs before it were finite{masks}{weights}", module
        return f"no output came before it: look at the batch as well{weights}", module
    if record.kind is Kind.GRADIENT:
        before = moment.gradient_before(record.name)
        if before:
            words = f"the gradients before it were finite, the last that of {before}, "
            return f"{words}so its backward made it, or what lies between", before
        return "no gradient came before it: look at the loss", module
    if record.kind is Kind.WEIGHT_GRADIENT:
        return f"no gradient of an output was: it arises in {module}", module
    if record.kind is Kind.WEIGHT or record.kind is Kind.OPTIMISER_STATE:
        if not memory.seen_finite:
            return "it was so when it was first seen", module
        return "nothing of this step was before: the update made it", module
    return "no tensor of this step was before it", ""


# -- gradients -----------------------------------------------------------------------------


def exploding(factor: float = 100.0, warmup: int = 10) -> Rule:
    """A gradient whose root mean square is `factor` times what is typical for it."""
    far = math.log2(factor)

    def rule(record: Record, memory: Memory) -> str | None:
        level = _level(record.stats)
        if level is None:
            return None
        typical, seen = memory.typical, memory.seen
        found = seen >= warmup and level > typical + far
        memory.follow(min(level, typical + far) if seen else level, _RATE)
        if not found:
            return None
        return (
            f"the gradient is {2 ** (level - typical):,.0f} times what is typical ({2**level:.3g})"
        )

    return _named(rule, "exploding", _GRADIENTS)


def vanishing(
    factor: float = 1000.0, floor: float = 1e-12, warmup: int = 10, patience: int = 3
) -> Rule:
    """A gradient that is 0, below `floor`, or `factor` times smaller than what is typical."""
    far, lowest = math.log2(factor), math.log2(floor)

    def rule(record: Record, memory: Memory) -> str | None:
        stats = record.stats
        level = _level(stats)
        if stats is None or (level is None and (not stats.finite or stats.rm2)):
            return None
        typical, seen = memory.typical, memory.seen
        found = level is None or level < lowest or (seen >= warmup and level < typical - far)
        if level is not None:
            memory.follow(max(level, typical - far) if seen else level, _RATE)
        if memory.in_a_row(found) < patience:
            return None
        size = "0" if level is None else f"{2**level:.3g}"
        return f"the gradient is {size} for {memory.streak} times in a row"

    return _named(rule, "vanishing", _GRADIENTS)


def _level(stats: Summary | None) -> float | None:
    """The logarithm of the root mean square, if it has one."""
    if stats is None or not 0.0 < stats.rm2 < math.inf:
        return None
    return math.log2(stats.rm2)


# -- activations and values ----------------------------------------------------------------


def dead(share: float = 0.95, patience: int = 3) -> Rule:
    """An output of which at least `share` is zero, `patience` times in a row."""

    def rule(record: Record, memory: Memory) -> Finding | None:
        stats = record.stats
        if stats is None or stats.count < 8:  # of a few numbers many may be zero
            return None
        if memory.in_a_row(stats.zeros >= share * stats.count) < patience:
            return None
        part = stats.zeros / stats.count
        message = f"{part:.1%} of the output is zero, {memory.streak} times in a row"
        return Finding(message, facts={"zeros": part})

    return _named(rule, "dead", (Kind.ACTIVATION,))


def saturated(share: float = 0.05) -> Rule:
    """A tensor of which at least `share` has the largest exponent that its dtype knows."""

    def rule(record: Record, memory: Memory) -> Finding | None:
        stats = record.stats
        if stats is None or not stats.bins:
            return None
        top = _top(record.dtype)
        if top is None or not 0 <= top - stats.first_bin < len(stats.bins):
            return None
        part = stats.bins[top - stats.first_bin] / stats.finite
        if part < share:
            return None
        return Finding(
            f"{part:.1%} of the values are at the end of {record.dtype}: 2^{top} and above, the "
            f"largest is {stats.max_abs:.6g}",
            facts={"share": part},
        )

    return _named(rule, "saturated", _TENSORS)


_tops: dict[str, int | None] = {}


def _top(dtype: str) -> int | None:
    """The largest exponent of a float format; None for other dtypes."""
    if dtype not in _tops:
        from tensortap.stats.formats import limits

        try:
            _tops[dtype] = limits(dtype).top
        except NotFound:
            _tops[dtype] = None
    return _tops[dtype]


def constant(kinds: Collection[Kind] = (Kind.ACTIVATION,)) -> Rule:
    """A tensor whose values are all the same, and not zero."""

    def rule(record: Record, memory: Memory) -> str | None:
        stats = record.stats
        if stats is None or stats.std != 0.0 or stats.finite < 2 or not stats.max_abs:
            return None
        return f"all {stats.finite:,} finite values are {stats.max:.6g}"

    return _named(rule, "constant", kinds)


def loss_spike(
    deviations: float = 6.0, rise: float = 0.1, warmup: int = 10, names: str = "loss"
) -> Rule:
    """A loss that is `deviations` mean deviations, and by the share `rise`, above its typical.

    `names` is a regular expression over the names of metrics.
    """
    wanted = re.compile(names)

    def rule(record: Record, memory: Memory) -> Finding | None:
        value = record.value
        if type(value) not in (float, int) or not wanted.search(record.name):
            return None
        value = float(value)  # type: ignore[arg-type]  # checked above
        if not math.isfinite(value):
            return None
        typical, spread, seen = memory.typical, memory.spread, memory.seen
        allowed = max(deviations * spread, rise * abs(typical))
        found = seen >= warmup and value > typical + allowed
        memory.follow(min(value, typical + allowed) if seen >= warmup else value, 0.1)
        if not found:
            return None
        facts = {"value": value, "typical": typical}
        return Finding(f"{value:.4g}, where {typical:.4g} is typical", facts=facts)

    return _named(rule, "loss_spike", _NUMBERS)


DEFAULT: tuple[Rule, ...] = (
    nan(), inf(), exploding(), vanishing(), dead(), saturated(), constant(), loss_spike(),
)  # fmt: skip
