"""Compare: two values, files or runs, and where they differ first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.rooms.compare.result import Comparison
    from tensortap.rooms.compare.values import compare_values

__all__ = ["Comparison", "compare_values"]
__getattr__ = lazy(
    __name__,
    {
        "Comparison": "tensortap.rooms.compare.result:Comparison",
        "compare_values": "tensortap.rooms.compare.values:compare_values",
    },
)
