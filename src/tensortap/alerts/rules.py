"""The built-in rules; each function takes thresholds and returns a rule.

A rule is a function ``rule(record, state)`` that returns None, a message, or a `Finding`. It may
keep numbers in its `RuleState`, of which it has one for every tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from tensortap.alerts.alert import Finding, may_be_mask, module_of
from tensortap.core.arguments import check_positive, checked
from tensortap.core.dtypes import DTYPES
from tensortap.core.patterns import compile_pattern
from tensortap.core.record import Kind, Record, Summary
from tensortap.core.rooms import load, rooms

if TYPE_CHECKING:
    from tensortap.alerts.monitor import RuleState

ACTIVE_RULES = "tensortap.rules"  # the name of records that say which rules are active
LIMITS = ("unseen", "remark", "left_out")  # rules about what is observed, not about the training
Rule = Callable[[Record, "RuleState"], "Finding | str | None"]

_GRADIENTS = (Kind.GRADIENT, Kind.WEIGHT_GRADIENT)
_TENSORS = (Kind.ACTIVATION, *_GRADIENTS, Kind.WEIGHT, Kind.OPTIMISER_STATE)
_NUMBERS = (Kind.METRIC, Kind.VALUE)
_RATE = 0.05  # how fast the typical gradient follows new ones
_LARGEST_LOG = 709.0  # of a float
_FEW_VALUES = 4  # of which all may well be 0
_PRECISION = 20  # bits; smaller parts of the largest gradient of a step are rounding errors


def _named(rule: Rule, name: str, kinds: Collection[Kind], looks: int = 1) -> Rule:
    """Set the name of a rule, the kinds of records that it checks, and how many steps it needs."""
    rule.__dict__.update(kinds=frozenset(kinds), looks=looks)
    rule.__name__ = name
    return rule


# -- non-finite values -----------------------------------------------------------------------


def nan() -> Rule:
    """Report the first NaN of a step, but not the NaNs that follow from it."""

    def rule(record: Record, state: RuleState) -> Finding | None:
        stats, value = record.stats, record.value
        nans = stats.nans if stats is not None else type(value) is float and math.isnan(value)
        return _first_of_step(record, state, "NaN", int(nans)) if nans else None

    return _named(rule, "nan", (*_TENSORS, *_NUMBERS, Kind.LOCAL))


def inf() -> Rule:
    """Report the first infinity of a step, but not the infinities that follow from it.

    An output with only -Inf may be an attention mask. It is not reported, but named as the origin
    if something after it is not finite either.
    """

    def rule(record: Record, state: RuleState) -> Finding | None:
        stats, value = record.stats, record.value
        if stats is not None:
            infs = 0 if may_be_mask(record) else stats.posinfs + stats.neginfs
        else:
            infs = int(type(value) is float and math.isinf(value))
        return _first_of_step(record, state, "Inf", infs) if infs else None

    return _named(rule, "inf", (*_TENSORS, *_NUMBERS, Kind.LOCAL))


def _first_of_step(record: Record, state: RuleState, what: str, found: int) -> Finding | None:
    """Return a finding with its probable cause, or None if an earlier tensor explains it."""
    step_state = state.step_state
    here = record.name, record.kind
    module = module_of(record)
    follows = step_state.first.setdefault(what, here) != here
    if record.kind is Kind.ACTIVATION and not follows:
        # the non-finite weight has already been reported, or what caused it
        follows = any(name.startswith(f"{module}.") for name in step_state.bad_weights)
    if record.kind is Kind.METRIC and not step_state.outputs:  # of a JAX program, perhaps
        follows = follows or bool(step_state.bad_weights)
    if follows:
        step_state.followed += 1
        return None
    other = "Inf" if what == "NaN" else "NaN"
    earlier = step_state.first.get(other)
    if earlier is not None and earlier != here:
        cause, origin = f"{earlier[0]} ({earlier[1].value}) had {other} before it", earlier[0]
    elif step_state.mask and step_state.mask != record.name:
        origin = step_state.mask
        cause = f"{origin} (Activation) had -Inf before it"
    else:
        cause, origin = _cause(record, state, module)
    count = record.stats.count if record.stats is not None else 1
    values = f"{found:,} of {count:,} values are" if count > 1 else "the value is"
    message = f"{values} {what}, the first in this step; {cause}"
    return Finding(message, origin, {"found": found, "count": count})


def _cause(record: Record, state: RuleState, module: str) -> tuple[str, str]:
    """Return what probably caused the first non-finite value of a step, and in which module."""
    step_state, tags = state.step_state, record.tags
    if record.kind is Kind.ACTIVATION:
        if "weights" in tags:
            return f"{tags['weights']} was not finite before this step already", module
        if tags.get("origin", module) != module:  # made before it got here
            return tags["where"], tags["origin"]
        weights = "" if step_state.weights_seen else " (its weights have not been observed yet)"
        if not step_state.outputs:
            return f"no output came before it, check the batch as well{weights}", module
        if "where" in tags:
            return f"{tags['where']}{weights}", module
        count = step_state.outputs
        before = (
            "the output before it was" if count == 1 else f"all {count:,} outputs before it were"
        )
        masks = f", {step_state.masks:,} more had -Inf as masks do" if step_state.masks else ""
        return f"{before} finite{masks}{weights}", module
    if record.kind is Kind.GRADIENT:
        last = step_state.gradient_before(module)
        if not last:
            return "no gradient came before it, check the loss", module
        cause = f"the gradients before it were finite, the last one of {last}"
        behind = tags.get("behind")
        if behind is None:
            return f"{cause}: its backward pass, or an operation between the two, made it", last
        if not behind:
            inside = step_state.gradient_around(module) or _common_parent(module, last)
            both = not inside or last.startswith(f"{inside}.")
            place = f"in {inside}, " if inside else ""
            place += f"between {module} and {last}" if both else f"after {module}"
            inside = inside or tags.get("origin", module)
            return f"{cause}: the backward pass of the code {place} made it", inside
        modules = behind.split()
        made = f"the backward pass of {' or '.join(modules)} made it"
        return f"{cause}: {made}", last if last in modules else modules[0]
    if record.kind is Kind.WEIGHT_GRADIENT:
        if not step_state.outputs:
            return "no output before it in this step was observed", module
        if record.world_size > 1:
            cause = "came through communication with another rank, or arises"
            return f"the gradients of all outputs were finite here: it {cause} in {module}", module
        return f"the gradients of all outputs were finite, so it arises in {module}", module
    if record.kind is Kind.WEIGHT or record.kind is Kind.OPTIMISER_STATE:
        if not state.seen_finite:
            return "it was so when it was first observed", module
        return "everything before it in this step was finite, so the update made it", module
    if not step_state.outputs:  # as where a JAX program hands over nothing but its states
        return "no output before it in this step was observed", ""
    return "all tensors before it in this step were finite", ""


def _common_parent(one: str, other: str) -> str:
    """Return the innermost module with code around two modules; empty for the model itself.

    >>> _common_parent("layers.0.attn.q", "layers.0.attn.o_proj")
    'layers.0.attn'
    >>> _common_parent("model.layers.0.mlp", "model.layers.1.attn")  # a list is not called
    'model'
    """
    shared: list[str] = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            return ".".join(shared[:-1] if a.isdigit() and b.isdigit() else shared)
        shared.append(a)
    return ".".join(shared)


# -- gradients -----------------------------------------------------------------------------


@checked
def exploding(factor: float = 100.0, warmup: int = 10) -> Rule:
    """Report a gradient whose root mean square is `factor` times its typical value.

    Of several in a step the largest counts: an optimizer with a closure ends with tiny ones.
    """
    check_positive("factor", factor)
    distance = math.log2(factor)

    def rule(record: Record, state: RuleState) -> str | None:
        level = _log2_rms(record.stats)
        if level is None:
            return None
        last, largest = state.notes.get("largest", (None, level))
        step = record.step
        if last == step and level <= largest:
            return None
        state.notes["largest"] = step, level
        typical, seen = state.typical, state.seen
        # within a budget, looks are far between: in that time gradients may well have grown
        gap = max(1, step - last) if last is not None else 1
        highest = typical + distance + math.log2(gap)
        explodes = seen >= warmup and level > highest
        state.follow(min(level, highest) if seen else level, 1.0 - (1.0 - _RATE) ** gap)
        if not explodes:
            return None
        times = 2 ** (level - typical)
        return f"gradient has an RMS of {2**level:.3g}, {times:,.0f} times its typical value"

    return _named(rule, "exploding", _GRADIENTS, warmup + 1)


@checked
def vanishing(
    factor: float = 1000.0, floor: float = 1e-12, warmup: int = 10, patience: int = 3
) -> Rule:
    """Report a gradient that is 0, below `floor`, or `factor` times smaller than is typical.

    Steps in which something was not finite do not count, nor do gradients that are rounding errors
    beside others, as that of a bias before a softmax over rows beside that of its weight, or have
    fewer than 4 values: rows of a batch often cancel there.
    """
    check_positive("factor", factor)
    check_positive("floor", floor)
    distance, lowest = math.log2(factor), math.log2(floor)

    def rule(record: Record, state: RuleState) -> str | None:
        stats = record.stats
        level = _log2_rms(stats)
        if stats is None or (level is None and (not stats.finite or stats.rm2)):
            return None
        if stats.count < _FEW_VALUES:
            return None
        typical, seen = state.typical, state.seen
        vanishes = (
            level is None or level < lowest or (seen >= warmup and level < typical - distance)
        )
        step = state.step_state
        if level is not None:
            step.largest = max(step.largest, level)
            module = record.name.rpartition(".")[0]
            if module and record.kind is Kind.WEIGHT_GRADIENT:
                step.modules[module] = largest = max(level, step.modules.get(module, level))
                largest = max(largest, step.modules_before.get(module, level))
                vanishes = vanishes and level > largest - _PRECISION
        if step.first:  # a consequence of what is not finite, and reported as that
            vanishes = False
        elif vanishes and seen and typical >= lowest:  # unless it has always been rounding errors
            vanishes = typical > max(step.largest, step.largest_before) - _PRECISION
        if level is not None and not step.first:
            state.follow(max(level, typical - distance) if seen else level, _RATE)
        if state.in_a_row(vanishes) < patience:
            return None
        size = "0" if level is None else f"tiny (RMS {2**level:.3g})"
        return f"gradient has been {size} for {state.streak} steps in a row"

    return _named(rule, "vanishing", _GRADIENTS, patience)


def _log2_rms(stats: Summary | None) -> float | None:
    if stats is None or not 0.0 < stats.rm2 < math.inf:
        return None
    return math.log2(stats.rm2)


# -- activations and values ----------------------------------------------------------------


@checked
def dead(share: float = 0.95, patience: int = 3) -> Rule:
    """Report an output of which at least `share` is zero, `patience` steps in a row."""

    def rule(record: Record, state: RuleState) -> Finding | None:
        stats = record.stats
        if stats is None or stats.count < 8:  # a few values may well be all zero
            return None
        if state.in_a_row(stats.zeros >= share * stats.count) < patience:
            return None
        zeros = stats.zeros / stats.count
        message = f"{zeros:.1%} of the output is zero, for {state.streak} steps in a row; "
        if "Dropout" in record.type:
            message += "lower the probability of this dropout"
        else:
            message += "lower the learning rate, or use a leaky activation"
        return Finding(message, facts={"zeros": zeros})

    return _named(rule, "dead", (Kind.ACTIVATION,), patience)


@checked
def saturated(share: float = 0.05) -> Rule:
    """Report a tensor of which at least `share` has the largest exponent of its dtype."""

    def rule(record: Record, state: RuleState) -> Finding | None:
        stats = record.stats
        if stats is None or not stats.bins:
            return None
        top = _largest_exponent(record.dtype)
        if top is None or not 0 <= top - stats.first_bin < len(stats.bins):
            return None
        part = stats.bins[top - stats.first_bin] / stats.finite
        if part < share:
            return None
        message = (
            f"{part:.1%} of the values have the largest exponent of {record.dtype} (2^{top} or "
            f"more); the largest magnitude is {stats.max_abs:.6g}"
        )
        return Finding(message, facts={"share": part})

    return _named(rule, "saturated", _TENSORS)


@functools.cache
def _largest_exponent(dtype: str) -> int | None:
    """Return the largest exponent of a float format, or None for other dtypes."""
    row = DTYPES.get(dtype)
    return None if row is None or row.format is None else row.exponents[1]


@checked
def constant(kinds: Collection[Kind] = (Kind.ACTIVATION,)) -> Rule:
    """Report a tensor whose values are all the same, but not zero."""

    def rule(record: Record, state: RuleState) -> str | None:
        stats = record.stats
        if stats is None or stats.std != 0.0 or stats.finite < 2 or not stats.max_abs:
            return None
        return f"all {stats.finite:,} finite values are {stats.max:.6g}"

    return _named(rule, "constant", kinds)


@checked
def loss_spike(
    deviations: float = 6.0, rise: float = 0.1, warmup: int = 10, names: str = "loss"
) -> Rule:
    """Report a loss far above its typical value.

    The distance must exceed `deviations` mean deviations and the share `rise` of the typical
    value. Losses of small batches are skewed, so the same holds for the logarithms of losses that
    are all positive; of others, the distance must be 3 times as large. `names` is a regular
    expression for the names of metrics.
    """
    pattern = compile_pattern(names, "names")

    def rule(record: Record, state: RuleState) -> Finding | None:
        value = record.value
        if type(value) not in (float, int) or not pattern.search(record.name):
            return None
        value = float(value)  # type: ignore[arg-type]  # checked above
        if not math.isfinite(value):
            return None
        typical, warm, logs = state.typical, state.seen >= warmup, state.another("logarithms")
        positive = value > 0.0 and logs.seen == state.seen
        distance = deviations * state.spread * (1.0 if positive else 3.0)
        highest = typical + max(distance, rise * abs(typical))
        if positive:
            top, level = logs.typical + deviations * logs.spread, math.log(value)
            highest = max(highest, math.exp(min(top, _LARGEST_LOG)))
            logs.follow(min(level, top) if warm else level, 0.1)
        state.follow(min(value, highest) if warm else value, 0.1)
        if not warm or value <= highest:
            return None
        message = f"{value:.4g} is far above the typical value of {typical:.4g}"
        return Finding(message, facts={"value": value, "typical": typical})

    return _named(rule, "loss_spike", _NUMBERS, warmup + 1)


@functools.cache
def default_rules() -> tuple[Rule, ...]:
    """Return the rules of ``alerts=True``: those over records, and those of the rooms."""
    found = [
        nan(), inf(), exploding(), vanishing(), dead(), saturated(), constant(), loss_spike(),
    ]  # fmt: skip
    for room in rooms().values():
        if room.rules is not None:
            found += load(room.rules)
    return tuple(found)


def active_rules(reader: Any) -> set[str]:
    """Return the rules that were active in any rank of a run or a live session."""
    names: set[str] = set()
    for record in reader.records(ACTIVE_RULES) if hasattr(reader, "load") else ():
        value = reader.load(record).value
        names.update(value.split() if isinstance(value, str) else ())
    return names
