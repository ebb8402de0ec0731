"""The run format: the sink that writes it, its reader, dumped files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.runs.object_files import register_format

__all__ = ["register_format"]
__getattr__ = lazy(
    __name__,
    {
        "register_format": "tensortap.runs.object_files:register_format",
    },
)
