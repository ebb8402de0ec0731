"""The `Summary` of a tensor, and of tensors put together."""

from __future__ import annotations

from tensortap.stats.cpu import summarize_array
from tensortap.stats.merge import merge

__all__ = ["merge", "summarize_array"]
