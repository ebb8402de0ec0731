"""Rooms: one folder per capability. Each can be deleted, and a package of others can be one.

Re-exports what describes a room; `tensortap.core.rooms` finds the rooms that are installed. What a
room has beyond its verb is in its package: ``tap.rooms.trace.stack_padded_tensors``.
"""

from __future__ import annotations

import importlib
from typing import Any

from tensortap.core.rooms import Room, Tab, rooms

__all__ = ["Room", "Tab"]


def __getattr__(name: str) -> Any:
    if name not in rooms():
        raise AttributeError(f"module 'tensortap.rooms' has no attribute {name!r}")
    return importlib.import_module(f"tensortap.rooms.{name}")
