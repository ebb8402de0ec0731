"""Widths: coordinate checks of models of several widths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.rooms.widths.coordinates import coord_check

__all__ = ["coord_check"]
__getattr__ = lazy(__name__, {"coord_check": "tensortap.rooms.widths.coordinates:coord_check"})
