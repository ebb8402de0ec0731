"""Trace: local variables of functions, also as HDF5."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="trace",
    offers={"probe.trace": "tensortap.rooms.trace.trace:trace"},
    needs=("track",),
)
