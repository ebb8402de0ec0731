"""Statistics: the `Summary` of a tensor, and the merging of summaries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.stats.summarize import summarize_array, summarize_memory

__all__ = ["summarize_array", "summarize_memory"]
# when first used, because it imports NumPy
__getattr__ = lazy(__name__, {name: f"tensortap.stats.summarize:{name}" for name in __all__})
