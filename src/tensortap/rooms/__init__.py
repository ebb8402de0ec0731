"""Rooms: one folder per capability. Each can be deleted, and a stranger's package can be one.

Re-exports what describes a room; `tensortap.core.rooms` finds the rooms that are installed.
"""

from __future__ import annotations

from tensortap.core.rooms import Room, Tab

__all__ = ["Room", "Tab"]
