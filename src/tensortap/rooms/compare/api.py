"""`tap.compare`: tell values, files and runs apart, and compare them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.core.arguments import checked
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.rooms import offer, offers
from tensortap.rooms.compare.values import compare_values
from tensortap.rooms.dump.files import load_file, suffixes
from tensortap.runs.layout import RUN_FILE
from tensortap.runs.run_reader import is_url

if TYPE_CHECKING:
    from tensortap.rooms.compare.report import CompareReport
    from tensortap.rooms.compare.result import Comparison


@checked
def compare(
    a: Any,
    b: Any,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    equal_nan: bool = True,
    trust: bool = False,
    tolerance: str | None = None,
    **options: Any,
) -> Comparison | CompareReport:
    """Compare two values, files or runs; the result is true or false and says where they differ.

    Two numbers are close if ``|a - b| <= atol + rtol*|b|``, by default 1e-8 and 1e-5. Integers must
    be equal, unless you give a tolerance. A path, or text that names a file
    (`.pt`, `.npy`, `.pkl`, `.safetensors`, or a registered format), stands for its content; `trust`
    allows pickles of your own classes. Runs, their folders and live sessions are compared record by
    record; the remaining `options` are those of `compare_runs`. `tolerance="auto"` takes the
    tolerances from a run with perturbed inputs: the one beside `b`, or `noise`, which implies it.

    >>> import numpy as np
    >>> compare(np.array([1.0, 2.0]), np.array([1.0, 2.5]))
    <differ: 1 of 2 elements, max|Δ|=0.5, rel=0.2, 1.13e+15 ulp, cosine=0.996546, worst at [1]:
    2 and 2.5, atol=0.5 or rtol=0.2 would pass>
    """
    for kind in offers("compare.kinds"):  # values that another room compares
        if kind.accepts(a) or kind.accepts(b):
            found: Comparison | CompareReport = kind.compare(a, b, **options)
            return found
    runs = is_run(a), is_run(b)
    if any(runs):
        if not all(runs):
            other = b if runs[0] else a
            path = path_of(other)
            got = f"a {type(other).__name__}" if path is None else f"{path}, which is not a run"
            if path is not None and not path.exists():
                got = f"{path}, which does not exist"
            raise TensortapError(f"a run can only be compared with a run, got {got}")
        if tolerance is not None or options.get("noise") is not None:
            if tolerance not in (None, "auto"):
                raise ValueError(f"tolerance must be 'auto', got {tolerance!r}")
            options |= {"atol": atol, "rtol": rtol, "equal_nan": equal_nan, "trust": trust}
            judged: CompareReport = offer("compare.tolerance")(a, b, **options)
            return judged
        from tensortap.rooms.compare.runs import compare_runs  # values do not need Arrow

        return compare_runs(a, b, atol=atol, rtol=rtol, equal_nan=equal_nan, trust=trust, **options)
    if tolerance is not None:
        options["tolerance"] = tolerance
    if options:
        raise TypeError(f"{', '.join(options)}: for runs only, and neither is a run")
    x, y = _content(a, trust), _content(b, trust)
    x, y = _only_tensor(a, x, y), _only_tensor(b, y, x)
    return compare_values(x, y, atol=atol, rtol=rtol, equal_nan=equal_nan)


def path_of(value: Any) -> Path | None:
    """Return the file or folder that a value names; None for anything else.

    A `Path` always names one. Text does if the file exists, if it has a readable suffix, or if it
    has a slash and no space: a mistyped path should be an error, not a comparison of two texts.

    >>> path_of("weights.npy"), path_of("runs/a"), path_of("a cat")
    (PosixPath('weights.npy'), PosixPath('runs/a'), None)
    """
    if isinstance(value, os.PathLike):
        return Path(value)
    if not isinstance(value, str) or not value or "\0" in value or "\n" in value:
        return None
    named = value.endswith(tuple(suffixes())) or (os.sep in value and " " not in value)
    return Path(value) if named or os.path.exists(value) else None


def is_run(value: Any) -> bool:
    """Return whether a value is a run, its folder, a live session or a reader."""
    if is_url(value):
        return True
    path = path_of(value)
    if path is not None:
        return path.is_dir() and (path / RUN_FILE).exists()
    if isinstance(value, type):
        return False
    reader = getattr(value, "reader", value)
    return all(callable(getattr(reader, verb, None)) for verb in ("names", "records", "load"))


def _content(value: Any, trust: bool) -> Any:
    """Return the content of a file, with its tensors mapped; other values as they are."""
    path = path_of(value)
    if path is None:
        return value
    if path.is_dir():
        raise TensortapError(f"{path} is a folder without {RUN_FILE}, so it is not a run")
    if not path.exists():
        raise NotFound(f"no such file: {path}")
    return load_file(path, trust=trust, mapped=True)


def _only_tensor(source: Any, value: Any, other: Any) -> Any:
    """Return the only tensor of a file if it is compared with something other than a dict."""
    single = isinstance(value, dict) and len(value) == 1 and not isinstance(other, dict)
    if single and str(path_of(source)).endswith(".safetensors"):
        return next(iter(value.values()))
    return value
