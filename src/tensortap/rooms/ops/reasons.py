"""Explain in words why an operation made values that are not finite.

Each reason looks at what the operation read and returns a sentence, or None if it does not apply.
Without one, `why` states the plain facts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tensortap.core.dtypes import numpy_dtype
from tensortap.rooms.ops.operations import BACKWARD, Operation, OperationInput, OperationOutput

Array = NDArray[np.float64]


class Operands(NamedTuple):
    """An operation as the reasons see it: inputs and outputs as float64, None if not known."""

    name: str
    node: str
    dtype: str
    arrays: dict[str, Array | None]
    outputs: list[Array]
    scalars: dict[str, Any]

    @property
    def first(self) -> Array | None:
        """The first tensor that the operation read."""
        return next(iter(self.arrays.values()), None)

    @property
    def second(self) -> Array | None:
        """The second operand: a tensor, or a number."""
        found = list(self.arrays.values())
        if len(found) > 1:
            return found[1]
        number = self.scalars.get("other", self.scalars.get("exponent"))
        return np.array(float(number)) if isinstance(number, (int, float)) else None

    @property
    def largest(self) -> float:
        """The largest finite number of the output's dtype."""
        return _largest(self.dtype)


Reason = Callable[[Operands], str | None]
REASONS: dict[str, list[Reason]] = {}


def reason_for(*names: str) -> Callable[[Reason], Reason]:
    def add(reason: Reason) -> Reason:
        for name in names:
            REASONS.setdefault(name, []).append(reason)
        return reason

    return add


def _largest(dtype: str) -> float:
    try:
        return float(ml_dtypes.finfo(numpy_dtype(dtype)).max)
    except (TypeError, ValueError, KeyError):
        return math.inf


def why(operation: Operation) -> str:
    """Return in words why the outputs of an operation are not finite."""
    operands = _operands_of(operation, first_bad(operation))
    with np.errstate(all="ignore"):
        found = None
        if operands.node:
            found = _backward(operands)
        for reason in REASONS.get(operands.name, []):
            found = found or reason(operands)
        return found or _already(operands) or _facts(operands)


def first_bad(operation: Operation) -> int:
    """Return the index of the first output that is not finite."""
    outputs = (x.stats for x in operation.outputs)
    return next((i for i, x in enumerate(outputs) if x is not None and x.finite != x.count), 0)


def selected(operation: Operation, bad: int) -> tuple[list[OperationInput], list[OperationOutput]]:
    """Return inputs and outputs; of an operation on lists, those of the output `bad`."""
    inputs = operation.inputs
    if "[" not in (inputs[0].name if inputs else ""):
        return inputs, operation.outputs
    # lists of an optimizer; what is not a list (a step, a scale) belongs to all of them
    inputs = [x for x in inputs if "[" not in x.name or x.name.endswith(f"[{bad}]")]
    return inputs, operation.outputs[bad : bad + 1]


def _operands_of(operation: Operation, bad: int) -> Operands:
    """Return the operands; of an operation on lists, those of the output `bad`."""
    name = operation.name.removesuffix("_").removeprefix("foreach_")
    inputs, outputs = selected(operation, bad)
    arrays = {x.name.partition("[")[0]: _floats(x.array()) for x in inputs}
    dtype = outputs[0].dtype if outputs else ""
    made = [found for x in outputs if (found := _floats(x.array())) is not None]
    node = operation.node if operation.phase == BACKWARD else ""
    return Operands(name, node, dtype, arrays, made, operation.scalars)


def _floats(array: Any) -> Array | None:
    if array is None or array.dtype.kind == "c":
        return None
    try:
        return np.asarray(array).astype(np.float64)
    except (TypeError, ValueError):
        return None


# -- plain facts


def _already(operands: Operands) -> str | None:
    for name, array in operands.arrays.items():
        if array is not None and not np.isfinite(array).all():
            return f"its input {name} already has {kinds(array)}"
    for name, value in operands.scalars.items():
        if isinstance(value, float) and not math.isfinite(value):
            return f"its {name} is {value:g}"
    return None


def _facts(operands: Operands) -> str:
    inputs = ", ".join(f"{n} {value_range(x)}" for n, x in operands.arrays.items() if x is not None)
    made = kinds(operands.outputs[0]) if operands.outputs else "values that are not finite"
    return (
        f"{operands.name} made {made or 'values that are not finite'} of {inputs or 'its inputs'}"
    )


