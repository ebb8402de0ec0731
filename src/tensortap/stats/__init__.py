"""Statistics: the `Summary` of a tensor, and the merging of summaries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.stats.summarize import summarize_array, summarize_memory

__all__ = ["summarize_array", "summarize_memory"]


def __getattr__(name: str) -> Any:  # when first used, because it imports NumPy
    if name not in __all__:
        raise AttributeError(name)
    from tensortap.stats import summarize

    return getattr(summarize, name)
