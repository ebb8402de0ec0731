"""Bisect: the module whose fault a difference is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.rooms.bisect.grafted_run import graft

__all__ = ["graft"]
__getattr__ = lazy(
    __name__,
    {
        "graft": "tensortap.rooms.bisect.grafted_run:graft",
    },
)
