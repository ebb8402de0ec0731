"""`tap.compare`: objects, files and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensortap.compare.files import content_of, is_run, only_tensor, path_of
from tensortap.compare.values import compare_values
from tensortap.errors import TensortapError


def compare(
    a: Any,
    b: Any,
    *,
    atol: float = 1e-8,
    rtol: float = 1e-5,
    equal_nan: bool = True,
    trust: bool = False,
    **options: Any,
) -> Any:
    """Compare two values, files or runs; the result is true or false and says where they differ.

    Two numbers are close if ``|a - b| <= atol + rtol*|b|``. A path, or text that names a file
    (`.pt`, `.npy`, `.pkl`, `.safetensors`, or a registered format), stands for its content; `trust`
    allows pickles of your own classes. Runs, their folders and live sessions are compared record by
    record; the remaining `options` are those of `compare_runs`.

    >>> import numpy as np
    >>> compare(np.array([1.0, 2.0]), np.array([1.0, 2.5]))
    <differ: 1 of 2 elements, max|Δ|=0.5, rel=0.2, 1.13e+15 ulp, cosine=0.996546, worst at [1]:
    2 and 2.5, atol=0.5 or rtol=0.2 would pass>
    """
    runs = is_run(a), is_run(b)
    if any(runs):
        if not all(runs):
            other = b if runs[0] else a
            raise TensortapError(
                f"a run can only be compared with a run, got {_description(other)}"
            )
        from tensortap.compare.runs import compare_runs  # imports Arrow, which values do not need

        return compare_runs(a, b, atol=atol, rtol=rtol, equal_nan=equal_nan, trust=trust, **options)
    if options:
        raise TypeError(f"{', '.join(options)}: for runs only, and neither is a run")
    x, y = content_of(a, trust=trust), content_of(b, trust=trust)
    if str(path_of(a)).endswith(".safetensors"):
        x = only_tensor(x, y)
    if str(path_of(b)).endswith(".safetensors"):
        y = only_tensor(y, x)
    return compare_values(x, y, atol=atol, rtol=rtol, equal_nan=equal_nan)


def _description(value: Any) -> str:
    path = path_of(value)
    if path is not None:
        return (
            f"{path}, which is not a run"
            if Path(path).exists()
            else f"{path}, which does not exist"
        )
    return f"a {type(value).__name__}"
