"""Widths: coordinate checks of models of several widths."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(name="widths", needs=("figures", "track"))
