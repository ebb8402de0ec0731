"""Trace: local variables of functions, also as HDF5."""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="trace",
    needs=("dump", "export", "track"),
    offers={"export.formats": "tensortap.rooms.trace.hdf5.export:FORMATS"},
)
