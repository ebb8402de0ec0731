"""Explain in words why an operation made values that are not finite.

Each reason looks at what the operation read and returns a sentence, or None if it does not apply.
Without one, `why` states the plain facts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensortap.rooms.ops.operations import (
    BACKWARD,
    Operation,
    OperationInput,
    OperationOutput,
)
from tensortap.rooms.ops.reasons import causes  # noqa: F401  which registers them
from tensortap.rooms.ops.reasons.operands import (
    REASONS,
    Array,
    Operands,
    elements,
    kinds,
    value_range,
)


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
