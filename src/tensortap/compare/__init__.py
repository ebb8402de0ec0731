"""Two values, two files, two runs: whether they agree, and where they do not.

`tap.compare` is the verb; since the folder bears its name, the package can be called like it.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from tensortap.compare.api import compare
from tensortap.compare.explain import Explanation, explain
from tensortap.compare.result import Comparison
from tensortap.compare.values import compare_values

__all__ = ["Comparison", "Explanation", "compare", "compare_values", "explain"]


class _Callable(types.ModuleType):
    # whoever imports a module of this package sets `tensortap.compare` to the package
    def __call__(self, *args: Any, **options: Any) -> Any:
        return compare(*args, **options)


sys.modules[__name__].__class__ = _Callable
