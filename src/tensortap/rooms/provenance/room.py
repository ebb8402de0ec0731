"""Provenance: what is needed to do a run again."""

from __future__ import annotations

from tensortap.rooms import Room, Tab

ROOM = Room(
    name="provenance",
    commands={"reproduce": "tensortap.rooms.provenance.command:reproduce"},
    tabs=(Tab("provenance.js", 80),),
    routes="tensortap.rooms.provenance.routes:ROUTES",
    offers={"run.opened": "tensortap.rooms.provenance.keeper:keep_provenance"},
)
