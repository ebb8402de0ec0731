"""Dump: one plain file per object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.rooms.dump.files import register_format

__all__ = ["register_format"]
__getattr__ = lazy(__name__, {"register_format": "tensortap.rooms.dump.files:register_format"})