# -- backward ---------------------------------------------------------------------------------


_INFINITE_SLOPES = {
    "SqrtBackward": "sqrt'(0)", "NormBackward": "norm'(0)", "LinalgVectorNormBackward": "norm'(0)",
    "LogBackward": "log'(0)", "Log2Backward": "log2'(0)", "StdBackward": "std'(0)",
    "RsqrtBackward": "rsqrt'(0)", "ReciprocalBackward": "(1/x)'(0)", "PowBackward": "pow'(0)",
    "Log10Backward": "log10'(0)", "Log1PBackward": "log1p'(-1)", "AcosBackward": "acos'(±1)",
    "AsinBackward": "asin'(±1)", "AtanhBackward": "atanh'(±1)", "CdistBackward": "norm'(0)",
    "DivBackward": "(1/x)'(0)", "StdMeanBackward": "std'(0)", "EuclideanDistBackward": "norm'(0)",
}  # fmt: skip


def _backward(x: Operands) -> str | None:
    """Explain an infinite derivative, where the backward pass divides by what is 0."""
    slope = _INFINITE_SLOPES.get(x.node.rstrip("0123456789"))
    if slope is None or x.name not in ("div", "rsqrt", "pow", "reciprocal", "mul"):
        return None
    values = x.second if x.name == "div" else x.first
    if values is None or not np.isfinite(values).all():
        return None
    zeros = int((values == 0).sum())
    return f"{slope} is infinite: {elements(zeros)} at that point" if zeros else None


# -- on single elements --------------------------------------------------------------------------


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


@reason_for("exp", "expm1", "exp2")
def _exponential(x: Operands) -> str | None:
    if x.first is None or not np.isfinite(x.first).all():
        return None
    above = math.log2(x.largest) if x.name == "exp2" else math.log(x.largest)
    return f"{x.name} overflows {x.dtype} above {above:.2f}: largest input {x.first.max():.4g}"


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


@reason_for("pow", "square")
def _power(x: Operands) -> str | None:
    base, exponent = x.first, x.second
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
    "erfinv": (-1, 1),
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


@reason_for("add", "sub", "subtract", "rsub", "lerp")
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
        word = "sum" if x.name in ("add", "lerp") else "difference"
        return f"{word} overflows {x.dtype}: {peak(one):.4g} and {peak(other):.4g}, {limit(x)}"
    return None


@reason_for("to_copy", "copy", "to")
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


# -- over several elements ------------------------------------------------------------------------


@reason_for("softmax", "log_softmax", "safe_softmax")
def _softmax(x: Operands) -> str | None:
    scores = x.first
    if scores is None or not scores.ndim or np.isnan(scores).any():
        return None
    dim = x.scalars.get("dim", -1)
    if (masked := np.isneginf(scores).all(axis=dim)).any():
        return f"-inf minus -inf in {x.name}: {rows(masked)} fully masked"
    if (infinite := np.isposinf(scores).any(axis=dim)).any():
        return f"inf minus inf in {x.name}: {rows(infinite)} infinite"
    return None


@reason_for(*(f"scaled_dot_product_{kind}" for kind in (
    "flash_attention_for_cpu", "attention_math", "flash_attention", "efficient_attention",
    "cudnn_attention", "fused_attention_overrideable",
)))  # fmt: skip
def _attention(x: Operands) -> str | None:
    mask = x.arrays.get("attn_mask", x.arrays.get("attn_bias"))
    if mask is not None and (masked := np.isneginf(mask).all(axis=-1)).any():
        return f"-inf minus -inf in softmax: {rows(masked)} fully masked"
    if mask is not None and np.isnan(mask).any():
        return None
    inputs = [x.arrays.get(name) for name in ("query", "key")]
    if all(part is not None and np.isfinite(part).all() for part in inputs):
        largest = f"queries up to {peak(inputs[0]):.4g}, keys up to {peak(inputs[1]):.4g}"
        return f"scores overflow: {largest}"
    return None


