"""Statistics: the `Summary` of a tensor, and the merging of summaries."""

from __future__ import annotations

from tensortap.stats.merge import merge
from tensortap.stats.summarize import summarize_array, summarize_memory

__all__ = ["merge", "summarize_array", "summarize_memory"]
