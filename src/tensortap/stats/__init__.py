"""The `Summary` of a tensor, and of tensors put together."""

from __future__ import annotations

from tensortap.stats.memory import summarize_array, summarize_memory
from tensortap.stats.merge import merge

__all__ = ["merge", "summarize_array", "summarize_memory"]
