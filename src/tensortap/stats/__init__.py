"""Statistics: the `Summary` of a tensor, and the merging of summaries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.stats.summarize import summarize_array

__all__ = ["summarize_array"]
# when first used, because it imports NumPy
__getattr__ = lazy(__name__, {"summarize_array": "tensortap.stats.summarize:summarize_array"})
