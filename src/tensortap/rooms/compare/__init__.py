"""Compare two values, files or runs, and say where they differ.

The package shares its name with the verb `tap.compare`, so the package itself is callable.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from tensortap.rooms.compare.api import compare
from tensortap.rooms.compare.explain import Explanation, explain
from tensortap.rooms.compare.result import Comparison
from tensortap.rooms.compare.values import compare_values

__all__ = ["Comparison", "Explanation", "compare", "compare_values", "explain"]


class _Callable(types.ModuleType):
    # importing any module of this package sets `tensortap.rooms.compare` to the package
    def __call__(self, *args: Any, **options: Any) -> Any:
        return compare(*args, **options)


sys.modules[__name__].__class__ = _Callable
