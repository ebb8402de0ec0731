"""Values as JSON, for commands and for programs that ask. What JSON lacks becomes text."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import numpy as np


def as_json(value: Any) -> Any:
    """Return a value as JSON: structs as objects, and NaN, Infinity and -Infinity as text.

    >>> as_json((1, float("nan"), np.float32(0.5), {2: b"x"}))
    [1, 'NaN', 0.5, {'2': '78'}]
    """
    value = shallow_json(value)
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list) else value


def shallow_json(value: Any) -> Any:
    """Return a value as JSON, except for what a list or a dict holds."""
    if value is None or isinstance(value, (bool, int, str, dict, list)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (np.ndarray, np.generic)):
        return shallow_json(value.tolist())
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, (tuple, set, frozenset)):
        return value._asdict() if hasattr(value, "_asdict") else list(value)
    return value.hex() if isinstance(value, bytes) else str(value)