@reason_for(
    "sum", "mean", "cumsum", "nansum", "logsumexp", "linalg_vector_norm", "norm",
    "var", "std", "var_mean", "std_mean", "native_layer_norm", "native_batch_norm", "prod",
    "cumprod", "mse_loss",
)  # fmt: skip
def _reduction(x: Operands) -> str | None:
    values = x.first
    if values is None:
        return None
    bad = int(bad_elements(x.outputs).sum())
    ratio = values.size // max(1, x.outputs[0].size if x.outputs else 1)
    if not values.size or not ratio:
        return f"0/0: the {x.name} of no elements"
    if x.name.startswith(("var", "std")) and ratio - x.scalars.get("correction", 1) <= 0:
        return f"0/0: the {x.name} of {ratio:,} element with a correction of 1"
    posinf, neginf = np.isposinf(values).any(), np.isneginf(values).any()
    if posinf and neginf and not np.isnan(values).any():
        return f"inf minus inf in the {x.name}: its input has both"
    if np.isfinite(values).all() and bad:
        word = "product" if "prod" in x.name else "sum"
        squares = "norm" in x.name or x.name.startswith(("var", "std", "mse"))
        kind = f"squares in {x.dtype}" if squares else x.dtype
        largest = f"largest magnitude {peak(values):.4g}, {limit(x)}"
        return f"overflow in the {word} of {ratio:,} {kind}: {largest}"
    return None


_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "convolution", "linear",
             "matmul", "addbmm", "mkldnn_linear")  # fmt: skip


@reason_for(*_PRODUCTS)
def _matrix_product(x: Operands) -> str | None:
    names = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}
    found = list(x.arrays.values())
    pair = [x.arrays.get(n) for n in names[x.name]] if x.name in names else found[:2]
    one, other = (*pair, None, None)[:2]
    if one is None or other is None:
        return None
    if any(part is not None and np.isnan(part).any() for part in found):
        return None
    if np.isinf(one).any() or np.isinf(other).any():
        if x.outputs and np.isnan(x.outputs[0]).any():
            held = kinds(one) or kinds(other)
            return f"inf * 0 or inf minus inf in {x.name}: its inputs have {held}"
        return None
    if all(part is None or np.isfinite(part).all() for part in found):
        terms = one.shape[-1] if one.ndim else 1
        if "conv" in x.name:
            terms = other[0].size if other.ndim else 1
        return (
            f"overflow in {x.name}: sums of {terms:,} products of numbers up to "
            f"{peak(one):.4g} and {peak(other):.4g} exceed {limit(x)}"
        )
    return None


@reason_for("nll_loss_forward", "nll_loss", "nll_loss2d_forward", "cross_entropy_loss")
def _no_targets(x: Operands) -> str | None:
    targets, ignored = x.arrays.get("target"), x.scalars.get("ignore_index", -100)
    if targets is not None and (targets == ignored).all():
        return f"0/0: all {targets.size:,} targets are ignored ({ignored:g})"
    return None


# -- words ------------------------------------------------------------------------------------


def elements(count: Any, of: str = "") -> str:
    """Return a number of elements as the subject of a sentence, with its verb."""
    owner = f" of {of}" if of else ""
    return (
        f"{int(count):,} element{owner} is" if count == 1 else f"{int(count):,} elements{owner} are"
    )


def negatives(count: Any, what: str) -> str:
    return f"1 {what} number" if count == 1 else f"{int(count):,} {what} numbers"


def rows(bad: Any) -> str:
    """Return the bad rows of a tensor in words, given which of them are bad."""
    places = [tuple(map(int, place)) for place in np.argwhere(bad)]
    shown = [str(place[0]) if len(place) == 1 else str(list(place)) for place in places[:3]]
    if not shown or not places[0]:
        return "the row is"
    more = f" and {len(places) - 3:,} more" if len(places) > 3 else ""
    return f"row {shown[0]} is" if len(places) == 1 else f"rows {', '.join(shown)}{more} are"


def limit(operands: Operands) -> str:
    return f"the largest {operands.dtype}, {operands.largest:,.6g}"


def bad_elements(outputs: list[Array]) -> Any:
    return ~np.isfinite(outputs[0]) if outputs else np.zeros(())


def peak(array: Array | None) -> float:
    if array is None:
        return math.nan
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).max()) if finite.size else math.nan


def value_range(array: Array) -> str:
    finite = array[np.isfinite(array)]
    if not finite.size:
        return "no finite value"
    return f"{finite.min():.4g} to {finite.max():.4g}"


def kinds(array: Array) -> str:
    nans, infs = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    parts = [f"{n:,} {word}" for n, word in ((nans, "NaN"), (infs, "Inf")) if n]
    return " and ".join(parts)
