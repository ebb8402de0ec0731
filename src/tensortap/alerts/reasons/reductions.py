"""Reasons in operations over several elements, and in optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensortap.alerts.reasons.operands import (
    Array,
    Operands,
    bad_elements,
    elements,
    kinds,
    limit,
    peak,
    reason_for,
    rows,
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
    "sum", "mean", "cumsum", "reduce_sum", "nansum", "logsumexp", "linalg_vector_norm", "norm",
    "var", "std", "var_mean", "std_mean", "native_layer_norm", "native_batch_norm", "prod",
    "cumprod", "reduce_prod", "mse_loss",
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


_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "dot_general", "convolution",
             "conv_general_dilated", "linear", "matmul", "addbmm", "mkldnn_linear")  # fmt: skip


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


@reason_for("binary_cross_entropy")
def _probabilities(x: Operands) -> str | None:
    if x.first is None:
        return None
    outside = int(((x.first < 0) | (x.first > 1)).sum())
    return f"probabilities outside [0, 1]: {elements(outside)} outside" if outside else None


@reason_for("fused_adam", "fused_adamw")
def _fused_adam(x: Operands) -> str | None:
    return _no_eps(x.scalars.get("eps"), x.arrays.get("exp_avg_sqs"))


def _no_eps(eps: Any, squares: Array | None) -> str | None:
    if eps != 0:
        return None
    zeros = "" if squares is None else f": {elements((squares == 0).sum(), 'exp_avg_sq')} 0"
    return f"0/0 in the update: eps is 0{zeros}"
